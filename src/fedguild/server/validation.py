"""The gate that every upload passes before it can touch the server's state."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.errors import UploadError
from fedguild.payload import Payload, Scalar

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that an upload's tensors may have; the server computes in fp32."""


class Omissible(tuple[int, ...]):
    """The shape of a tensor that an upload may leave out, for example of an expert that was never activated."""

    __slots__ = ()


def check_upload(
    payload: Payload, expected: Mapping[str, tuple[int, ...]], *, client: str, norm_limit: float | None = None
) -> None:
    """Raises unless an upload is what its client was asked for; reads every value once.

    Args:
        payload: The upload.
        expected: Name -> shape of the tensors that it must have, no more and no fewer; it may lack
            those whose shape is `Omissible`.
        client: The client's name, for the message.
        norm_limit: Upper limit of the L2 norm over all its tensors together; None for no limit.

    Raises:
        UploadError: a name is missing or unknown, a shape or dtype is wrong, a value is NaN or
            infinite, or the norm is beyond the limit. The message names client and tensor.
    """
    _check_names(payload.tensors, expected, client)
    norms = {name: _checked_norm(name, tensor, expected[name], client) for name, tensor in payload.tensors.items()}
    _check_scalars(payload.scalars, client)
    norm = math.hypot(*norms.values())
    if norm_limit is not None and norm > norm_limit:
        largest = max(norms, key=norms.__getitem__)
        raise UploadError(
            f"{client}: the upload's norm is {norm:.6g}, beyond the limit of {norm_limit:.6g}; "
            f"most of it is in '{largest}' ({norms[largest]:.6g})."
        )


def _check_names(tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], client: str) -> None:
    required = {name for name, shape in expected.items() if not isinstance(shape, Omissible)}
    wrong = [
        f"{verb} {_few(names)}"
        for verb, names in (
            ("lacks", required - tensors.keys()),
            ("has unknown", tensors.keys() - expected.keys()),
        )
        if names
    ]
    if wrong:
        raise UploadError(f"{client}: the upload {' and '.join(wrong)}; expected {len(expected)} tensors.")


def _checked_norm(name: str, tensor: Tensor, shape: tuple[int, ...], client: str) -> float:
    if tuple(tensor.shape) != tuple(shape):
        raise UploadError(f"{client}: '{name}' has the shape {list(tensor.shape)}, but {list(shape)} is expected.")
    if tensor.dtype not in FLOATING:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        found = str(tensor.dtype).removeprefix("torch.")
        raise UploadError(f"{client}: '{name}' is {found}, but one of {known} is expected.")
    values = tensor.to(torch.float32)
    norm = float(torch.linalg.vector_norm(values))
    if math.isfinite(norm):
        return norm
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise UploadError(f"{client}: '{name}' has NaN or infinity in {broken} of its {tensor.numel()} values.")
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _check_scalars(scalars: Mapping[str, Scalar], client: str) -> None:
    for name, value in scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UploadError(f"{client}: the scalar '{name}' is {value}, but a finite number is expected.")


def _few(names: set[str]) -> str:
    shown = ", ".join(f"'{name}'" for name in sorted(names)[:3])
    return shown if len(names) <= 3 else f"{shown} and {len(names) - 3} more"
