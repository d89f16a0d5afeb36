"""Plain local training: load the received adapter, minimise the loss, upload the trained adapter."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.client.private_training import train_privately
from fedguild.core.payload import ADAPTER, Payload


def load_received(cohort: Cohort) -> None:
    """Sets every client's trainables to the adapter of its download."""
    for slot, work in enumerate(cohort.work):
        cohort.load(slot, work.download.part(ADAPTER))


def train(cohort: Cohort, penalty: Callable[[], Tensor] | None = None, *, keep: bool = False) -> list[Payload]:
    """Runs the round's steps of every client; returns the trained adapters as uploads, in slot order.

    Args:
        cohort: The clients, their trainables loaded.
        penalty: Returns [S], a term added to each client's loss once per optimizer step, with gradients. It may depend
            on the trainables only.
        keep: Whether the clients keep their trained adapters in their memory.
    """
    if cohort.private is not None:
        train_privately(cohort, penalty)
    else:
        for step in cohort.steps(pairs=True):
            loss = step.forward()
            if penalty is not None and step.is_update:
                loss = loss + penalty()
            step.backward(loss)
            step.apply()
    uploads = trained_adapters(cohort)
    if keep:
        for slot, upload in enumerate(uploads):
            cohort.keep(slot, upload.part(ADAPTER))
    return uploads


def trained_adapters(cohort: Cohort) -> list[Payload]:
    return [Payload.of({ADAPTER: cohort.read(slot)}) for slot in range(len(cohort.work))]


def activation_frequency(cohort: Cohort, slot: int, unit: str = "token") -> dict[str, Tensor]:
    """Returns a client's activation frequencies in this round's training: experts' path -> [M] fp32.

    Args:
        unit: The unit of counting; see `RoutingStatistics.frequency`.
    """
    assert cohort.routing is not None
    shares = cohort.routing.frequency(unit)[:, slot].float().cpu()
    layers = cohort.model.backbone.info.moe
    return {layer.experts: share[: layer.num_experts] for layer, share in zip(layers, shares, strict=True)}
