"""Faulty replies of a client: ways in which an honest reply is changed, and what the server says about each."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import torch

from fedguild.core.codec import encode
from fedguild.core.payload import Payload
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.trainer_service import TrainerService

Tensors = dict[str, torch.Tensor]
Change = Callable[[Message], Message]

LIMIT_BYTES = 100_000
"""A value of `federation.upload_limit_bytes` above an honest upload of the tests."""
DEADLINE_SECONDS = 40.0
LATE_SECONDS = 55.0


def with_upload(change: Callable[[Tensors], Tensors]) -> Change:
    def rewrite(reply: Message) -> Message:
        return replace(reply, body=encode(Payload(change(dict(read_payload(reply.body, "test").tensors)))))

    return rewrite


def poison(tensors: Tensors) -> Tensors:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.full_like(tensors[name], float("nan"))}


def widen(tensors: Tensors) -> Tensors:
    name = sorted(tensors)[0]
    return {**tensors, name: torch.cat([tensors[name], tensors[name]])}


def delay(reply: Message) -> Message:
    time.sleep(LATE_SECONDS)
    return reply


FAULTS: dict[str, tuple[Change, str]] = {
    "not a number": (with_upload(poison), "has NaN or infinity"),
    "a wrong shape": (with_upload(widen), "has the shape"),
    "damaged bytes": (lambda reply: replace(reply, body=reply.body[:-100]), "cannot be decoded"),
    "another run": (lambda reply: replace(reply, run="0" * 32), "the upload is of the run '0000"),
    "another round": (lambda reply: replace(reply, round=99), "the upload is of round 99, but round "),
    "another client": (lambda reply: replace(reply, client=0), "this client was not asked for one"),
    "no report": (lambda reply: replace(reply, metadata={}), "has no readable training report"),
    "a failure of its own": (lambda reply: reply.reply(failure="out of memory"), "out of memory"),
    "too large": (
        lambda reply: replace(reply, body=bytes(LIMIT_BYTES + 1)),
        f"{LIMIT_BYTES + 1} bytes, beyond the limit of {LIMIT_BYTES}",
    ),
    "too late": (delay, f"did not answer within {DEADLINE_SECONDS:g} s"),
}
"""A fault -> how it changes a reply, and what the server says about it."""

FAULT_OF_ROUND = {
    1: "not a number",
    2: "a wrong shape",
    3: "another round",
    4: "another run",
    5: "too large",
    6: "too late",
}
"""Round -> the fault of a faulty trainer's reply."""


def corrupt_trainer() -> None:
    handle = TrainerService.handle

    def corrupted(trainer: TrainerService, message: Message) -> Message:
        reply = handle(trainer, message)
        fault = FAULT_OF_ROUND.get(message.round) if message.kind == "train" else None
        return reply if fault is None else FAULTS[fault][0](reply)

    TrainerService.handle = corrupted  # type: ignore[method-assign]
