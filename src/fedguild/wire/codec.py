"""A payload as bytes and back: safetensors on every engine, never a pickle."""

from __future__ import annotations

from fedguild.errors import FedGuildError, UploadError
from fedguild.packing import pack, unpack
from fedguild.payload import Payload


def encode(payload: Payload) -> bytes:
    """Returns the payload's bytes; equal payloads give equal bytes.

    Raises:
        TypeError: a tensor's dtype or a scalar's type cannot be sent.
    """
    return pack(payload.tensors, payload.scalars)


def decode(data: bytes, source: str = "A payload") -> Payload:
    """Returns the payload that `encode` wrote, its tensors on the CPU and sorted by name.

    Args:
        data: Bytes from a peer, who may have sent anything.
        source: Whose bytes they are, as the error message names them.

    Raises:
        UploadError: the bytes are cut off, damaged, or something else.
    """
    try:
        tensors, scalars = unpack(data)
    except FedGuildError as error:
        raise UploadError(
            f"{source} of {len(data)} bytes cannot be decoded: {error.message}.",
            "Expected a safetensors file as fedguild.wire.codec.encode writes it.",
        ) from error
    return Payload(tensors, scalars)
