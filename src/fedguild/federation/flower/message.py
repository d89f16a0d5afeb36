"""Messages between the server and a client's trainer: a JSON header and the bytes of a payload.

Flower's messages carry them over the network, and a socket carries them from Flower's process to the trainer. The
process that forwards a message is short-lived, so this module needs neither torch nor flwr.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import Any

from fedguild.core.errors import UploadError
from fedguild.core.text import printable
from fedguild.federation.schema import MessageKind, read_header

_LENGTH_BYTES = 8


@dataclass(frozen=True)
class Message:
    """A request from the server, or a client's reply to it.

    Attributes:
        kind: `hello` asks a node which client it is; `train` is a round's training; `score` asks for the scores of the
            client's own model; `deliver` sends the client the state that its own model is built from; `secure` is a
            step of a secure aggregation.
        run: Identity of the run, 32 hexadecimal digits.
        round: The round, from 1; 0 before the first.
        client: Index of the client; -1 while the server does not know it.
        codec: Codec of the tensors in `body` (`fedguild.core.codec`).
        failure: In a reply: why the request failed, on one line; empty on success.
        metadata: JSON values that accompany the body.
        body: An encoded payload; may be empty.
    """

    kind: MessageKind
    run: str
    round: int = 0
    client: int = -1
    codec: str = "fp32"
    failure: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)
    body: bytes = b""

    def reply(self, *, failure: str = "", metadata: dict[str, Any] | None = None, body: bytes = b"") -> Message:
        return Message(self.kind, self.run, self.round, self.client, self.codec, failure, metadata or {}, body)

    def header(self) -> str:
        fields = asdict(self)
        del fields["body"]
        return json.dumps(fields, sort_keys=True)

    def to_bytes(self) -> bytes:
        """Returns the message as sent over a socket: length of the header, header, body."""
        header = self.header().encode()
        return len(header).to_bytes(_LENGTH_BYTES, "little") + header + self.body

    @classmethod
    def from_bytes(cls, data: bytes) -> Message:
        """Returns the message that `to_bytes` wrote.

        Raises:
            UploadError: the bytes are not a message.
        """
        end = _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")
        if len(data) < end:
            raise UploadError(f"A message of {len(data)} bytes is cut off.")
        return cls.from_header(data[_LENGTH_BYTES:end].decode(errors="replace"), data[end:])

    @classmethod
    def from_header(cls, header: str, body: bytes) -> Message:
        """Returns the message that was sent as a header and a body.

        Raises:
            UploadError: the header is not of its schema (`fedguild.federation.schema`).
        """
        read = read_header(header)
        return cls(
            read.kind, read.run, read.round, read.client, read.codec, printable(read.failure), read.metadata, body
        )
