"""FedAlign-MoE's server: Eq. 4, 6, 7 and 13-18 against slow loops, and what waits for all clients."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch
from torch import Tensor

from fedguild.core.seeding import torch_rng
from fedguild.methods.fedalign_moe import aggregation as region
from fedguild.methods.fedalign_moe.uploads import Spool
from tests.oracles import fedalign_moe as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "normal"))


def close(found: Tensor, expected: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


# Eq. 13


@pytest.mark.parametrize("clients", [1, 2, 6])
@pytest.mark.parametrize("size", [1, 7, region.COLUMNS + 3])
def test_cosines_by_a_gram_matrix(clients: int, size: int) -> None:
    """Also across blocks of columns; client 0 of several has a zero vector."""
    rows = normal(clients, size)
    if clients > 1:
        rows[0] = 0.0
    found = region.cosines(region.gram(rows))
    close(found, [[oracle.cosine(a, b) for b in rows] for a in rows], 1e-9)


def test_tiny_and_huge_updates_have_directions() -> None:
    """Their squares are beyond fp32."""
    rows = torch.tensor([[1e-30, 0.0], [3e30, 4e30], [-1e-30, 0.0]])
    close(region.cosines(region.gram(rows)), [[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]], 1e-6)


# Eq. 14 to 18


def test_updates_without_a_direction_change_nothing() -> None:
    pairs = region.pair_weights(torch.ones(2, 2), region.cosines(region.gram(torch.zeros(2, 3))), 0.0)
    weights = region.client_weights(pairs)
    assert weights.tolist() == [0.0, 0.0]
    assert not region.combined(torch.zeros(2, 3), weights).any()


# What waits


@pytest.mark.parametrize("memory_bytes", [1, 100, 2**20])
def test_a_spool_returns_what_it_got(memory_bytes: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it stays in memory or goes to disk, and when it is read between two additions."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    values = {(key, who): normal(size, seed=who) for who in (3, 1, 2) for key, size in (("a", 7), ("b", 20))}
    del values["a", 1]
    with Spool(memory_bytes) as spool:
        for (key, who), value in values.items():
            spool.add(key, who, value.to(torch.bfloat16) if key == "b" else value)
            assert torch.equal(spool.rows(key)[-1], value.to(torch.bfloat16).float() if key == "b" else value)
        assert spool.clients("a") == [3, 2]
        assert torch.equal(spool.rows("a"), torch.stack([values["a", 3], values["a", 2]]))
        assert spool.rows("b").shape == (3, 20)
        assert spool.clients("c") == []
        assert spool._file._rolled == (memory_bytes < 500)
    assert not list(tmp_path.iterdir())


def test_sigma_is_of_all_pairs() -> None:
    """Eq. 16 divides by N squared: of (1, 0, 0, 1) the mean is .5 and the deviation .5."""
    assert math.isclose(region.adaptive_threshold(torch.eye(2), 1.0), 0.0, abs_tol=1e-12)
