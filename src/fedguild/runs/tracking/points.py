"""The values that trackers get, from the records of a round: one mapping for all of them.

    score/SCOPE/NAME                 a score, as the report has it; SCOPE is budget, client, summary, …
    metric/SCOPE/NAME/METRIC         every other metric of that evaluation
    loss/CLIENT, loss/mean           the mean training loss of a client, and over the clients
    upload_bytes/CLIENT, …/total     bytes up; download_bytes alike
    epsilon/CLIENT, epsilon/max      what a client has spent of its privacy
    routing/NAME/layer L             normalised_entropy and gini of the experts' use
    observed/NAME/ROW                a figure of the method that has one value for each row
    participants, rejected           how many clients were asked, and how many uploads were not aggregated
    phase_seconds/PHASE              wall time by phase
    round_seconds                    wall time of the round; the last value of every round but round 0

What a client withholds is not in the records, and so nowhere here. Figures with columns are in the report alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import NamedTuple

from fedguild.core.layout import client_name
from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    ObservationRecord,
    PrivacyRecord,
    Record,
    RoundRecord,
    RoutingRecord,
)

ROUND_SECONDS = "round_seconds"
"""The value that says that a round is complete."""
_UNUSUAL = re.compile(r"[^A-Za-z0-9_./ -]+")


class Point(NamedTuple):
    """A value of a round.

    Attributes:
        name: Letters, digits, spaces and `_./-` only, which every tracker accepts.
        value: The value; it may be NaN or infinite.
        round: The round; 0 is before training.
    """

    name: str
    value: float
    round: int


def points(records: Iterable[Record], *, clients: bool = True) -> list[Point]:
    """Returns the values of records, round by round, `round_seconds` the last of each round.

    Args:
        clients: Whether to include the values of single clients, besides means and sums over the clients.
    """
    by_round: dict[int, list[Record]] = {}
    for record in records:
        by_round.setdefault(record.round, []).append(record)
    found = []
    for number, members in sorted(by_round.items()):
        values = {_plain(name): float(value) for record in members for name, value in _values(record, clients)}
        values |= {name: float(value) for name, value in _over_clients(members)}
        if ROUND_SECONDS in values:
            values[ROUND_SECONDS] = values.pop(ROUND_SECONDS)
        found += [Point(name, value, number) for name, value in values.items()]
    return found


def _plain(name: str) -> str:
    return _UNUSUAL.sub("_", name)


def _values(record: Record, clients: bool) -> Iterator[tuple[str, float]]:
    match record:
        case EvaluationRecord(scope=scope, name=name):
            if clients or scope in ("budget", "summary", "pooled"):
                yield f"score/{scope}/{name}", record.score
                yield from ((f"metric/{scope}/{name}/{metric}", value) for metric, value in record.metrics.items())
        case ClientRecord() if clients:
            name = client_name(record.client)
            if record.train_loss is not None:
                yield f"loss/{name}", record.train_loss
            yield f"upload_bytes/{name}", record.upload_bytes
            yield f"download_bytes/{name}", record.download_bytes
        case PrivacyRecord() if clients:
            for index, epsilon in zip(record.clients, record.epsilon, strict=True):
                yield f"epsilon/{client_name(index)}", epsilon
        case ObservationRecord(columns=[]):
            for row, (value, *_) in zip(record.rows, record.values, strict=True):
                yield f"observed/{record.name}/{row}", value
        case RoutingRecord():
            for layer, (entropy, gini) in enumerate(zip(record.normalised_entropy, record.gini, strict=True)):
                yield f"routing/normalised_entropy/layer {layer}", entropy
                yield f"routing/gini/layer {layer}", gini
        case RoundRecord():
            yield "participants", len(record.participants)
            yield "rejected", len(record.rejected)
            yield from ((f"phase_seconds/{phase}", value) for phase, value in record.phase_seconds.items())
            yield ROUND_SECONDS, record.seconds


def _over_clients(records: Iterable[Record]) -> Iterator[tuple[str, float]]:
    """Yields a round's means, sums and maxima over its clients."""
    records = list(records)
    trained = [record for record in records if isinstance(record, ClientRecord)]
    losses = [record.train_loss for record in trained if record.train_loss is not None]
    if losses:
        yield "loss/mean", fmean(losses)
    if trained:
        yield "upload_bytes/total", sum(record.upload_bytes for record in trained)
        yield "download_bytes/total", sum(record.download_bytes for record in trained)
    for record in records:
        if isinstance(record, PrivacyRecord) and record.epsilon:
            yield "epsilon/max", max(record.epsilon)
