"""Utilisation and modulation against Eq. 12-14."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import Payload
from fedguild.methods.ub_smoe import UbSmoe
from fedguild.methods.ub_smoe.modulation import Range, modulate, next_modulation, target_modulation
from fedguild.server.terms import RunningMeans, Upload
from tests.oracles import ub_smoe as oracle
from tests.server.test_utilisation import RATES

SHARES = [[0.5, 1.0, 0.0, 0.5], [1.0, 0.0, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]]
"""Three clients with 2, 1 and 1 active experts; the third saw no token."""


def rate_of(shares: list[list[float]], examples: list[int]) -> dict[str, Tensor]:
    """As the server finds it from what clients send."""
    method, means = UbSmoe(UbSmoe.Settings()), RunningMeans()
    figures = {name: torch.zeros(()) for name in ("step_size", "without_pseudo_gradient")}
    for index, (share, count) in enumerate(zip(shares, examples, strict=True)):
        sent = Payload.of({"utilisation": {"layer": torch.tensor(share)}, "training": figures})
        upload = Upload(1, ClientInfo(index, Budget("one", 2, 4), count), sent)
        means.add(upload, method.terms(upload))
    return means.moved("utilisation", {})


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


@pytest.mark.parametrize("kind", ["hinge", "clamp", "scale"])
@pytest.mark.parametrize("ends", [(-0.5, 0.5), (-1.0, 1.0), (-2.0, 2.0), (-0.5, 1.5)])
def test_thirty_rounds_by_the_three_readings_of_the_range(kind: str, ends: tuple[float, float]) -> None:
    """Table 20's ranges; the rates are constant, from an expert that nobody uses to one that everybody does."""
    rates = [0.0, 0.05, 0.125, 0.4, 1.0, 0.125, 0.2, 0.1]
    phi, expected = {"b.phi": torch.zeros(8, dtype=torch.float64)}, [0.0] * 8
    limits = Range(*ends, kind=kind)  # type: ignore[arg-type]
    for _ in range(30):
        phi = modulate(phi, {"b": torch.tensor(rates, dtype=torch.float64)}, 1.0, 0.9, 1e-6, limits)
        expected = [oracle.next_phi(p, rate, 1 / 8, 0.9, *ends, kind) for p, rate in zip(expected, rates, strict=True)]
    assert phi["b.phi"].tolist() == pytest.approx(expected, rel=1e-9)
    if kind != "hinge":
        assert ends[0] <= float(phi["b.phi"].min()) <= float(phi["b.phi"].max()) <= ends[1]
