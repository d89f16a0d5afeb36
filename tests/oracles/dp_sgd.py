"""DP-SGD with plain SGD, one example after the other (Abadi et al., CCS 2016, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from fedguild.data.batches import Encoded, collate
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD

Weights = dict[str, Tensor]


def example_gradient(backbone: Backbone, plan: AdapterPlan, weights: Mapping[str, Tensor], row: Encoded) -> Weights:
    """Returns the gradient of one example's mean loss, of a model that holds this example alone."""
    with SlotModel(backbone, [plan]) as model:
        model.load(0, weights)
        model.token_losses(collate([[row]], PAD)).mean().backward()
        return {name: t.own(0, of=t.stored.grad).clone().double() for name, t in model.trainables.items()}


def clipped(gradient: Weights, clip: float) -> Weights:
    """Returns the gradient, scaled to a norm of at most `clip`."""
    norm = torch.cat([value.flatten() for value in gradient.values()]).norm()
    return {name: value * min(1.0, clip / float(norm)) for name, value in gradient.items()}


def dp_sgd(
    backbone: Backbone,
    plan: AdapterPlan,
    start: Mapping[str, Tensor],
    batches: Sequence[Sequence[Encoded]],
    *,
    clip: float,
    deviation: float,
    divisor: float,
    rate: float,
    noise: Callable[[int, str, tuple[int, ...]], Tensor],
) -> Weights:
    """Returns the trained weights."""
    weights = {name: value.clone() for name, value in start.items()}
    trained = None
    for step, rows in enumerate(batches):
        gradients = [clipped(example_gradient(backbone, plan, weights, row), clip) for row in rows]
        names = trained or [name for name in weights if not gradients or name in gradients[0]]
        for name in names:
            total = sum((gradient[name] for gradient in gradients), torch.zeros_like(weights[name]).double())
            total = total + deviation * noise(step, name, tuple(weights[name].shape))
            weights[name] = (weights[name].double() - rate * total / divisor).to(weights[name].dtype)
    return weights
