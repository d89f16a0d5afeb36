"""Validation of every upload before it can affect the server's state.

`check_envelope` examines the metadata of an upload that came over a network, before anything is decoded;
`check_upload` examines every value of a decoded upload.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.core.errors import NotFiniteError, UploadError
from fedguild.core.payload import Payload, Scalar
from fedguild.core.text import few, printable
from fedguild.server.schema import Bound, Schema

FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""The dtypes that an upload's tensors may have; the server computes in fp32."""
SPARE_BYTES = 2**20
"""Room for an upload's scalars and the frame of its header."""
_LONGEST_NAME_BYTES = 1024
ROUNDING = 1e-4
"""How far rounding may take shares beyond their sum, relative to it."""


@dataclass(frozen=True)
class Envelope:
    """The metadata of an upload that has not been decoded.

    Attributes:
        run: The identity of its run, copied from the task (`fedguild.runs.setup.run_identity`).
        round: The round of the task that it answers, from 1.
        client: The index of its client.
        size_bytes: Length of the encoded payload.
    """

    run: str
    round: int
    client: int
    size_bytes: int


def check_envelope(
    envelope: Envelope, *, run: str, asked: Collection[tuple[int, int]], limit_bytes: int | None = None
) -> None:
    """Raises unless an upload answers a task that was sent; nothing is decoded.

    Args:
        envelope: The upload's metadata.
        run: The identity of the current run.
        asked: (round, client index) of every task that was sent and may still be answered, of the current round and, if
            late uploads are used, of earlier ones.
        limit_bytes: Largest encoded upload; None for no limit.

    Raises:
        UploadError: it is of another run, from a client that was never asked, of a round in which
            that client was not asked, or too large.
    """
    if envelope.run != run:
        raise UploadError(f"the upload is of the run '{envelope.run}', but this is the run '{run}'.")
    rounds = sorted(round for round, client in asked if client == envelope.client)
    if not rounds:
        raise UploadError("an upload arrived, but this client was not asked for one.")
    if envelope.round not in rounds:
        listed = ", ".join(map(str, rounds))
        raise UploadError(f"the upload is of round {envelope.round}, but round {listed} was asked for.")
    check_size(envelope.size_bytes, limit_bytes)


def check_size(size_bytes: int, limit_bytes: int | None) -> None:
    """Raises unless an encoded upload is within the limit; None for no limit.

    Raises:
        UploadError: it is too large; the message has both sizes.
    """
    if limit_bytes is not None and size_bytes > limit_bytes:
        raise UploadError(
            f"the upload has {size_bytes} bytes, beyond the limit of {limit_bytes} (federation.upload_limit_bytes)."
        )


def check_plausible_size(size_bytes: int, schema: Schema) -> None:
    """Raises if no upload of this schema can have so many bytes, whatever its dtypes and scalars; nothing is decoded.

    Raises:
        UploadError: it is too large; the message has both sizes.
    """
    largest = SPARE_BYTES + sum(_LONGEST_NAME_BYTES + 8 * math.prod(shape) for shape in schema.shapes.values())
    if size_bytes > largest:
        raise UploadError(f"the upload has {size_bytes} bytes, but one of its form has at most {largest}, in fp64.")


def check_upload(
    payload: Payload,
    schema: Schema,
    *,
    norm_limit: float | None = None,
    largest_value: float | None = None,
) -> None:
    """Raises unless an upload fits its schema and has finite values.

    Args:
        payload: The upload.
        schema: What it must have.
        norm_limit: Upper limit of the L2 norm over all its tensors together; None for no limit.
        largest_value: Largest magnitude of any value without a bound of its own, scalars included; None for no limit.

    Raises:
        NotFiniteError: a tensor has a value that is NaN or infinite.
        UploadError: a name is missing or unknown, a shape or dtype is wrong, a scalar is not finite, or a value, a sum
            of shares or the norm is beyond its limit. The message names the tensor.
    """
    _check_names(payload.tensors, schema)
    shapes = schema.shapes
    norms = {name: _checked_norm(name, tensor, shapes[name]) for name, tensor in payload.tensors.items()}
    _check_scalars(payload.scalars, schema.scalars)
    for name, tensor in payload.tensors.items():
        _check_values(name, tensor, schema.tensors[name].bound or Bound(), largest_value)
    if largest_value is not None:
        _check_scalar_magnitudes(payload.scalars, largest_value)
    norm = math.hypot(*norms.values())
    if norm_limit is not None and norm > norm_limit:
        largest = max(norms, key=norms.__getitem__)
        raise UploadError(
            f"the upload's norm is {norm:.6g}, beyond the limit of {norm_limit:.6g} "
            f"(federation.max_update_norm); most of it is in '{largest}' ({norms[largest]:.6g})."
        )


