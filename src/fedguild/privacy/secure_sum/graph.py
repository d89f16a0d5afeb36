"""The pairs of clients that share a mask: all pairs, or a random graph that nobody chooses (Bell et al., section 3)."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

FEWEST_CLIENTS = 3
"""Of two clients each could take its own numbers from the sum."""
LARGEST_COMPLETE = 128
"""With more clients the graph is sparse. Two thirds of all clients are then not always two thirds of a client's
neighbours, and whoever joins last can choose its keys until colluding clients are the neighbours of one client."""


def degree_of(clients: int) -> int:
    """Returns the number of neighbours of each client: all others, or 6 log2(n) for more than `LARGEST_COMPLETE`."""
    if clients <= LARGEST_COMPLETE:
        return max(0, clients - 1)
    return min(clients - 1, 2 * math.ceil(3 * math.log2(clients)))


def neighbours(clients: Sequence[int], degree: int, seed: bytes) -> dict[int, tuple[int, ...]]:
    """Returns client -> its neighbours, ascending: those within degree / 2 places in a ring in random order.

    Such a graph stays connected as long as fewer than `degree` / 2 clients in a row are missing. The relation is
    symmetric.

    Args:
        degree: An even number, or at least the number of other clients for a complete graph.
        seed: Public randomness, which orders the ring.
    """
    if degree >= len(clients) - 1:
        return {client: tuple(sorted(set(clients) - {client})) for client in clients}
    ring = sorted(clients, key=lambda client: hashlib.sha256(seed + client.to_bytes(8, "little")).digest())
    reach = range(1, degree // 2 + 1)
    return {
        client: tuple(sorted(ring[(place + step * side) % len(ring)] for step in reach for side in (-1, 1)))
        for place, client in enumerate(ring)
    }


def threshold_of(holders: int, share: float) -> int:
    """Returns the threshold t of `holders`: more than `share` of them (all for 1), more than half, at least 2.

    Two sets of t holders have at least 2t - n in common. For a share of two thirds that is more than n / 3, so a third
    of the holders colluding cannot give the server both secrets of a client (Bonawitz et al., section 6.2).
    """
    return max(2, min(holders, max(holders // 2, math.floor(share * holders + 1e-9)) + 1))
