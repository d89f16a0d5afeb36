"""Utilisation and modulation against Eq. 12-14."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedguild.methods.ub_smoe.modulation import UtilisationRate, next_modulation, target_modulation
from tests.oracles import ub_smoe as oracle
from tests.server.test_utilisation import RATES

SHARES = [[0.5, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
"""Three clients with 2, 1 and 1 active experts; the third saw no token."""


def rate_of(shares: list[list[float]], examples: list[int]) -> dict[str, Tensor]:
    running = UtilisationRate()
    for share, count in zip(shares, examples, strict=True):
        running.add({"layer": torch.tensor(share)}, count)
    return running.result()


def test_the_rate_by_hand() -> None:
    """p = (1/4, 3/4) of the two clients with tokens: 1/4 · 0.5 + 3/4 · 1 = 0.875, 0.25, 0, 0.125."""
    assert rate_of(SHARES, [10, 30, 60])["layer"].tolist() == pytest.approx([0.875, 0.25, 0.0, 0.125])


@pytest.mark.parametrize("clients", [1, 2, 3])
def test_the_rate_is_equation_12s(clients: int) -> None:
    examples = [7, 2, 9][:clients]
    expected = oracle.utilisation(SHARES[:clients], examples)
    torch.testing.assert_close(rate_of(SHARES[:clients], examples)["layer"], torch.tensor(expected), rtol=1e-6, atol=0)


def test_a_layer_that_no_token_reached_has_no_rate() -> None:
    assert rate_of([SHARES[2]], [5]) == {}
    assert oracle.utilisation([SHARES[2]], [5]) is None
    assert rate_of([], []) == {}


@pytest.mark.parametrize("rate", RATES)
@pytest.mark.parametrize("zeta", [0.0, 0.9, 1.0])
def test_modulation_is_equations_13_and_14(rate: list[float], zeta: float) -> None:
    phi = torch.linspace(-0.9, 0.8, len(rate), dtype=torch.float64)
    target = target_modulation(torch.tensor(rate, dtype=torch.float64), 1.5, 1e-6)
    expected = oracle.modulation(phi.tolist(), rate, 1.5, zeta, 1e-6)
    found = next_modulation(phi, target, zeta)
    assert found.tolist() == pytest.approx(expected, rel=1e-12)
    assert target.abs().max() <= 1


def test_modulation_by_hand() -> None:
    """M = 4, K-bar = 1: u* = 1/4; a rate of 1/2 gives tanh(-1/2), 1/4 gives 0, an unused expert nearly 1."""
    target = target_modulation(torch.tensor([0.5, 0.25, 0.0, 0.25]), 1.0, 1e-9)
    assert target.tolist() == pytest.approx([math.tanh(-0.5), 0.0, 1.0, 0.0], abs=1e-6)
    assert next_modulation(torch.tensor([0.5]), torch.tensor([1.0]), 0.9).tolist() == pytest.approx([0.55])
