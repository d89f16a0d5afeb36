"""Uploads through the server's filters, without a round around them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from fedguild.config.federation import FederationSettings
from fedguild.core.payload import Payload
from fedguild.server.method import Method, Upload
from fedguild.server.round import Filter, Outcome, Passage, RoundSetup, filtered


class Rejected(dict[int, str]):
    """Client index -> why its upload is not aggregated."""

    def __call__(self, upload: Upload, reason: str) -> None:
        self[upload.client.index] = reason


def through(
    filters: Sequence[Filter],
    method: Method,
    state: Payload,
    uploads: Iterable[Upload],
    *,
    wanted: int = 3,
    bounded: Collection[str] = (),
) -> tuple[Payload, Rejected]:
    """Returns the state after round 3, and who is not in it."""
    unused: Any = None
    rejected = Rejected()
    setup = RoundSetup(method, unused, unused, FederationSettings(), 0, filters)
    return filtered(Passage(setup, Outcome(3, state, []), state, wanted, rejected, bounded))(uploads), rejected
