"""Protection of the state against valid uploads that would ruin it: filters that compare a round's uploads.

1. `Held` keeps them on disk until the last has come, so that those that follow can read them more than once.
2. `NotRevoked` leaves out clients whose key was revoked.
3. `NormBound` bounds the norm of an upload's change relative to the round's median, part by part: what is longer is
   shortened, what is far longer is left out.
4. `Finite` returns no aggregate that has NaN or infinity, or cannot be computed: the round is aggregated again
   without the uploads that did it.

Norm bounds: Z. Sun et al., "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, 2019, section 4.
Robust means are in `fedguild.server.robust`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, ItemsView, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from safetensors import safe_open
from torch import Tensor

from fedguild.core.errors import QuorumError
from fedguild.core.files import make_folder, write_bytes
from fedguild.core.packing import pack
from fedguild.core.payload import Payload
from fedguild.server.round import Onward, Passage
from fedguild.server.terms import Upload
from fedguild.server.validation import unusable

NORM_FACTOR = 3.0
"""How far beyond the round's median the norm of a change counts, where `federation.norm_factor` is auto."""
FAR_BEYOND = 10.0
"""How far beyond the median a change is no honest client's, and is left out, unless the factor is larger."""
FEWEST_COMPARED = 4
"""With fewer uploads a median says nothing about the others."""
LARGEST_VALUE = 1e6
"""Largest magnitude of a value in a real client's upload, where its method gives no other bound."""
LARGEST_TRAINED = 100.0
"""Trained values are below this; who was sent larger ones may fail through no fault of its own."""
KEY_REVOKED = "its key was revoked"
"""Why nothing of a client is used any more, whenever it came."""


@dataclass(frozen=True)
class Held:
    """Holds a round's uploads on disk until the last has come.

    Attributes:
        folder: Where they wait; emptied when a round begins and when it ends.
    """

    folder: Path

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        self._clear()
        try:
            return onward([self._written(number, upload) for number, upload in enumerate(uploads)])
        finally:
            self._clear()

    def _written(self, number: int, upload: Upload) -> Upload:
        path = self.folder / f"{number:05d}-client-{upload.client.index:05d}.upload"
        write_bytes(path, pack(upload.payload.tensors, upload.payload.scalars))
        return replace(upload, payload=Payload(_OnDisk(path), upload.payload.scalars))

    def _clear(self) -> None:
        make_folder(self.folder)
        for leftover in self.folder.iterdir():
            leftover.unlink()


@dataclass(frozen=True)
class _OnDisk(Mapping[str, Tensor]):
    """The tensors in a file, read when they are asked for."""

    path: Path

    def __getitem__(self, name: str) -> Tensor:
        if name not in set(self):
            raise KeyError(name)
        with safe_open(self.path, framework="pt") as file:
            tensor: Tensor = file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        with safe_open(self.path, framework="pt") as file:
            names = list(file.keys())
        return iter(names)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def items(self) -> ItemsView[str, Tensor]:
        """All of them; their values stay in the file until they are used."""
        with safe_open(self.path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}.items()  # noqa: SIM118


@dataclass(frozen=True)
class NotRevoked:
    """Leaves out clients whose key was revoked, perhaps after their uploads came.

    Attributes:
        revoked: Returns whether a client's key was revoked.
    """

    revoked: Callable[[int], bool]

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        kept = []
        for upload in uploads:
            if self.revoked(upload.client.index):
                passage.withdraw(upload, KEY_REVOKED)
            else:
                kept.append(upload)
        return onward(kept)


@dataclass(frozen=True)
class NormBound:
    """Shortens changes that are beyond the bound, and leaves out uploads that are far beyond it.

    Attributes:
        factor: The largest norm of a part's change, as a multiple of the round's median.
    """

    factor: float = NORM_FACTOR

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        measured = [(upload, norms_of(upload, passage)) for upload in uploads]
        medians = medians_of(norms for _, norms in measured)
        limits = {part: self.factor * middle for part, middle in medians.items()}
        far = max(self.factor, FAR_BEYOND)
        kept = []
        for upload, norms in measured:
            beyond = [part for part, middle in medians.items() if norms.get(part, 0.0) > far * middle]
            if beyond:
                part = max(beyond, key=norms.__getitem__)
                passage.withdraw(
                    upload,
                    f"the change of '{part}' has the norm {norms[part]:.4g}, beyond {far:g} times "
                    f"the round's median of {medians[part]:.4g} (federation.norm_factor)",
                )
            else:
                kept.append(shortened(upload, norms, limits, passage.bounded, upload.download))
        return onward(kept)


