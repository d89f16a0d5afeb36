"""Sampling of the clients of a round, and its quorum."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from fedguild.client.budget import ClientInfo
from fedguild.config.federation import wanted_count
from fedguild.core.errors import ConfigError, QuorumError
from fedguild.core.seeding import numpy_rng

ROUNDING_SLACK = 1e-9
"""The excess over a whole number up to which a share times a count is not rounded up."""


def sample(
    round: int,
    clients: Sequence[ClientInfo],
    participation: float,
    seed: int,
    *,
    over_selection: float = 0.0,
    least: int = 1,
) -> list[ClientInfo]:
    """Returns the clients that a round asks, drawn uniformly without replacement, sorted by index.

    Their number is `wanted_count`, or `least` if that is more, times (1 + over_selection), rounded up, at most all. The
    draw depends on (seed, round) and the set of clients, not on their order.

    Args:
        round: The round.
        clients: All clients that could take part.
        participation: Share of the clients that takes part, above 0 and at most 1.
        seed: The run's seed.
        over_selection: Additional clients to ask, as a share of the wanted number, at least 0.
        least: The fewest to ask.

    Raises:
        ConfigError: there is no client.
    """
    wanted = max(wanted_count(len(clients), participation), least)
    if not clients:
        raise ConfigError("A round needs at least one client, but the federation has none.")
    ordered = sorted(clients, key=lambda client: client.index)
    count = min(math.ceil(wanted * (1.0 + over_selection) - ROUNDING_SLACK), len(ordered))
    drawn = numpy_rng(seed, "sample", round).choice(len(ordered), size=count, replace=False)
    return [ordered[position] for position in sorted(drawn.tolist())]


def quorum_count(asked: int, quorum: float) -> int:
    """Returns the number of the `asked` clients that must deliver, at least 1.

    Args:
        asked: Clients that the round asked.
        quorum: Their share, above 0 and at most 1, rounded up to whole clients.
    """
    return max(math.ceil(quorum * asked - ROUNDING_SLACK), 1)


def require_quorum(valid: int, asked: int, needed: int, reasons: Mapping[str, str]) -> None:
    """Raises unless enough clients delivered a valid upload.

    Args:
        valid: Clients that delivered a valid upload.
        asked: Clients that the round asked.
        needed: The quorum, as of `quorum_count`.
        reasons: Client name -> the reason for its missing or rejected upload.

    Raises:
        QuorumError: fewer than the quorum did; the message lists the reasons.
    """
    if valid >= needed:
        return
    listed = "".join(f"\n  {client}: {reason}" for client, reason in sorted(reasons.items()))
    raise QuorumError(
        f"{valid} of {asked} clients delivered a valid upload, but the quorum is {needed}.{listed}",
        "The last complete round is untouched: fix the clients and resume, or start anew with a lower "
        "federation.quorum.",
    )


def fastest(clients: Sequence[ClientInfo], enough: int | None, seed: int, round: int) -> frozenset[int]:
    """Returns the indices of the `enough` clients that a simulation treats as the fastest, drawn at random.

    An engine that trains clients one after the other has no fast and slow clients. The draw depends on (seed, round)
    and the set of clients, so over-selection favours no client and all simulating engines agree. None for `enough`
    means all.
    """
    ordered = sorted(client.index for client in clients)
    if enough is None or enough >= len(ordered):
        return frozenset(ordered)
    drawn = numpy_rng(seed, "fastest", round).choice(len(ordered), size=enough, replace=False)
    return frozenset(ordered[position] for position in drawn.tolist())