def check_received(payload: Payload, needed: Collection[str], what: str) -> None:
    """Raises unless what a server sent has the tensors that it always has, and finite values.

    Args:
        needed: Names of tensors that must be there.
        what: How the message begins.

    Raises:
        NotFiniteError: a tensor has a value that is NaN or infinite.
        UploadError: tensors are missing.
    """
    missing = set(needed) - payload.tensors.keys()
    if missing:
        raise UploadError(f"{what} lacks {_quoted(missing)}; {len(needed)} tensors of the adapter are expected.")
    for name, tensor in payload.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            broken = int((~torch.isfinite(tensor)).sum())
            raise NotFiniteError(f"{what} has NaN or infinity in {broken} of {tensor.numel()} values of '{name}'.")


def _check_names(tensors: Mapping[str, Tensor], schema: Schema) -> None:
    required, known = schema.needed.tensors.keys(), schema.tensors.keys()
    wrong = [
        f"{verb} {_quoted(names)}"
        for verb, names in (
            ("lacks", required - tensors.keys()),
            ("has unknown", tensors.keys() - known),
        )
        if names
    ]
    if wrong:
        raise UploadError(f"the upload {' and '.join(wrong)}; expected {len(known)} tensors.")


def _checked_norm(name: str, tensor: Tensor, shape: tuple[int, ...]) -> float:
    if tuple(tensor.shape) != tuple(shape):
        raise UploadError(f"'{name}' has the shape {list(tensor.shape)}, but {list(shape)} is expected.")
    if tensor.dtype not in FLOATING:
        known = ", ".join(str(dtype).removeprefix("torch.") for dtype in FLOATING)
        found = str(tensor.dtype).removeprefix("torch.")
        raise UploadError(f"'{name}' is {found}, but one of {known} is expected.")
    values = tensor.to(torch.float32)
    norm = float(torch.linalg.vector_norm(values))
    if math.isfinite(norm):
        return norm
    broken = int((~torch.isfinite(values)).sum())
    if broken:
        raise NotFiniteError(f"'{name}' has NaN or infinity in {broken} of its {tensor.numel()} values.")
    return float(torch.linalg.vector_norm(values, dtype=torch.float64))


def _check_values(name: str, tensor: Tensor, bound: Bound, otherwise: float | None) -> None:
    """Checks the magnitudes of a tensor, by its bound or the limit for all others, and the sums of shares."""
    largest = otherwise if bound.largest is None else bound.largest
    if largest is not None:
        found = float(tensor.abs().max()) if tensor.numel() else 0.0
        if found > largest:
            raise UploadError(f"'{name}' has a value of {found:.4g}, beyond {largest:g}.")
    if bound.total is None or not tensor.numel():
        return
    if float(tensor.min()) < 0:
        raise UploadError(f"'{name}' has a share of {float(tensor.min()):.4g}, which is negative.")
    total = float(tensor.double().sum(dim=-1).max())
    if total > bound.total * (1 + ROUNDING):
        raise UploadError(f"the shares of '{name}' sum to {total:.6g}, beyond {bound.total:g}.")


def _check_scalar_magnitudes(scalars: Mapping[str, Scalar], largest: float) -> None:
    for name, value in scalars.items():
        if isinstance(value, float) and abs(value) > largest:
            raise UploadError(f"the scalar '{name}' is beyond {largest:g}.")


def _check_scalars(scalars: Mapping[str, Scalar], expected: Mapping[str, Scalar | type[Scalar]]) -> None:
    for name, value in scalars.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise UploadError(f"the scalar '{name}' is {value}, but a finite number is expected.")
    for name, example in expected.items():
        kind = example if isinstance(example, type) else type(example)
        if type(scalars.get(name)) is not kind:
            found = repr(scalars.get(name))[:40]
            raise UploadError(f"the scalar '{name}' is {found}, but a {kind.__name__} is expected.")


def unusable(error: Exception) -> str:
    """Returns the failure of a client whose answer passed the checks, but raised an error where it was used.

    The error may be FedGuild's own: its traceback is logged at level DEBUG.
    """
    logging.getLogger("fedguild").debug("an answer cannot be used", exc_info=error)
    return f"its answer cannot be used: {type(error).__name__}: {printable(str(error), 200)}"


def _quoted(names: set[str]) -> str:
    return few([f"'{name}'" for name in sorted(names)])
