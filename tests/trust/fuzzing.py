"""Random changes of honest answers.

Most leave nothing valid behind; some leave an upload with other finite values in range, or an honest answer."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from fedguild.core.codec import encode
from fedguild.core.payload import Payload
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.testing import Message

_LENGTH_BYTES = 8
MASKED = ("secure/masked", "secure/values")
"""Words under a mask, of which any are as good as any others to all but their client."""
COMPLAINTS = "secure/complaints"
"""Another number here is a dispute, in which an honest client is left out, too (tests/privacy/secure_sum)."""
NO_TENSOR = {"dtype": "U8", "shape": [0, 2**40, 2**40], "data_offsets": [0, 0]}
"""An entry of a file's header that needs no byte, and of which a library cannot compute the strides."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    0,
    -1,
    1,
    2**63,
    10**400,
    0.5,
    -1e308,
    1e308,
    math.nan,
    math.inf,
    -math.inf,
    "",
    "x",
    "\x1b[31m",
    "\u202e",
    "\ud800",
    "9" * 5000,
    "x" * 100_000,
    "Infinity",
    "client-000",
    [],
    {},
    [[]],
    [0.5] * 1000,
    {"": None},
    {"\x00": {"": []}},
    json.loads("[" * 60 + "]" * 60),
)
"""What a value of an answer's metadata becomes."""


def mutate(answer: Message, rng: random.Random) -> Message | bytes | None:
    """Returns a random change of an answer; None for no answer."""
    changes: list[Callable[[Message, random.Random], Message | bytes | None]] = [
        _another_value,
        _another_value,
        _another_value,
        _another_field,
        _another_text,
        _other_bytes,
    ]
    if answer.body:
        changes += [_other_tensors, _other_tensors, _other_file, _other_values]
    return rng.choice(changes)(answer, rng)


def mutate_step(answer: Message, rng: random.Random) -> Message | bytes:
    """Returns a random change of an answer to a step of secure aggregation that the others can make good.

    What nobody can tell from masked numbers of an honest client is left alone: other words of the right form.
    """
    changes = [_other_arrays, _other_arrays, _other_arrays, _another_field, _another_text, _other_bytes, _other_file]
    return rng.choice(changes)(answer, rng)


def _another_value(answer: Message, rng: random.Random) -> Message:
    """Replaces, removes or adds a value somewhere in the metadata."""
    metadata = json.loads(json.dumps(answer.metadata))
    holder: Any = metadata
    while True:
        keys = list(holder) if isinstance(holder, dict) else list(range(len(holder)))
        if not keys:
            break
        key = rng.choice(keys)
        if isinstance(holder[key], dict | list) and holder[key] and rng.random() < 0.7:
            holder = holder[key]
            continue
        if rng.random() < 0.2:
            del holder[key]
        else:
            holder[key] = rng.choice(VALUES)
        break
    if rng.random() < 0.1:
        metadata[str(rng.random())] = rng.choice(VALUES)
    return replace(answer, metadata=metadata)


def _another_field(answer: Message, rng: random.Random) -> Message | bytes:
    """Replaces a field of the header, or all of its metadata."""
    field = rng.choice(("kind", "run", "round", "client", "codec", "failure", "metadata", "surplus"))
    header = json.loads(answer.header())
    header[field] = rng.choice(VALUES)
    return _framed(json.dumps(header).encode(), answer.body)


def _another_text(answer: Message, rng: random.Random) -> bytes:
    """Replaces, removes or repeats a few characters of the header."""
    header = bytearray(answer.header().encode())
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(header))
        header[place : place + rng.randint(0, 3)] = rng.choice(
            (b"", b"0", b'"', b"[", b"}", b"\xff", b"\\u0000", b"e999")
        )
    return _framed(bytes(header), answer.body)


def _other_bytes(answer: Message, rng: random.Random) -> bytes:
    """Cuts the message, puts noise in its place, or lies about the header's length."""
    data = answer.to_bytes()
    return rng.choice(
        (
            data[: rng.randrange(len(data))],
            rng.randbytes(rng.randrange(200)),
            rng.randbytes(_LENGTH_BYTES) + data[_LENGTH_BYTES:],
            b"",
        )
    )


