"""DPO (Rafailov et al., 2023, Eq. 7), pair by pair, over models with merged weights."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from fedguild.data.batches import Encoded
from tests.oracles.lora import MergedModel


def log_likelihood(model: MergedModel, row: Encoded) -> Tensor:
    """log pi of a row's learned tokens, token by token."""
    log_p = model.logits(row.input_ids).log_softmax(dim=-1)
    total = log_p.new_zeros(())
    for at in row.targets.tolist():
        total = total + log_p[at - 1, row.input_ids[at]]
    return total


def loss(policy: MergedModel, reference: MergedModel, pairs: Sequence[Encoded], beta: float) -> Tensor:
    """The mean over the pairs of -log sigmoid(beta (gain of the chosen answer - gain of the rejected one))."""
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        assert pair.rejected is not None
        gains = [log_likelihood(policy, row) - log_likelihood(reference, row).detach() for row in (pair, pair.rejected)]
        total = total + torch.log1p(torch.exp(-beta * (gains[0] - gains[1])))
    return total / len(pairs)


def rewards(own: tuple[float, float], reference: tuple[float, float], beta: float) -> tuple[float, float]:
    """Accuracy and margin of one pair, from its answers' losses under the model and under the reference."""
    chosen, rejected = (beta * (theirs - mine) for mine, theirs in zip(own, reference, strict=True))
    return (0.5 if math.isclose(chosen, rejected, abs_tol=1e-4) else float(chosen > rejected)), chosen - rejected
