"""Wrong answers of a client: what becomes of an honest one on its way to the server."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedguild.engines.flower.engine import read_upload
from fedguild.engines.flower.parcel import Parcel
from fedguild.federation.desk import Desk
from fedguild.payload import Payload
from fedguild.wire.codec import encode

LIMIT_BYTES = 100_000
"""`federation.upload_limit_bytes` under which an honest upload of the tests stays, and an oversized one does not."""
DEADLINE_SECONDS = 40.0
LATE_SECONDS = 55.0


def with_upload(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Parcel], Parcel]:
    """Returns what changes the tensors of an answer."""

    def rewrite(parcel: Parcel) -> Parcel:
        tensors = change(dict(read_upload(parcel.body, "test").tensors))
        return replace(parcel, body=encode(Payload(tensors)))

    return rewrite


def poison(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.full_like(tensors[name], float("nan"))}


def widen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.cat([tensors[name], tensors[name]])}


def too_late(parcel: Parcel) -> Parcel:
    time.sleep(LATE_SECONDS)
    return parcel


EVERY_ROUND: dict[int, tuple[Callable[[Parcel], Parcel], str]] = {
    1: (with_upload(poison), "has NaN or infinity"),
    2: (with_upload(widen), "has the shape"),
    3: (lambda parcel: replace(parcel, round=1), "the upload is of round 1, but round 3 was asked for"),
    4: (lambda parcel: replace(parcel, run="0" * 32), "the upload is of the run '0000"),
    5: (lambda parcel: replace(parcel, body=bytes(LIMIT_BYTES + 1)), f"{LIMIT_BYTES + 1} bytes, beyond the limit"),
    6: (too_late, f"did not answer within {DEADLINE_SECONDS:g} s"),
}
"""Round -> what a lying trainer makes of its answer, and what the server says."""


def lie() -> None:
    """Lets the trainer of this process answer as `EVERY_ROUND` says."""
    honest = Desk.answer

    def answer(desk: Desk, parcel: Parcel) -> Parcel:
        reply = honest(desk, parcel)
        return EVERY_ROUND[parcel.round][0](reply) if parcel.kind == "train" and parcel.round in EVERY_ROUND else reply

    Desk.answer = answer  # type: ignore[method-assign]
