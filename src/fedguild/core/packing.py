"""Serialisation of named tensors and scalars: the one format of uploads, client memory and checkpoints.

The bytes are a safetensors file whose metadata holds the scalars as JSON under one key. Equal content gives equal
bytes, whatever the order of insertion. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from typing import Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json
from safetensors import SafetensorError
from safetensors.torch import load as load_safetensors
from safetensors.torch import save as save_safetensors
from torch import Tensor

from fedguild.core.errors import FedGuildError

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
_ITEM_BYTES = {name: dtype.itemsize for dtype, name in _DTYPE_NAMES.items()}
_OTHER_OBJECTS = 64
"""Room for the objects of a header that are no tensors, and for such letters in scalars."""
MOST_DIMENSIONS = 8
LARGEST_DIMENSION = 2**40
LARGEST_SHAPE = 2**48
"""Largest product of a tensor's sizes, in which a 0 counts as 1."""


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


def unpack(data: bytes, most: int | None = None) -> tuple[dict[str, Tensor], dict[str, Scalar]]:
    """Returns the tensors (on the CPU, writable) and the scalars that `pack` wrote, sorted by name.

    Args:
        data: The file.
        most: Most tensors that it can have, counted before any is parsed; None for no limit.

    Raises:
        FedGuildError: the bytes are not such a file; the message is a clause saying why.
    """
    metadata, _, _ = _checked_header(data, most)
    scalars = _read_scalars(metadata.get(_SCALARS_KEY, "{}"))
    try:
        tensors = load_safetensors(data)
    except SafetensorError as error:
        raise FedGuildError(str(error).removeprefix("Error while deserializing: ")) from error
    return {name: tensors[name] for name in sorted(tensors)}, scalars


def views(data: Any) -> dict[str, Tensor]:
    """Returns the tensors of a buffer of bytes that `pack` wrote, as views of it: nothing is copied.

    Raises:
        FedGuildError: as `unpack`.
    """
    _, entries, begin = _checked_header(data)
    dtypes = {name: dtype for dtype, name in _DTYPE_NAMES.items()}
    found: dict[str, Tensor] = {}
    for name, entry in sorted(entries.items()):
        dtype, start, count = dtypes[entry.dtype], begin + entry.data_offsets[0], prod(entry.shape)
        try:
            flat = (
                torch.frombuffer(data, dtype=dtype, count=count, offset=start) if count else torch.empty(0, dtype=dtype)
            )
        except ValueError as error:
            raise FedGuildError(f"the values of {name!r:.80} are cut off") from error
        found[name] = flat.reshape(entry.shape)
    return found


def tensor_bytes(tensor: Tensor) -> int:
    """Returns the bytes of a tensor's values, without the header."""
    return tensor.numel() * tensor.element_size()


class _Entry(BaseModel):
    """A tensor in the header of a safetensors file."""

    model_config = ConfigDict(strict=True, extra="forbid")

    dtype: str
    shape: list[Annotated[int, Field(ge=0, le=LARGEST_DIMENSION)]] = Field(max_length=MOST_DIMENSIONS)
    data_offsets: tuple[Annotated[int, Field(ge=0)], Annotated[int, Field(ge=0)]] = Field(strict=False)


_HEADER: TypeAdapter[dict[str, _Entry]] = TypeAdapter(dict[str, _Entry])


def _checked_header(data: bytes, most: int | None = None) -> tuple[dict[str, str], dict[str, _Entry], int]:
    """Returns the metadata, the entries and the length of the header of a safetensors file that `pack` wrote.

    Raises:
        FedGuildError: it has not; safetensors and torch would raise arbitrary errors, or ask for more memory than there
            is.
    """
    length = int.from_bytes(data[:_LENGTH_BYTES], "little")
    if length > len(data) - _LENGTH_BYTES:
        raise FedGuildError(f"its header is said to have {length} bytes, of which it lacks some")
    objects = bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length]).count(b"{")  # one a tensor
    if most is not None and objects > most + _OTHER_OBJECTS:
        raise FedGuildError(f"its header has {objects} objects, but {most} tensors are expected at most")
    try:
        header = from_json(bytes(data[_LENGTH_BYTES : _LENGTH_BYTES + length]))
    except ValueError as error:
        raise FedGuildError(f"its header is not JSON ({error})") from error
    metadata = header.pop("__metadata__", {}) if isinstance(header, dict) else None
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise FedGuildError("its header is not an object with an object of texts as its metadata")
    try:
        entries = _HEADER.validate_python(header)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise FedGuildError(f"its header is malformed ({first['loc'][-1]!r:.80}: {first['msg']})") from error
    for name, entry in entries.items():
        if entry.dtype not in _ITEM_BYTES:
            raise FedGuildError(f"unsupported dtype {entry.dtype!r:.20} of {name!r:.80}")
        begin, end = entry.data_offsets
        if prod(max(size, 1) for size in entry.shape) > LARGEST_SHAPE:  # libraries overflow, even where a size is 0
            raise FedGuildError(f"the shape {entry.shape} of {name!r:.80} is beyond every tensor")
        if end - begin != prod(entry.shape) * _ITEM_BYTES[entry.dtype]:
            raise FedGuildError(f"the shape {entry.shape} of {name!r:.80} does not fit its {end - begin} bytes")
    return metadata, entries, _LENGTH_BYTES + length


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
