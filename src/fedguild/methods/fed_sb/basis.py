"""Distribution of A and B: each client receives them once and keeps them."""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import LocalWork
from fedguild.core.payload import ADAPTER, Payload
from fedguild.server.terms import Upload

BASIS = "basis"
"""The part of the state and of downloads with A and B."""
LOST = "lost"
"""A scalar of an upload: whether the client should have kept A and B but no longer has them."""
HOLDERS = "server/holders"
"""In the state: indices of the clients that keep A and B."""


class Holders:
    """The clients that keep A and B.

    Args:
        state: The state before the round; None for no clients.
    """

    def __init__(self, state: Payload | None = None) -> None:
        self._indices: set[int] = set(state.tensors[HOLDERS].tolist()) if state else set()

    def __contains__(self, client: ClientInfo) -> bool:
        return client.index in self._indices

    def trained(self, upload: Upload) -> bool:
        """Records an upload's client; returns whether the upload has an R that was trained between A and B.

        The R of a client that lost A and B does not count. A gradient that arrives late has none.
        """
        if upload.payload.scalars.get(LOST):
            self._indices.discard(upload.client.index)
            return False
        if not upload.payload.part(ADAPTER):
            return False
        self._indices.add(upload.client.index)
        return True

    def tensors(self) -> dict[str, Tensor]:
        """Returns them as the state holds them."""
        return {HOLDERS: torch.tensor(sorted(self._indices), dtype=torch.int64)}


def basis_of(work: LocalWork) -> dict[str, Tensor]:
    """Returns A and B, from the download or from the client's memory; nothing where neither has them."""
    return work.download.part(BASIS) or dict(work.memory.tensors)
