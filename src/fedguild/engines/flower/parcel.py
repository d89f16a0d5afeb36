"""What travels between the server and a client's trainer: a small header and the bytes of a payload.

A Flower message holds one parcel, and so does a request over the local link between Flower's process
and the trainer. Nothing here needs torch or flwr, since the process that forwards a message is short.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, get_args

from fedguild.errors import UploadError

Kind = Literal["hello", "train", "score", "deliver"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Parcel:
    """A question of the server or a client's answer to it.

    Attributes:
        kind: `hello` asks who a node is, `train` for a round's training, `score` for the scores of the
            client's own model, `deliver` hands the client what its own model is made of.
        run: Identity of the run, 32 hexadecimal digits.
        round: The round, from 1; 0 before the first.
        client: Index of the client; -1 where the server does not know it yet.
        codec: How the tensors of `body` are written (`fedguild.wire.codec`).
        failure: In an answer: why it was not done; empty where it was.
        facts: Everything else, as JSON values.
        body: A payload, encoded; may be empty.
    """

    kind: Kind
    run: str
    round: int = 0
    client: int = -1
    codec: str = "fp32"
    failure: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def answer(self, *, failure: str = "", facts: dict[str, Any] | None = None, body: bytes = b"") -> Parcel:
        """Returns an answer of the same kind, run, round, client and codec."""
        return Parcel(self.kind, self.run, self.round, self.client, self.codec, failure, facts or {}, body)

    def header(self) -> str:
        """Returns everything but the body, as JSON."""
        fields = asdict(self)
        del fields["body"]
        return json.dumps(fields, sort_keys=True)


def open_parcel(header: str, body: bytes) -> Parcel:
    """Returns the parcel that was sent as a header and a body.

    Raises:
        UploadError: the header is not one.
    """
    try:
        fields = json.loads(header)
        parcel = Parcel(**fields, body=body)
    except (ValueError, TypeError) as error:
        raise UploadError(f"A message has an unreadable header ({error}).") from error
    texts = (parcel.run, parcel.codec, parcel.failure)
    numbers = (parcel.round, parcel.client)
    well_formed = (
        parcel.kind in KINDS
        and all(isinstance(text, str) for text in texts)
        and all(type(number) is int for number in numbers)
        and isinstance(parcel.facts, dict)
    )
    if not well_formed:
        raise UploadError(f"A message has a header of the wrong form: {header[:200]}.")
    return parcel


def to_bytes(parcel: Parcel) -> bytes:
    """Returns a parcel as the bytes that go over the local link: length of the header, header, body."""
    header = parcel.header().encode()
    return len(header).to_bytes(_LENGTH_BYTES, "little") + header + parcel.body


def from_bytes(data: bytes) -> Parcel:
    """Returns the parcel that `to_bytes` wrote.

    Raises:
        UploadError: the bytes are not a parcel.
    """
    end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
    if len(data) < end:
        raise UploadError(f"A message of {len(data)} bytes is cut off.")
    return open_parcel(data[_LENGTH_BYTES:end].decode(errors="replace"), data[end:])
