"""Noise from a key: normal, repeatable, and another for every key and purpose."""

from __future__ import annotations

import numpy as np
import torch
from scipy import stats

from fedguild.privacy.dp.noise import Noise


def test_normal_numbers_are_normal() -> None:
    drawn = Noise(b"key").normal((40_001,), "test").numpy()
    assert drawn.dtype == np.float64
    assert stats.kstest(drawn, "norm").pvalue > 1e-3
    assert (
        abs(np.corrcoef(drawn[:20_000], drawn[20_000:40_000])[0, 1]) < 0.03
    )  # the two halves of Box and Muller's pairs


def test_uniform_numbers_are_uniform() -> None:
    drawn = Noise(b"key").uniform(20_000, "test")
    assert 0 <= drawn.min() < drawn.max() < 1
    assert stats.kstest(drawn, "uniform").pvalue > 1e-3


def test_key_and_purpose_decide() -> None:
    noise = Noise(b"key")
    assert torch.equal(noise.normal((2, 3), "a", 1), Noise(b"key").normal((2, 3), "a", 1))
    others = [noise.normal((2, 3), "a", "1"), noise.normal((2, 3), "b", 1), Noise(b"kez").normal((2, 3), "a", 1)]
    others += [noise.child("a", 1).normal((2, 3)), Noise.of_seed(0).normal((2, 3), "a", 1)]
    assert len({tuple(other.flatten().tolist()) for other in [*others, noise.normal((2, 3), "a", 1)]}) == 6
