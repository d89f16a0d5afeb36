"""Entropy and the Gini coefficient of utilisation against loops."""

from __future__ import annotations

import pytest
import torch

from fedguild.server.utilisation import gini, rate_entropy, share_entropy
from tests.oracles import ub_smoe as oracle

RATES = [
    [0.25, 0.25, 0.25, 0.25],
    [2.0, 0.0, 0.0, 0.0],
    [0.0, 0.0, 0.0, 0.0],
    [0.9, 0.3, 0.4, 0.4],
    [1.0, 0.5, 0.0],
    [0.7],
]


@pytest.mark.parametrize("rate", RATES)
def test_entropy_and_gini(rate: list[float]) -> None:
    tensor, total = torch.tensor(rate, dtype=torch.float64), sum(rate)
    shares = [u / total for u in rate] if total else rate
    assert float(rate_entropy(tensor)) == pytest.approx(oracle.entropy(rate), abs=1e-12)
    assert float(share_entropy(tensor)) == pytest.approx(oracle.entropy(shares), abs=1e-12)
    assert float(gini(tensor)) == pytest.approx(oracle.gini(rate), abs=1e-12)
