import random

import numpy as np
import torch

from fedguild.core.seeding import derive, numpy_rng, torch_rng


def test_a_derived_seed_never_changes():
    assert derive(7, "shuffle", 2, 3) == 8423032956254430798


def test_every_part_matters():
    seeds = {
        derive(0),
        derive(1),
        derive(0, "shuffle"),
        derive(0, "sample"),
        derive(0, "shuffle", 1),
        derive(0, "shuffle", 1, 2),
        derive(0, "shuffle", 2, 1),
        derive(0, "shuffle", 12),
        derive(0, "shuffle", "1"),
    }
    assert len(seeds) == 9


def test_derived_seeds_fit_torch_and_spread():
    seeds = np.array([derive(3, "client", index) for index in range(2000)], dtype=np.float64)
    assert seeds.min() >= 0
    assert seeds.max() < 2**63
    assert abs(seeds.mean() / 2**63 - 0.5) < 0.03


def test_the_global_generators_stay_untouched():
    before = (random.getstate(), torch.get_rng_state(), np.random.get_state()[1].copy())
    torch.rand(3, generator=torch_rng(0, "x"))
    numpy_rng(0, "x").random(3)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    assert np.array_equal(np.random.get_state()[1], before[2])