class Finite:
    """Returns a finite state, if need be without the uploads that ruin it."""

    def __call__(self, uploads: Iterable[Upload], passage: Passage, onward: Onward) -> Payload:
        """Tries the aggregate of all uploads, then of those that are left.

        Raises:
            QuorumError: without any upload the aggregate is no better.
        """
        left = list(uploads)
        while True:
            state, fault = _attempt(onward, left)
            if state is not None:
                return state
            if not left:
                raise QuorumError(f"The state after this round cannot be computed: {fault}.")
            guilty = [upload for upload in left if _attempt(onward, [upload])[0] is None] or [_furthest(left, passage)]
            for upload in guilty:
                passage.withdraw(upload, f"the aggregate with it {fault}")
            left = [upload for upload in left if not any(upload is one for one in guilty)]


def _attempt(onward: Onward, uploads: Sequence[Upload]) -> tuple[Payload | None, str]:
    """Returns the aggregate, or None and what is wrong with it, as a verb phrase."""
    try:
        aggregate = onward(uploads)
        broken = not_finite(aggregate)
    except Exception as error:
        return None, f"cannot be computed ({unusable(error)})"
    return (None, f"has NaN or infinity in '{broken}'") if broken else (aggregate, "")


def _furthest(uploads: Sequence[Upload], passage: Passage) -> Upload:
    """Returns the upload whose change is the largest multiple of a part's median norm."""
    measured = [norms_of(upload, passage) for upload in uploads]
    medians = medians_of(measured, fewest=1)

    def beyond(norms: Mapping[str, float]) -> float:
        ratios = [norms.get(part, 0.0) / middle if middle else math.inf for part, middle in medians.items()]
        return max(ratios, default=0.0)

    return max(zip(uploads, measured, strict=True), key=lambda pair: beyond(pair[1]))[0]


def norms_of(upload: Upload, passage: Passage) -> dict[str, float]:
    """Returns the norms of an upload's change by part, as they are compared."""
    return change_norms(upload.payload, upload.download, passage.bounded)


def change_norms(upload: Payload, download: Payload, bounded: Collection[str] = ()) -> dict[str, float]:
    """Returns part -> L2 norm of the difference between an upload and the download that it answers, in fp64.

    A tensor without a counterpart of its name and shape in the download counts as a whole.

    Args:
        upload: The upload.
        download: What its client was sent.
        bounded: Names that are left out: statistics with a bound of their own, which differ between honest clients as
            much as their data.
    """
    squares: dict[str, float] = {}
    for name, tensor in upload.tensors.items():
        part = name.partition("/")[0]
        if name in bounded:
            continue
        value, before = tensor.to(torch.float64), download.tensors.get(name)
        if before is not None and before.shape == tensor.shape:
            value = value - before.to(torch.float64)
        squares[part] = squares.get(part, 0.0) + float(value.square().sum())
    return {part: math.sqrt(square) for part, square in squares.items()}


def shortened(
    upload: Upload, norms: Mapping[str, float], limits: Mapping[str, float], bounded: Collection[str], centre: Payload
) -> Upload:
    """Returns an upload none of whose parts is further from a centre than its limit; the same object if none is.

    Args:
        upload: The upload.
        norms: Part -> the norm of its distance from the centre (`change_norms`).
        limits: Part -> the largest norm.
        bounded: Names of tensors that are left as they are.
        centre: Tensors by the upload's names; one that it lacks, or has in another shape, is 0.
    """
    shares = {part: limit / norms[part] for part, limit in limits.items() if norms.get(part, 0.0) > limit}
    if not shares:
        return upload
    tensors = dict(upload.payload.tensors.items())
    for name, tensor in upload.payload.tensors.items():
        share = shares.get(name.partition("/")[0])
        if share is None or name in bounded or not tensor.is_floating_point():
            continue
        start = centre.tensors.get(name)
        if start is None or start.shape != tensor.shape:
            start = torch.zeros_like(tensor)
        tensors[name] = start.to(torch.float32).lerp(tensor.to(torch.float32), share)
    return replace(upload, payload=Payload(tensors, upload.payload.scalars))


def not_finite(payload: Payload) -> str:
    """Returns the name of a tensor with NaN or infinity, or of such a scalar; empty if all values are finite."""
    for name, tensor in payload.tensors.items():
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            return name
    broken = [name for name, value in payload.scalars.items() if isinstance(value, float) and not math.isfinite(value)]
    return broken[0] if broken else ""


def largest_value(payload: Payload) -> float:
    """Returns the largest magnitude in a payload's floating tensors; infinity for NaN."""
    floating = [value for value in payload.tensors.values() if value.is_floating_point()]
    magnitudes = [float(value.abs().max()) for value in floating if value.numel()]
    return max((math.inf if math.isnan(value) else value for value in magnitudes), default=0.0)


def medians_of(measured: Iterable[Mapping[str, float]], fewest: int = FEWEST_COMPARED) -> dict[str, float]:
    """Returns part -> median of the changes' norms, for the parts that enough uploads have."""
    by_part: dict[str, list[float]] = {}
    for norms in measured:
        for part, norm in norms.items():
            by_part.setdefault(part, []).append(norm)
    return {part: median(norms) for part, norms in by_part.items() if len(norms) >= fewest}
