"""Delivery of the pseudo-gradient, as large as all experts' LoRA: only clients that cannot derive it download it.

A client that took part in the last round holds the Theta that it received and now receives Theta': Eq. 15 is
the difference of the two. It computes it bit by bit as the server does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.methods.ub_smoe.names import HOLDERS, LOST, PSEUDO_GRADIENT, SERVER, STEP_SIZE, TRAINING, VERSION, WITHOUT
from fedguild.methods.ub_smoe.pseudo_gradient import experts_of, pseudo_gradient
from fedguild.payload import ADAPTER, Payload, with_part
from fedguild.server.method import Upload

RECEIVED = "received"
"""The part of a client's memory with the expert LoRA that it received, and its `version`."""


class Deliveries:
    """The clients that will hold Theta after a round, and the number that lacked G~ in it."""

    def __init__(self) -> None:
        self._delivered: list[tuple[int, int]] = []
        self._lost = 0.0

    def __bool__(self) -> bool:
        return bool(self._delivered)

    def add(self, upload: Upload) -> None:
        """Records an upload."""
        self._delivered.append((upload.round, upload.client.index))
        self._lost += float(upload.payload.tensors[f"{TRAINING}/{WITHOUT}"])

    def result(self) -> dict[str, Tensor]:
        """Returns the state's part `server`; a late upload's client holds an earlier Theta, and does not count."""
        newest = max((number for number, _ in self._delivered), default=0)
        holders = sorted(client for number, client in self._delivered if number == newest)
        return {HOLDERS: torch.tensor(holders, dtype=torch.int64), LOST: torch.tensor(self._lost)}


def can_derive(state: Payload, client: ClientInfo) -> bool:
    """Whether a client can derive G~, as far as the server knows; before the first round it is 0."""
    return client.index in state.tensors[f"{SERVER}/{HOLDERS}"].tolist() or state.scalars[VERSION] == 0


def received_gradient(work: LocalWork) -> dict[str, Tensor] | None:
    """Returns G~, as sent or from the two states that the client holds (line 10).

    Empty where G~ is 0; None where the server relied on a memory that the client does not have.
    """
    version, sent = work.download.scalars[VERSION], work.download.part(PSEUDO_GRADIENT)
    if version == 0:
        return {}
    if sent:
        return sent
    kept = work.memory.tensors.get(VERSION)
    if kept is None or int(kept) + 1 != version:
        return None
    after = experts_of(work.download.part(ADAPTER))
    return pseudo_gradient(work.memory.part(RECEIVED), after, float(work.download.scalars[STEP_SIZE]))


def keep_received(cohort: Cohort, slot: int) -> None:
    """Keeps the expert LoRA that a client received, from which it derives the next G~."""
    download = cohort.work[slot].download
    version = torch.tensor(int(download.scalars[VERSION]))
    cohort.keep(slot, {**with_part(RECEIVED, experts_of(download.part(ADAPTER))), VERSION: version})
