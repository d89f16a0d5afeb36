"""Uploads of a round of FedAlign-MoE, kept until all have arrived.

The cosines of Eq. 13 are between all pairs of clients, so no running sum will do. The updates wait
in a spool, in memory up to a size and on disk beyond; the server then holds one upload, and later
all clients' versions of one expert, whatever the number of experts.
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo

MEMORY_BYTES = 2**28
"""Size up to which a spool stays in memory before it moves to a temporary file (256 MiB)."""


class Spool:
    """Values by key and client. Use as a context manager.

    Args:
        memory_bytes: Size up to which it stays in memory; beyond it, everything moves to an unnamed
            file in the folder for temporary files (`TMPDIR`).
    """

    def __init__(self, memory_bytes: int = MEMORY_BYTES) -> None:
        self._file = tempfile.SpooledTemporaryFile(max_size=memory_bytes)  # noqa: SIM115
        self._places: dict[str, list[tuple[int, int, int]]] = defaultdict(list)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def add(self, key: str, client: int, value: Tensor) -> None:
        """Keeps a client's value, as fp32."""
        content = value.detach().to("cpu", torch.float32).contiguous().numpy()
        self._places[key].append((client, self._file.seek(0, 2), content.size))
        self._file.write(content.tobytes())

    def clients(self, key: str) -> list[int]:
        """Returns the clients with a value of this key, in the order of arrival."""
        return [client for client, _, _ in self._places.get(key, ())]

    def rows(self, key: str) -> Tensor:
        """Returns [n, P], the values of the clients that `clients` returns, each flattened."""
        rows = []
        for _, start, size in self._places[key]:
            self._file.seek(start)
            rows.append(np.frombuffer(self._file.read(4 * size), dtype=np.float32))
        return torch.from_numpy(np.stack(rows))


class RegionUploads:
    """The uploads of one round, as the aggregation asks for them.

    Args:
        spool: The buffer for mu and dtheta of every expert.
    """

    def __init__(self, spool: Spool) -> None:
        self._spool = spool
        self._examples: dict[int, int] = {}
        self._routing: dict[str, list[Tensor]] = defaultdict(list)
        self._margin: dict[str, list[Tensor]] = defaultdict(list)

    def add(
        self,
        client: ClientInfo,
        routing: Mapping[str, Tensor],
        margin: Mapping[str, Tensor],
        regions: Mapping[str, Tensor],
        updates: Mapping[str, Tensor],
    ) -> None:
        """Adds one client's upload.

        Args:
            client: The client.
            routing: Layer -> p-bar [M]; all zero where the client had no token.
            margin: Layer -> m [M].
            regions: `layer/expert` -> mu [H].
            updates: `layer/expert` -> dtheta [1, P]; an expert without a mu is left out.
        """
        self._examples[client.index] = client.examples
        for layer, mean in routing.items():
            self._routing[layer].append(mean.double().clamp(0, 1))
            self._margin[layer].append(margin[layer].double().clamp(0, 1))
        for key in sorted(updates.keys() & regions.keys()):
            self._spool.add(f"update/{key}", client.index, updates[key])
            self._spool.add(f"region/{key}", client.index, regions[key])

    def statistics(self, layer: str) -> tuple[Tensor, Tensor]:
        """Returns p-bar and m [N, M] of the clients that had tokens in this layer; [0, 0] without any."""
        if layer not in self._routing:
            return torch.zeros(0, 0), torch.zeros(0, 0)
        routing, margin = torch.stack(self._routing[layer]), torch.stack(self._margin[layer])
        present = routing.sum(dim=1) > 0
        return routing[present], margin[present]

    def versions(self, key: str) -> tuple[list[int], Tensor, Tensor]:
        """Returns the n clients that sent this expert, their mu [n, H] and their dtheta [n, P]."""
        clients = self._spool.clients(f"update/{key}")
        if not clients:
            return [], torch.zeros(0, 0), torch.zeros(0, 0)
        return clients, self._spool.rows(f"region/{key}"), self._spool.rows(f"update/{key}")

    def shares(self, clients: Sequence[int]) -> Tensor:
        """Returns the share [n] that these clients have of all examples of the round's clients."""
        sizes = torch.tensor([self._examples[client] for client in clients], dtype=torch.float64)
        return sizes / sum(self._examples.values())
