"""Protection of the state against valid uploads that would ruin it.

A guarded round writes its valid uploads to disk before it aggregates them, so that it can compare them and aggregate
again without some of them:

1. The norm of an upload's change is bounded relative to the round's median, part by part.
2. Where the operator asks for it, the mean over the clients is replaced by a robust estimate.
3. An aggregate with NaN or infinity, or one that cannot be computed, is never returned: the round is aggregated again
   without the uploads that did it.

Sources: norm bounds, Z. Sun et al., "Can You Really Backdoor Federated Learning?", arXiv 1911.07963, 2019, section 4;
the coordinate-wise median and trimmed mean, D. Yin et al., "Byzantine-Robust Distributed Learning", ICML 2018,
Definitions 1 and 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from fedguild.core.errors import QuorumError, UploadError
from fedguild.core.files import make_folder, write_bytes
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import ADAPTER, Payload
from fedguild.server.method import Method
from fedguild.server.terms import Upload
from fedguild.server.validation import unusable

Robust = Literal["none", "trimmed_mean", "median", "clipped"]
NORM_FACTOR = 10.0
"""How far beyond the round's median the norm of a change may be, where `federation.norm_factor` is auto."""
FEWEST_COMPARED = 4
"""With fewer uploads a median says nothing about the others."""
LARGEST_VALUE = 1e6
"""Largest magnitude of a value in a real client's upload, where its method gives no other bound."""
LARGEST_TRAINED = 100.0
"""Trained values are below this; who was sent larger ones may fail through no fault of its own."""
KEY_REVOKED = "its key was revoked"
"""Why nothing of a client is used any more, whenever it came."""

Reject = Callable[[Upload, str], None]
"""Records that an upload is not aggregated, and why."""


@dataclass(frozen=True, eq=False)
class _Spooled:
    """A valid upload on disk; `norms` are the L2 norms of its change by part."""

    upload: Upload
    download: Payload
    path: Path
    norms: Mapping[str, float]

    def beyond(self, medians: Mapping[str, float]) -> float:
        """Returns the largest of its norms as a multiple of the part's median."""
        ratios = [self.norms.get(part, 0.0) / middle if middle else math.inf for part, middle in medians.items()]
        return max(ratios, default=0.0)


