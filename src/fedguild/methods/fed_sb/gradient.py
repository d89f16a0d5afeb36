"""The gradient of clients' losses with respect to the frozen weights that are adapted (line 2).

A frozen weight W has no gradient, but a change D of it, held at zero, has the one that W would have.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.methods.fed_sb.full_linears import FullLinears
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.plan import AdapterPlan
from fedguild.server.aggregation import WeightedMean
from fedguild.server.terms import Upload, weight_of

GRADIENT = "gradient"
"""The part of an upload with G_c, `{module}.delta`, or its sketch."""


def full_weight_plan(plan: AdapterPlan) -> AdapterPlan:
    """Returns a plan whose trainables are changes `{module}.delta` of all weights that a plan's LoRA adapts."""
    targets = plan.lora.targets
    linears = tuple(target for target in targets if target not in ("router", "experts"))
    parts: list[AdapterPart] = [FullLinears(linears)] if linears else []
    parts += [FullRouter()] if "router" in targets else []
    parts += [FullExperts()] if "experts" in targets else []
    return AdapterPlan(tuple(parts), plan.active_experts)


def mean_gradients(cohort: Cohort, sample: float) -> list[dict[str, Tensor]]:
    """Returns each slot's gradients of everything it trains, the mean over some optimizer steps; nothing is updated.

    Args:
        cohort: The clients, their adapters loaded.
        sample: Share of a client's examples to use, rounded up to whole optimizer steps of the round.

    Returns:
        For each slot name -> fp32 gradient on the CPU, at the slot's own shape.
    """
    per_step = cohort.settings.batch_size * cohort.settings.gradient_accumulation_steps
    most = [max(1, math.ceil(sample * len(work.examples) / per_step)) for work in cohort.work]
    sums: dict[str, Tensor] = {}
    for step in cohort.steps(most, pairs=True):
        step.backward(step.forward())
        if step.is_update:
            for name, trainable in cohort.trainables.items():
                grad = trainable.stored.grad
                if grad is not None:
                    sums[name] = sums[name] + grad if name in sums else grad
    return [
        {
            name: (trainable.own(slot, of=sums[name]) / report.steps).float().cpu().contiguous()
            for name, trainable in cohort.trainables.items()
            if trainable.shapes[slot] is not None
        }
        for slot, report in enumerate(cohort.reports)
    ]


def mean_upload(uploads: Iterable[Upload], weights: Literal["size", "uniform"]) -> dict[str, Tensor]:
    """Returns the mean of the clients' gradients, or of their sketches, by name (line 3); nothing without uploads."""
    mean, shapes = WeightedMean(), dict[str, torch.Size]()
    for upload in uploads:
        gradients = upload.payload.part(GRADIENT)
        mean.add(gradients, weight_of(upload.client, weights)[1])
        shapes |= {name: value.shape for name, value in gradients.items()}
    return mean.result({name: torch.zeros(()).expand(shape) for name, shape in shapes.items()})
