"""Validation of a FedMoE client on its held-out examples: loss, accuracy, and the experts that they activate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.client.cohort import Cohort
from fedguild.data.batches import Encoded


@dataclass(frozen=True)
class Validation:
    """A client's figures.

    Attributes:
        loss: Mean negative log-likelihood of its response tokens, in nats; 0 without any.
        accuracy: Share of its response tokens that the model finds likeliest, given those before; 0 without any.
        activation: Path of each layer's experts -> p [M], each expert's share of the activations, summing to 1
            (zeros where the layer saw no token).
    """

    loss: float
    accuracy: float
    activation: dict[str, Tensor]


@torch.no_grad()
def validate(cohort: Cohort, examples: Sequence[Sequence[Encoded]]) -> list[Validation]:
    """Returns every client's figures, at the weights as they are.

    Args:
        cohort: The clients, their trainables loaded.
        examples: `examples[slot]`, held out of training.
    """
    model = cohort.model
    sums = torch.zeros(3, len(examples), dtype=torch.float64)
    with model.collect_routing() as routing:
        for batch in cohort.batches(examples):
            logits, targets = model.logits(batch), batch.targets.to(model.device)
            losses = cross_entropy(logits, targets, reduction="none")
            right = logits.argmax(dim=-1) == targets
            for total, values in zip(sums, (losses, right, torch.ones_like(losses)), strict=True):
                total.index_add_(0, batch.group, values.cpu().double())
    loss, accuracy = sums[:2] / sums[2].clamp(min=1)
    counts = routing.counts.cpu()
    shares = (counts.double() / counts.sum(dim=-1, keepdim=True).clamp(min=1)).float()
    layers = model.backbone.info.moe
    return [
        Validation(
            float(loss[slot]),
            float(accuracy[slot]),
            {layer.experts: share[slot, : layer.num_experts] for layer, share in zip(layers, shares, strict=True)},
        )
        for slot in range(len(examples))
    ]
