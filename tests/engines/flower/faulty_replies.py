"""Faulty replies of a client: corruptions of an honest reply, one for each round."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedguild.engines.flower.engine import read_payload
from fedguild.engines.flower.message import Message
from fedguild.federation.trainer_service import TrainerService
from fedguild.payload import Payload
from fedguild.wire.codec import encode

LIMIT_BYTES = 100_000
"""`federation.upload_limit_bytes` under which an honest upload of the tests stays, and an oversized one does not."""
DEADLINE_SECONDS = 40.0
LATE_SECONDS = 55.0


def with_upload(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Callable[[Message], Message]:
    """Returns a function that changes the tensors of a reply."""

    def rewrite(message: Message) -> Message:
        tensors = change(dict(read_payload(message.body, "test").tensors))
        return replace(message, body=encode(Payload(tensors)))

    return rewrite


def poison(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.full_like(tensors[name], float("nan"))}


def widen(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.cat([tensors[name], tensors[name]])}


def too_late(message: Message) -> Message:
    time.sleep(LATE_SECONDS)
    return message


EVERY_ROUND: dict[int, tuple[Callable[[Message], Message], str]] = {
    1: (with_upload(poison), "has NaN or infinity"),
    2: (with_upload(widen), "has the shape"),
    3: (lambda message: replace(message, round=1), "the upload is of round 1, but round 3 was asked for"),
    4: (lambda message: replace(message, run="0" * 32), "the upload is of the run '0000"),
    5: (lambda message: replace(message, body=bytes(LIMIT_BYTES + 1)), f"{LIMIT_BYTES + 1} bytes, beyond the limit"),
    6: (too_late, f"did not answer within {DEADLINE_SECONDS:g} s"),
}
"""Round -> how a faulty trainer changes its reply, and what the server says."""


def corrupt_trainer() -> None:
    """Makes the trainer of this process reply as `EVERY_ROUND` says."""
    honest = TrainerService.handle

    def handle(trainer: TrainerService, message: Message) -> Message:
        reply = honest(trainer, message)
        faulty = message.kind == "train" and message.round in EVERY_ROUND
        return EVERY_ROUND[message.round][0](reply) if faulty else reply

    TrainerService.handle = handle  # type: ignore[method-assign]
