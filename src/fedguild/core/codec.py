"""Encoding of payloads as bytes: safetensors on every engine, never a pickle.

A payload may be shrunk before it is encoded: its large fp32 tensors are written in bf16, or in int8 with
one fp32 scale per row. The loss is the same on every engine (`through`), so that a result does not depend
on where the clients ran.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, get_args

import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, FedGuildError, UploadError, nearest
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload

Codec = Literal["fp32", "bf16", "int8"]
CODECS: tuple[Codec, ...] = get_args(Codec)
SMALLEST_SHRUNK = 2048
"""Tensors with fewer values stay exact, and so do vectors and integers: statistics, counts, versions."""
EXACT_PARTS = ("merge",)
"""Parts that stay exact whatever their size: changes to the backbone, of which every site holds the same bits."""
BF16, INT8, SCALE = "#bf16", "#int8", "#scale"
"""Suffix of the name of a tensor that was shrunk."""
_LARGEST = 127


def encode(payload: Payload) -> bytes:
    """Returns the payload's bytes; equal payloads give equal bytes.

    Raises:
        TypeError: a tensor's dtype or a scalar's type cannot be sent.
    """
    return pack(payload.tensors, payload.scalars)


def decode(data: bytes, source: str = "A payload", most: int | None = None) -> Payload:
    """Returns the payload that `encode` wrote, its tensors on the CPU and sorted by name.

    Args:
        source: Where the bytes come from, for error messages.
        most: Most tensors that it can have, counted before any is parsed; None for no limit.

    Raises:
        UploadError: the bytes are cut off, damaged, or something else.
    """
    try:
        tensors, scalars = unpack(data, most)
    except FedGuildError as error:
        raise UploadError(
            f"{source} of {len(data)} bytes cannot be decoded: {error.message}.",
            "Expected a safetensors file as fedguild.core.codec.encode writes it.",
        ) from error
    return Payload(tensors, scalars)


def shrink(payload: Payload, codec: Codec) -> Payload:
    """Returns the payload as it goes over the wire; itself for `fp32`.

    A tensor `x` becomes `x#bf16`, or `x#int8` [.., n] and `x#scale` [.., 1]: x is about int8 * scale,
    where scale is the row's largest magnitude / 127. Works on shapes alone, too (meta tensors).

    Raises:
        ConfigError: there is no such codec.
    """
    if codec not in CODECS:
        raise ConfigError(f"There is no codec '{codec}'.", nearest(codec, CODECS))
    if codec == "fp32":
        return payload
    tensors: dict[str, Tensor] = {}
    for name, tensor in payload.tensors.items():
        if not _is_shrunk(name, tensor):
            tensors[name] = tensor
        elif codec == "bf16":
            tensors[name + BF16] = tensor.to(torch.bfloat16)
        else:
            tensors[name + INT8], tensors[name + SCALE] = _to_int8(tensor)
    return Payload(tensors, payload.scalars)


def expand(payload: Payload) -> Payload:
    """Undoes `shrink`, whatever the codec was; the values stay rounded.

    Raises:
        UploadError: a scale is missing or does not fit, or a tensor came in two dtypes; the payload may come from an
            untrusted peer.
    """
    tensors: dict[str, Tensor] = {}
    for name, tensor in payload.tensors.items():
        plain, mark, kind = name.rpartition("#")
        if mark + kind == SCALE and plain + INT8 in payload.tensors:
            continue
        plain = plain if mark + kind in (BF16, INT8) else name
        if plain in tensors:
            raise UploadError(f"The tensor '{plain}' came twice, in two dtypes.")
        if mark + kind == INT8:
            tensors[plain] = tensor.to(torch.float32) * _scale(payload.tensors, plain, tensor)
        else:
            tensors[plain] = tensor.to(torch.float32) if mark + kind == BF16 else tensor
    return Payload(tensors, payload.scalars)


def through(payload: Payload, codec: Codec) -> Payload:
    """Returns the payload as its receiver decodes it."""
    return payload if codec == "fp32" else expand(shrink(payload, codec))


def through_all(payloads: Iterable[Payload], codec: Codec) -> list[Payload]:
    """Returns payloads as their receivers decode them; a tensor that several of them hold is rounded once."""
    if codec == "fp32":
        return list(payloads)
    known: dict[int, tuple[Tensor, Tensor]] = {}  # with the tensor itself, whose id would be another's once it is gone

    def rounded(name: str, tensor: Tensor) -> Tensor:
        if not _is_shrunk(name, tensor):
            return tensor
        if id(tensor) not in known:
            known[id(tensor)] = tensor, through(Payload({name: tensor}), codec).tensors[name]
        return known[id(tensor)][1]

    return [
        Payload({name: rounded(name, tensor) for name, tensor in payload.tensors.items()}, payload.scalars)
        for payload in payloads
    ]


def shrunk_shapes(payload: Payload, codec: Codec) -> Payload:
    """Returns a payload with the names, shapes and dtypes that `shrink` gives: enough to count bytes."""
    if codec == "fp32":
        return payload
    shapes = {name: tensor.to("meta") for name, tensor in payload.tensors.items()}
    return shrink(Payload(shapes, payload.scalars), codec)


def _is_shrunk(name: str, tensor: Tensor) -> bool:
    if name.partition("/")[0] in EXACT_PARTS:
        return False
    return tensor.dtype == torch.float32 and tensor.dim() >= 2 and tensor.numel() >= SMALLEST_SHRUNK


def _to_int8(tensor: Tensor) -> tuple[Tensor, Tensor]:
    """Returns a tensor's int8 values and its scales; a row with NaN or infinity has a non-finite scale."""
    scale = tensor.abs().amax(dim=-1, keepdim=True) / _LARGEST
    divisor = torch.where(scale > 0, scale, torch.ones_like(scale))
    return (tensor / divisor).nan_to_num(0.0).round().clamp(-_LARGEST, _LARGEST).to(torch.int8), scale


def _scale(tensors: Mapping[str, Tensor], name: str, values: Tensor) -> Tensor:
    scale = tensors.get(name + SCALE)
    if scale is None or scale.shape != (*values.shape[:-1], 1) or not scale.is_floating_point():
        raise UploadError(f"The tensor '{name}' came in int8 without a scale for each of its rows.")
    return scale.to(torch.float32)