def _other_file(answer: Message, rng: random.Random) -> Message:
    """Damages the header of the uploaded file, cuts the file, or adds to it."""
    body = bytearray(answer.body)
    length = int.from_bytes(body[:_LENGTH_BYTES], "little")
    choice = rng.randrange(4)
    if choice == 0:
        begin = body.find(b"}", 0, _LENGTH_BYTES + length)  # behind the scalars, in which a lie may be harmless
        for _ in range(rng.randint(1, 3)):
            body[rng.randrange(begin, _LENGTH_BYTES + length)] ^= 1 << rng.randrange(8)
    elif choice == 1:
        body = body[: rng.randrange(len(body))]
    elif choice == 2:
        body += rng.randbytes(rng.randint(1, 5000))
    else:
        header = json.loads(body[_LENGTH_BYTES : _LENGTH_BYTES + length])
        name = rng.choice(sorted(header))
        header[name] = rng.choice((*VALUES, NO_TENSOR))
        text = json.dumps(header).encode()
        body = bytearray(len(text).to_bytes(_LENGTH_BYTES, "little") + text + body[_LENGTH_BYTES + length :])
    return replace(answer, body=bytes(body))


def _other_tensors(answer: Message, rng: random.Random) -> Message:
    """Gives a tensor other values, another shape, dtype or name, or leaves it out."""
    payload = read_payload(answer.body, "test")
    tensors = dict(payload.tensors)
    name = rng.choice(sorted(tensors))
    tensor = tensors[name]
    choice = rng.randrange(7)
    if choice == 0:
        tensors[name] = torch.full_like(tensor, rng.choice((math.nan, math.inf, -math.inf, 1e30, -3e38, 1e9)))
    elif choice == 1:
        tensors[name] = tensor.unsqueeze(0)
    elif choice == 2:
        tensors[name] = tensor.to(rng.choice((torch.int8, torch.bool, torch.int64)))
    elif choice == 3:
        del tensors[name]
    elif choice == 4:
        tensors[rng.choice(("", "adapter/", "\x00", "../x", f"{name}#int8", "x" * 100_000))] = tensors.pop(name)
    elif choice == 5:
        tensors[name] = torch.cat([torch.atleast_1d(tensor)] * 2)
    else:
        tensors[name].view(-1)[rng.randrange(tensor.numel())] = math.nan
    return replace(answer, body=encode(Payload(tensors, payload.scalars)))


def _other_values(answer: Message, rng: random.Random) -> Message:
    """Gives a tensor other finite values of about the same size, and a number of tokens that is in range."""
    payload = read_payload(answer.body, "test")
    name = rng.choice(sorted(payload.tensors))
    other = payload.tensors[name] * rng.choice((0.0, -1.0, 0.5, 2.0))
    body = encode(Payload({**payload.tensors, name: other}, payload.scalars))
    return replace(answer, body=body, metadata={**answer.metadata, "tokens": rng.choice((0, 1, 10**13))})


def _other_arrays(answer: Message, rng: random.Random) -> Message:
    """Gives an array of a secure aggregation other values, another shape, dtype or name, or leaves it out."""
    payload = read_payload(answer.body, "test")
    tensors = dict(payload.tensors)
    name = rng.choice(sorted(tensors))
    tensor, choice = tensors.pop(name), rng.randrange(3 if name == COMPLAINTS else 6)
    if choice == 0:
        tensors[rng.choice(("", "secure/", "x", f"{name}#int8", "x" * 100_000))] = tensor
    elif choice == 1:
        tensors[name] = tensor.unsqueeze(0)
    elif choice == 2:
        tensors[name] = tensor.to(rng.choice((torch.float32, torch.bool, torch.int16)))
    elif choice == 3:
        tensors[name] = torch.cat([tensor, tensor, torch.ones((1, *tensor.shape[1:]), dtype=tensor.dtype)])
    elif choice == 4 and name not in MASKED:
        tensors[name] = tensor + torch.randint(1, 100, tensor.shape, generator=_torch(rng)).to(tensor.dtype)
    return replace(answer, body=encode(Payload(tensors, payload.scalars)))


def _torch(rng: random.Random) -> torch.Generator:
    return torch.Generator().manual_seed(rng.randrange(2**31))


def _framed(header: bytes, body: bytes) -> bytes:
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + body
