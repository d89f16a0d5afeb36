"""Byte counts of payloads on the wire, by the same code on every engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from fedguild.core.codec import Codec, shrunk_shapes
from fedguild.core.packing import packed_bytes, tensor_bytes
from fedguild.core.payload import Payload

HEADER = "header"
"""The part under which names, shapes and scalars are counted."""


def size_bytes(payload: Payload) -> int:
    """Returns `len(encode(payload))` without serialising a tensor."""
    return packed_bytes(payload.tensors, payload.scalars)


def bytes_by_part(payload: Payload) -> dict[str, int]:
    """Returns part -> bytes, summing to `size_bytes(payload)`.

    A tensor's part is its name before the first `/`; names, shapes and scalars are the part
    `header`.
    """
    parts: Counter[str] = Counter()
    for name, tensor in payload.tensors.items():
        parts[name.partition("/")[0]] += tensor_bytes(tensor)
    parts[HEADER] += size_bytes(payload) - parts.total()
    return dict(sorted(parts.items()))


@dataclass(frozen=True)
class Traffic:
    """Bytes that one client received and sent in one round.

    Attributes:
        download_by_part: Part -> bytes from the server to the client.
        upload_by_part: Part -> bytes from the client to the server; empty without an upload.
    """

    round: int
    client: int
    download_by_part: Mapping[str, int] = field(default_factory=dict)
    upload_by_part: Mapping[str, int] = field(default_factory=dict)

    @property
    def download_bytes(self) -> int:
        return sum(self.download_by_part.values())

    @property
    def upload_bytes(self) -> int:
        return sum(self.upload_by_part.values())

    def __add__(self, other: Traffic) -> Traffic:
        """Adds another attempt of the same client in the same round."""
        down, up = (
            {part: first.get(part, 0) + second.get(part, 0) for part in sorted({*first, *second})}
            for first, second in (
                (self.download_by_part, other.download_by_part),
                (self.upload_by_part, other.upload_by_part),
            )
        )
        return Traffic(self.round, self.client, down, up)


def count_traffic(round: int, client: int, download: Payload, upload: Payload | None, codec: Codec = "fp32") -> Traffic:
    """Counts a client's download and its upload, if one arrived, as the codec writes them."""
    sent, received = (
        {} if payload is None else bytes_by_part(shrunk_shapes(payload, codec)) for payload in (download, upload)
    )
    return Traffic(round, client, sent, received)
