"""Delivery of the pseudo-gradient, as large as all experts' LoRA: only clients that cannot derive it download it.

A client that took part in the last round holds the Theta that it received and now receives Theta': Eq. 15 is
the difference of the two. It computes it bit by bit as the server does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.core.payload import ADAPTER, SERVER, Payload, with_part
from fedguild.methods.ub_smoe.names import HOLDERS, LOST, PSEUDO_GRADIENT, STEP_SIZE, VERSION, WITHOUT
from fedguild.methods.ub_smoe.pseudo_gradient import experts_of, pseudo_gradient
from fedguild.server.terms import Means

RECEIVED = "received"
"""The part of a client's memory with the expert LoRA that it received, and its `version`."""


def no_holders() -> dict[str, Tensor]:
    """Returns the state's part `server` before the first round."""
    return {HOLDERS: torch.tensor([], dtype=torch.int64), LOST: torch.zeros(())}


def holders_after(means: Means) -> dict[str, Tensor]:
    """Returns the state's part `server`: who holds Theta after a round, and how many lacked G~ in it.

    A late upload's client holds an earlier Theta, and does not count.
    """
    newest = max(each.round for each in means.contributors)
    holders = sorted(each.client.index for each in means.contributors if each.round == newest)
    return {HOLDERS: torch.tensor(holders, dtype=torch.int64), LOST: means.total(WITHOUT).float()[0]}


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
