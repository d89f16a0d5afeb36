from __future__ import annotations

import math

import pytest
import torch

from fedguild.measuring.scores.expert_usage import expert_utilisation
from tests.oracles import metrics as oracle


def test_expert_utilisation_against_loops():
    counts = torch.tensor([[5, 0, 3, 8], [4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]])
    usage = expert_utilisation(counts, tokens=16)
    for layer, row in enumerate(counts.tolist()):
        rates = [count / 16 for count in row]
        shares = [count / sum(row) if sum(row) else 0.0 for count in row]
        assert usage.frequency[layer].tolist() == rates
        assert usage.entropy[layer].item() == pytest.approx(oracle.entropy(shares), abs=1e-12)
        assert usage.normalised_entropy[layer].item() == pytest.approx(oracle.entropy(shares) / math.log(4), abs=1e-12)
        assert usage.gini[layer].item() == pytest.approx(oracle.gini(rates), abs=1e-12)
    assert usage.gini.tolist()[1:] == pytest.approx([0.0, 0.75, 0.0])
    assert usage.normalised_entropy.tolist()[1:] == pytest.approx([1.0, 0.0, 0.0])


def test_utilisation_without_tokens_or_with_one_expert_is_defined():
    unseen = expert_utilisation(torch.zeros(2, 3), tokens=0)
    single = expert_utilisation(torch.tensor([[7]]), tokens=7)
    for usage in (unseen, single):
        assert usage.entropy.abs().max() == usage.normalised_entropy.abs().max() == usage.gini.abs().max() == 0
    assert unseen.frequency.abs().max() == 0
    assert single.frequency.item() == 1.0