class Guard:
    """The protection of one run's state.

    Args:
        folder: Where uploads wait until their round is complete; emptied when it begins and when it ends.
        norm_factor: The largest norm of a part's change, as a multiple of the round's median; None for no bound.
        robust: The estimate in place of the mean over the clients.
        trim: Share of the clients that `trimmed_mean` leaves out at either end of each value.
        largest_value: The largest magnitude in an upload; None for no bound.
        revoked: Returns whether a client's key was revoked, perhaps after its upload came.
    """

    def __init__(
        self,
        folder: Path,
        *,
        norm_factor: float | None = NORM_FACTOR,
        robust: Robust = "none",
        trim: float = 0.2,
        largest_value: float | None = LARGEST_VALUE,
        revoked: Callable[[int], bool] = lambda client: False,
    ) -> None:
        self.folder = folder
        self.norm_factor = norm_factor
        self.robust = robust
        self.trim = trim
        self.largest_value = largest_value
        self.revoked = revoked

    def aggregate(
        self,
        method: Method,
        state: Payload,
        uploads: Iterable[tuple[Upload, Payload]],
        reject: Reject,
        bounded: Collection[str] = (),
    ) -> Payload:
        """Returns the next state, which is finite.

        Args:
            method: The method.
            state: The state before the round.
            uploads: The round's valid uploads, each with the download that it answers.
            reject: Records an upload that is left out.
            bounded: Names of tensors with a bound of their own, whose norms are not compared.

        Raises:
            QuorumError: without any upload the aggregate is no better.
        """
        self._clear()
        try:
            spooled = [self._spool(number, *pair, bounded) for number, pair in enumerate(uploads)]
            spooled = self._within_bound(self._not_revoked(spooled, reject), reject)
            while True:
                aggregate, fault = self._attempt(method, state, spooled)
                if aggregate is not None:
                    return aggregate
                if not spooled:
                    raise QuorumError(f"The state after this round cannot be computed: {fault}.")
                guilty = self._guilty(method, state, spooled)
                for entry in guilty:
                    reject(entry.upload, f"the aggregate with it {fault}")
                spooled = [entry for entry in spooled if entry not in guilty]
        finally:
            self._clear()

    def _spool(self, number: int, upload: Upload, download: Payload, bounded: Collection[str]) -> _Spooled:
        path = self.folder / f"{number:05d}-client-{upload.client.index:05d}.upload"
        write_bytes(path, pack(upload.payload.tensors, upload.payload.scalars))
        norms = change_norms(upload.payload, download, bounded)
        return _Spooled(replace(upload, payload=Payload()), download, path, norms)

    def _not_revoked(self, spooled: Sequence[_Spooled], reject: Reject) -> list[_Spooled]:
        kept = []
        for entry in spooled:
            if self.revoked(entry.upload.client.index):
                reject(entry.upload, KEY_REVOKED)
            else:
                kept.append(entry)
        return kept

    def _within_bound(self, spooled: Sequence[_Spooled], reject: Reject) -> list[_Spooled]:
        """Returns the uploads whose changes are within the bound; rejects the others."""
        if self.norm_factor is None:
            return list(spooled)
        medians = _medians(spooled)
        kept = []
        for entry in spooled:
            beyond = [
                part for part, middle in medians.items() if entry.norms.get(part, 0.0) > self.norm_factor * middle
            ]
            if beyond:
                part = max(beyond, key=lambda name: entry.norms[name])
                reject(
                    entry.upload,
                    f"the change of '{part}' has the norm {entry.norms[part]:.4g}, beyond {self.norm_factor:g} times "
                    f"the round's median of {medians[part]:.4g} (federation.norm_factor)",
                )
            else:
                kept.append(entry)
        return kept

    def _attempt(self, method: Method, state: Payload, spooled: Sequence[_Spooled]) -> tuple[Payload | None, str]:
        """Returns the aggregate, or None and what is wrong with it, as a verb phrase."""
        try:
            aggregate = method.aggregate(state, self._read(spooled))
        except Exception as error:
            return None, f"cannot be computed ({unusable(error)})"
        broken = not_finite(aggregate)
        return (None, f"has NaN or infinity in '{broken}'") if broken else (aggregate, "")

    def _guilty(self, method: Method, state: Payload, spooled: Sequence[_Spooled]) -> list[_Spooled]:
        """Returns the uploads that ruin the aggregate alone; if there are none, the one furthest beyond a median."""
        alone = [entry for entry in spooled if self._attempt(method, state, [entry])[0] is None]
        medians = _medians(spooled, fewest=1)
        return alone or [max(spooled, key=lambda entry: entry.beyond(medians))]

    def _read(self, spooled: Sequence[_Spooled]) -> Iterator[Upload]:
        """Yields the uploads in the order in which they came, one in memory at a time."""
        centre = self._centre(spooled)
        limits = _medians(spooled, fewest=1) if self.robust == "clipped" else {}
        for entry in spooled:
            payload = Payload(*unpack(entry.path.read_bytes()))
            tensors = {**payload.tensors, **{name: centre[name] for name in payload.tensors if name in centre}}
            for part, limit in limits.items():
                if entry.norms.get(part, 0.0) > limit:
                    tensors |= _shortened(
                        payload.part(part), entry.download.part(part), part, limit / entry.norms[part]
                    )
            yield replace(entry.upload, payload=Payload(tensors, payload.scalars))

    def _centre(self, spooled: Sequence[_Spooled]) -> dict[str, Tensor]:
        """Returns name -> robust estimate of every adapter tensor over its holders; none for a mean."""
        if self.robust not in ("trimmed_mean", "median"):
            return {}
        holders: dict[str, list[Path]] = {}
        for entry in spooled:
            with safe_open(entry.path, framework="pt") as file:
                for name in list(file.keys()):
                    if name.startswith(f"{ADAPTER}/"):
                        holders.setdefault(name, []).append(entry.path)
        return {
            name: robust_centre([_tensor(path, name) for path in paths], self.robust, self.trim)
            for name, paths in holders.items()
        }

    def _clear(self) -> None:
        make_folder(self.folder)
        for leftover in self.folder.iterdir():
            leftover.unlink()


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


def robust_centre(values: Sequence[Tensor], robust: Literal["trimmed_mean", "median"], trim: float) -> Tensor:
    """Returns the coordinate-wise median or trimmed mean of several clients' tensors (Yin et al., Definitions 1 and 2).

    Args:
        values: A tensor of one shape from each client.
        robust: The estimate. The median of an even number is the mean of the two in the middle.
        trim: Share of the clients left out at either end of each value, rounded up, but never all of them.

    Returns:
        The estimate in fp32.

    Raises:
        UploadError: the shapes differ.
    """
    if len({tuple(value.shape) for value in values}) > 1:
        raise UploadError("the clients' tensors differ in shape, so that they have no robust mean")
    ordered = torch.stack([value.to(torch.float32) for value in values]).sort(dim=0).values
    count = len(values)
    left_out = (count - 1) // 2
    if robust == "trimmed_mean":
        left_out = min(math.ceil(trim * count), left_out)
    return ordered[left_out : count - left_out].mean(dim=0)


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


def _medians(spooled: Sequence[_Spooled], fewest: int = FEWEST_COMPARED) -> dict[str, float]:
    """Returns part -> median of the changes' norms, for the parts that enough uploads have."""
    by_part: dict[str, list[float]] = {}
    for entry in spooled:
        for part, norm in entry.norms.items():
            by_part.setdefault(part, []).append(norm)
    return {part: median(norms) for part, norms in by_part.items() if len(norms) >= fewest}


def _shortened(tensors: Mapping[str, Tensor], before: Mapping[str, Tensor], part: str, by: float) -> dict[str, Tensor]:
    """Returns a part's tensors, by their whole names, with their change from `before` multiplied by a factor."""
    shortened = {}
    for name, tensor in tensors.items():
        start = before.get(name)
        if start is None or start.shape != tensor.shape:
            start = torch.zeros_like(tensor)
        shortened[f"{part}/{name}"] = start.to(torch.float32).lerp(tensor.to(torch.float32), by)
    return shortened


def _tensor(path: Path, name: str) -> Tensor:
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
