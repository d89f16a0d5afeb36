"""Serialisation of named tensors and scalars: the one format of uploads, client memory and checkpoints.

The bytes are a safetensors file whose metadata holds the scalars as JSON under one key. The same
content gives the same bytes, in whatever order it was inserted. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedguild.errors import FedGuildError

Scalar = bool | int | float | str

_SCALARS_KEY = "scalars"
_LENGTH_BYTES = 8
"""safetensors: a little-endian count of the header's bytes, the header (JSON), the data."""

_DTYPE_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The dtypes that may be packed, in the order in which safetensors lays them out."""


def pack(tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> bytes:
    """Returns tensors of any device, strides and sharing, and scalars, as bytes.

    Raises:
        TypeError: the format does not support a tensor's dtype or a scalar's type.
    """
    ready: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        _dtype_name(name, tensor)
        plain = tensor.detach().to("cpu").contiguous()
        storage = plain.untyped_storage().data_ptr()
        ready[name] = plain.clone() if storage in storages else plain
        storages.add(storage)
    return save_safetensors(ready, metadata=_metadata(scalars))


def packed_bytes(tensors: Mapping[str, Tensor], scalars: Mapping[str, Scalar]) -> int:
    """Returns `len(pack(tensors, scalars))` from names, shapes and dtypes alone.

    Raises:
        TypeError: as `pack`.
    """
    ranks = {dtype: rank for rank, dtype in enumerate(_DTYPE_NAMES)}
    header: dict[str, Any] = {"__metadata__": _metadata(scalars)}
    end = 0
    named = {name: (_dtype_name(name, tensor), tensor) for name, tensor in tensors.items()}
    for name in sorted(named, key=lambda key: (ranks[named[key][1].dtype], key)):
        dtype_name, tensor = named[name]
        begin, end = end, end + tensor_bytes(tensor)
        header[name] = {"dtype": dtype_name, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    header_bytes = len(json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode())
    padded_header_bytes = -(-header_bytes // 8) * 8
    return _LENGTH_BYTES + padded_header_bytes + end


def unpack(data: bytes) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Returns the tensors (on the CPU, writable) and the scalars that `pack` wrote, sorted by name.

    Raises:
        FedGuildError: the bytes are not such a file; the message is a clause saying why.
    """
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise FedGuildError(str(error).removeprefix("Error while deserializing: ")) from error
    except KeyError as error:
        raise FedGuildError(f"unsupported dtype {error}") from error
    header = json.loads(data[_LENGTH_BYTES : _LENGTH_BYTES + int.from_bytes(data[:_LENGTH_BYTES], "little")])
    scalars = _read_scalars(header.get("__metadata__", {}).get(_SCALARS_KEY, "{}"))
    return {name: tensors[name] for name in sorted(tensors)}, scalars


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values, the header not counted."""
    return tensor.numel() * tensor.element_size()


def _metadata(scalars: Mapping[str, Scalar]) -> dict[str, str]:
    for name, value in scalars.items():
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"Scalar '{name}' is a {type(value).__name__}; use bool, int, float or str.")
    return {_SCALARS_KEY: json.dumps(dict(scalars), sort_keys=True, separators=(",", ":"))}


def _dtype_name(name: str, tensor: Tensor) -> str:
    if tensor.dtype not in _DTYPE_NAMES:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPE_NAMES)
        raise TypeError(f"Tensor '{name}' is {tensor.dtype}; use one of {known}.")
    return _DTYPE_NAMES[tensor.dtype]


def _read_scalars(text: str) -> dict[str, Scalar]:
    try:
        scalars = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FedGuildError(f"its scalars are not JSON ({error})") from error
    if not isinstance(scalars, dict) or not all(isinstance(v, bool | int | float | str) for v in scalars.values()):
        raise FedGuildError("its scalars are not an object of booleans, numbers and strings")
    return dict(sorted(scalars.items()))
