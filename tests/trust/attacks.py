"""Hostile answers: ways in which an honest answer is changed, and what the server says about each."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedguild.core.codec import encode
from fedguild.core.payload import Payload
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.testing import Message

Attack = Callable[[Message], Message | bytes]
HUGE = 10**400
ESCAPE = "\x1b[2K\rclient-000 is there: 9 examples\n"


def saying(**values: Any) -> Attack:
    """Returns the attack that changes some of an answer's metadata; `...` leaves a value out."""

    def attack(answer: Message) -> Message:
        metadata = {**answer.metadata, **values}
        return replace(answer, metadata={key: value for key, value in metadata.items() if value is not ...})

    return attack


def framed(header: str) -> Attack:
    data = header.encode()
    return lambda answer: len(data).to_bytes(8, "little") + data + answer.body


def uploading(change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> Attack:
    def attack(answer: Message) -> Message:
        payload = read_payload(answer.body, "test")
        return replace(answer, body=encode(Payload(change(dict(payload.tensors)), payload.scalars)))

    return attack


def filled(value: float) -> Attack:
    return uploading(lambda tensors: {name: torch.full_like(tensor, value) for name, tensor in tensors.items()})


def packed(header: str | dict[str, Any], data: bytes = b"") -> Attack:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return lambda answer: replace(answer, body=struct.pack("<Q", len(text)) + text + data)


def tensor(shape: list[Any], offsets: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"adapter/x": {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


def nested(depth: int) -> str:
    return "[" * depth + "]" * depth


TRAIN: dict[str, tuple[Attack, str]] = {
    "metadata of null": (packed({"__metadata__": None}), "cannot be decoded"),
    "metadata that is a list": (packed({"__metadata__": []}), "cannot be decoded"),
    "a header that is a list": (packed("[]"), "cannot be decoded"),
    "a shape of 2^126 zeros": (packed(tensor([0, 2**63 - 1, 2**63 - 1], [0, 0])), "cannot be decoded"),
    "a shape of 2^62 values": (packed(tensor([2**31, 2**31], [0, 2**64])), "cannot be decoded"),
    "a negative shape": (packed(tensor([-1, 4], [0, 16]), bytes(16)), "cannot be decoded"),
    "a shape of truth values": (packed(tensor([True, True], [0, 4]), bytes(4)), "cannot be decoded"),
    "forty dimensions": (packed(tensor([1] * 40, [0, 4]), bytes(4)), "cannot be decoded"),
    "offsets beyond the end": (packed(tensor([4], [2**40, 2**40 + 16])), "cannot be decoded"),
    "an unknown dtype": (packed(tensor([4], [0, 16], "F99"), bytes(16)), "cannot be decoded"),
    "a deep tensor header": (packed(nested(100_000)), "cannot be decoded"),
    "deep scalars": (packed({"__metadata__": {"scalars": nested(100_000)}}), "cannot be decoded"),
    "a scalar of 5000 digits": (packed({"__metadata__": {"scalars": f'{{"a": {"9" * 5000}}}'}}), "cannot be decoded"),
    "a scalar that is no number": (packed({"__metadata__": {"scalars": '{"a": NaN}'}}), "lacks"),
    "a length beyond the end": (lambda answer: replace(answer, body=b"\xff" * 8), "cannot be decoded"),
    "no bytes": (lambda answer: replace(answer, body=b""), "cannot be decoded"),
    "two megabytes more": (lambda answer: replace(answer, body=answer.body + bytes(2**21)), "has at most"),
    "steps without end": (saying(steps=math.inf), "steps"),
    "steps of 10^400": (saying(steps=HUGE), "steps"),
    "steps as text": (saying(steps="1"), "steps"),
    "steps that are true": (saying(steps=True), "steps"),
    "half a step": (saying(steps=0.5), "steps"),
    "steps of -1": (saying(steps=-1), "steps"),
    "no steps": (saying(steps=...), "steps"),
    "10^300 tokens": (saying(tokens=10**300), "tokens"),
    "tokens that are a list": (saying(tokens=[1]), "tokens"),
    "10^300 examples": (saying(examples=10**300), "examples"),
    "a loss that is no number": (saying(loss=math.nan), "loss"),
    "a loss of 1e308": (saying(loss=1e308), "loss"),
    "a loss of 10^400": (saying(loss=HUGE), "loss"),
    "seconds that are no number": (saying(seconds=math.nan), "seconds"),
    "negative seconds": (saying(seconds=-1e30), "seconds"),
    "memory of 10^400": (saying(peak_memory_bytes=HUGE), "peak_memory_bytes"),
    "memory as a fraction": (saying(peak_memory_bytes=1.5), "peak_memory_bytes"),
    "a frequency of another shape": (saying(frequency=[[0.5]]), "activations of 1 layers with 1 experts"),
    "a ragged frequency": (saying(frequency=[[0.5], [0.5, 0.5]]), "frequency"),
    "a flat frequency": (saying(frequency=[0.5, 0.5]), "frequency"),
    "an empty frequency": (saying(frequency=[]), "frequency"),
    "a deep frequency": (saying(frequency=[[[[0.5]]]]), "frequency"),
    "a frequency that is no number": (saying(frequency=[[math.nan] * 8] * 2), "frequency"),
    "a frequency of 1e308": (saying(frequency=[[1e308] * 8] * 2), "frequency"),
    "a frequency of all experts": (saying(frequency=[[1.0] * 8] * 2), "sum to 8, but a token activates at most"),
    "a frequency of text": (saying(frequency="much"), "frequency"),
    "metadata that is empty": (lambda answer: replace(answer, metadata={}), "no readable training report"),
    "a header that is no JSON": (framed("{"), "unreadable header"),
    "a header of lists": (framed(nested(1000)), "unreadable header"),
    "a header of 40 levels": (
        framed(json.dumps({"kind": "train", "run": "a", "metadata": {"a": json.loads(nested(40))}})),
        "nested more than",
    ),
    "a header of null": (framed("null"), "header of the wrong form"),
    "a header with a number of 5000 digits": (framed(f'{{"round": {"9" * 5000}}}'), "header"),
    "a header of 17 MB": (framed(" " * (2**24 + 1)), "beyond the limit"),
    "a header of 17 MB in 5.7 million letters": (framed(f'{{"kind": "{"€" * 5_700_000}"}}'), "beyond the limit"),
    "a header that is no text": (lambda answer: b"\x02" + bytes(7) + b"\xff\xfe", "unreadable header"),
    "a message cut off": (lambda answer: answer.to_bytes()[:20], "cut off"),
    "an empty message": (lambda answer: b"", "cut off"),
    "an unknown kind": (lambda answer: replace(answer, kind="own"), "header of the wrong form"),  # type: ignore[arg-type]
    "another kind": (lambda answer: replace(answer, kind="hello"), "an answer to 'hello'"),
    "round 10^400": (lambda answer: replace(answer, round=HUGE), "header of the wrong form"),
    "round -1": (lambda answer: replace(answer, round=-1), "header of the wrong form"),
    "client -7": (lambda answer: replace(answer, client=-7), "header of the wrong form"),
    "another client": (lambda answer: replace(answer, client=0), "this client was not asked for one"),
    "another round": (lambda answer: replace(answer, round=77_777), "of round 77777"),
    "another run": (lambda answer: replace(answer, run="0" * 32), "is of the run '0000"),
    "a run that is a path": (lambda answer: replace(answer, run="../../etc"), "header of the wrong form"),
    "a run of a million letters": (lambda answer: replace(answer, run="a" * 10**6), "header of the wrong form"),
    "an unknown codec": (lambda answer: replace(answer, codec="zip"), "header of the wrong form"),
    "a failure with escapes": (lambda answer: answer.reply(failure=ESCAPE), "client-000 is there: 9 examples"),
    "a failure of a surrogate": (
        lambda answer: framed(answer.reply(failure="\ud800no").header())(answer),
        "unreadable header",
    ),
    "a failure of a megabyte": (lambda answer: answer.reply(failure="x" * 10**6), "xxx…"),
    "a tensor's name with escapes": (uploading(lambda named: {**named, ESCAPE: torch.ones(1)}), "has unknown"),
    "a tensor's name of a megabyte": (uploading(lambda named: {**named, "x" * 10**6: torch.ones(1)}), "has unknown"),
    "no tensors": (uploading(lambda named: {}), "lacks"),
    "ten thousand empty tensors": (
        uploading(lambda named: {**named, **{f"a/{number}": torch.zeros(0) for number in range(10_000)}}),
        "tensors are expected at most",
    ),
    "a tensor in two dtypes": (
        uploading(lambda named: {**named, **{f"{name}#bf16": value.bfloat16() for name, value in named.items()}}),
        "came twice, in two dtypes",
    ),
    "whole numbers": (uploading(lambda named: {n: t.to(torch.int32) for n, t in named.items()}), "is int32"),
    "int8 without scales": (
        uploading(lambda named: {f"{n}#int8": t.to(torch.int8) for n, t in named.items()}),
        "without a scale",
    ),
    "scales that are no number": (
        uploading(
            lambda named: {
                **{f"{n}#int8": t.to(torch.int8) for n, t in named.items()},
                **{f"{n}#scale": torch.full((*t.shape[:-1], 1), math.nan) for n, t in named.items()},
            }
        ),
        "NaN or infinity",
    ),
    "not a number": (filled(math.nan), "NaN or infinity"),
    "infinity": (filled(math.inf), "NaN or infinity"),
    "values of 1e30": (filled(1e30), "has a value of 1e+30"),
    "values of -3e38": (filled(-3e38), "has a value of 3e+38"),
}
"""An attack on a round -> how it changes the answer, and what is said about it."""

HELLO: dict[str, Attack] = {
    "a budget that is a list": saying(budget=[]),
    "a budget of null": saying(budget=None),
    "an unknown budget": saying(budget="own"),
    "a budget with escapes": saying(budget=ESCAPE),
    "sizes of 10^400": saying(sizes={"train": HUGE, "validation": 0, "test": 0}),
    "sizes of 10^15": saying(sizes={"train": 10**15, "validation": 0, "test": 0}),
    "sizes that are a list": saying(sizes=[1, 2, 3]),
    "sizes without a split": saying(sizes={"train": 3}),
    "a size as text": saying(sizes={"train": "9", "validation": 0, "test": 0}),
    "no training examples": saying(sizes={"train": 0, "validation": 0, "test": 0}),
    "a negative size": saying(sizes={"train": 1, "validation": -1, "test": 0}),
    "a version that is a list": saying(fedguild=[]),
    "another version": saying(fedguild="9.9"),
    "a model that is an object": saying(model={}),
    "another model": saying(model="0" * 16),
    "a method of another package": saying(method="guild-extras 1.1"),
    "nothing": lambda answer: replace(answer, metadata={}),
    "a summary with escapes": saying(summary=ESCAPE),
    "a summary of a megabyte": saying(summary="x" * 10**6),
    "a summary of a surrogate": lambda answer: framed(
        replace(answer, metadata={**answer.metadata, "summary": "\udfff"}).header()
    )(answer),
    "another client": lambda answer: replace(answer, client=0),
    "client 10^6 + 1": lambda answer: replace(answer, client=10**6 + 1),
    "client -1": lambda answer: replace(answer, client=-1),
    "another run": lambda answer: replace(answer, run="0" * 32),
    "another kind": lambda answer: replace(answer, kind="train"),
    "no JSON": framed("{"),
    "a deep header": framed(nested(100_000)),
    "an empty message": lambda answer: b"",
    "a failure with escapes": lambda answer: answer.reply(failure=ESCAPE),
}
"""An attack on the server's question who a node is -> how it changes the answer."""


def scoring(**values: Any) -> Attack:
    return lambda answer: replace(answer, metadata={"records": [{**answer.metadata["records"][0], **values}]})


SCORE: dict[str, Attack] = {
    "another client's name": scoring(name="client-000"),
    "another round": scoring(round=1),
    "a round of 10^400": scoring(round=HUGE),
    "the scope of the global model": scoring(scope="budget"),
    "the scope of a mean": scoring(scope="summary", name="mtal"),
    "another split": scoring(split="validation"),
    "1e308": scoring(score=1e308),
    "above 1": scoring(score=1.5),
    "not a number": scoring(score=math.nan),
    "below 0": scoring(score=-0.5),
    "a score as text": scoring(score="1"),
    "a metric of 1e308": scoring(metrics={"accuracy": 1e308}),
    "a metric that is no number": scoring(metrics={"accuracy": math.nan}),
    "a metric that is a list": scoring(metrics={"accuracy": []}),
    "a thousand metrics": scoring(metrics={str(number): 1.0 for number in range(1000)}),
    "sixty metrics of its own": scoring(metrics={f"own {number}": 1.0 for number in range(60)}),
    "four thousand tasks": scoring(by_task={f"{number:0300d}": 1.0 for number in range(4000)}),
    "more tasks than examples": scoring(by_task={str(number): 1.0 for number in range(40)}),
    "a metric with escapes": scoring(metrics={ESCAPE: 1.0}),
    "a task with escapes": scoring(by_task={ESCAPE: 1.0}),
    "10^400 examples": scoring(examples=HUGE),
    "flops without end": scoring(inference_flops_per_token=math.inf),
    "records that are no list": saying(records=7),
    "records that are an object": saying(records={"a": 1}),
    "records that are numbers": saying(records=[1, 2]),
    "no records": saying(records=[]),
    "two records": lambda answer: replace(answer, metadata={"records": answer.metadata["records"] * 2}),
    "another client": lambda answer: replace(answer, client=0),
    "another kind": lambda answer: replace(answer, kind="train"),
    "no JSON": framed("{"),
    "a failure with escapes": lambda answer: answer.reply(failure=ESCAPE),
}
"""An attack on the request for scores -> how it changes the answer."""
