"""Steps at a smaller budget: what a client trains with few active experts, others with few run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.model.on_device import on_device
from fedguild.seeding import numpy_rng


def below(experts: Tensor, client: ClientInfo) -> list[float]:
    """Returns those of the federation's numbers of active experts [n] that are below a client's own."""
    return [number for number in experts.tolist() if 1 <= number < client.budget.active_experts]


def drawn_experts(cohort: Cohort, step: int, smaller: Sequence[Sequence[float]], probability: float) -> list[int]:
    """Returns the active experts of every slot in an optimizer step (part b).

    A client's draw depends on the seed, the round, the client and the step alone.

    Args:
        cohort: The clients.
        step: The optimizer step of the round, from 0.
        smaller: `smaller[slot]`, the numbers below the client's own; where there are none, its own stays.
        probability: rho, with which one of these is drawn, each as likely as the others.
    """
    drawn = []
    for client, numbers in zip(cohort.clients, smaller, strict=True):
        rng = numpy_rng(cohort.seed, "active experts", cohort.round, client.index, step)
        takes = rng.random() < probability and len(numbers) > 0
        drawn.append(int(numbers[int(rng.integers(len(numbers)))]) if takes else client.budget.active_experts)
    return drawn


@contextmanager
def at_active_experts(cohort: Cohort, experts: Sequence[int], *, static: bool) -> Iterator[None]:
    """Runs a step, forward and backward, with other active experts.

    Args:
        cohort: The clients.
        experts: Active experts of each slot.
        static: Whether the layers' outputs are rescaled by the static ratio, which is then that of these experts.
    """
    layers = cohort.model.backbone.moe
    before = [layer.output_scale for layer in layers]
    if static:
        ratios = on_device([cohort.model.backbone.info.top_k / number for number in experts], cohort.model.device)
        for layer in layers:
            assert layer.output_scale is not None
            layer.output_scale = ratios.to(layer.output_scale)
    try:
        with cohort.model.activating(experts):
            yield
    finally:
        for layer, scale in zip(layers, before, strict=True):
            layer.output_scale = scale
