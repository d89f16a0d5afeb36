"""Clients' replies: uploads wait on disk, training reports are checked, and unexpected replies are deleted."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from itertools import count
from pathlib import Path
from typing import Any

from fedguild.core.errors import UploadError
from fedguild.core.files import make_folder, write_bytes
from fedguild.engines.client_report import ClientReport
from fedguild.federation.flower.transport import Transport
from fedguild.federation.schema import TrainAnswer, read_metadata
from fedguild.model.info import ModelInfo
from fedguild.server.validation import ROUNDING

SWEEP_SECONDS = 30.0
"""Time between two looks at the requests that were given up."""
MOST, AT_ONCE = 8192, 64
"""Requests that are remembered, and those of them that one look asks for."""


class UploadStore:
    """A folder of uploads waiting to be aggregated, so that memory holds one at a time; emptied when it is opened."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._next = folder, count()
        make_folder(folder)
        for leftover in folder.iterdir():
            leftover.unlink()

    def put(self, round: int, client: int, content: bytes) -> Path:
        """Writes an upload and returns its path, which no other has: a client that was asked twice may answer twice."""
        path = self._folder / f"round-{round:05d}-client-{client:05d}-{next(self._next)}.upload"
        write_bytes(path, content)
        return path

    def take(self, path: Path) -> bytes:
        content = path.read_bytes()
        path.unlink()
        return content


class Abandoned:
    """Requests that were given up, whose answers must not stay in Flower's database.

    Flower's server keeps an answer until it is fetched. A client that answers abandoned requests would fill its disk.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._ids: deque[str] = deque(maxlen=MOST)
        self._next = -math.inf

    def __len__(self) -> int:
        return len(self._ids)

    def add(self, message_id: str) -> None:
        """Gives a request up; beyond `MOST`, the oldest is forgotten."""
        self._ids.append(message_id)

    def sweep(self, now: float) -> None:
        """Deletes the answers that have arrived, if the last look is long enough ago; `now` is in seconds."""
        if now < self._next:
            return
        self._next = now + SWEEP_SECONDS
        for _ in range(min(AT_ONCE, len(self._ids))):
            message_id = self._ids.popleft()
            if self._transport.poll(message_id, 0) is None:
                self._ids.append(message_id)


def training_report(values: Mapping[str, Any], model: ModelInfo) -> ClientReport:
    """Returns the report of a client with all values in range.

    Raises:
        UploadError: a value is missing, of another type or out of range, or the frequencies have another shape than the
            model's, or those of a layer sum to more than the experts of a token.
    """
    answer = read_metadata(TrainAnswer, values, "A reply has no readable training report")
    expected = (len(model.moe), model.moe[0].num_experts) if model.moe else None
    found = answer.shape()
    if found is not None and found != expected:
        raise UploadError(
            f"A reply reports the activations of {found[0]} layers with {found[1]} experts, but the model "
            f"{f'has {expected[0]} with {expected[1]}' if expected else 'is dense'}."
        )
    report = ClientReport.from_json(values)
    for layer, shares in zip(model.moe, () if report.frequency is None else report.frequency, strict=False):
        total = float(shares.double().sum())
        if total > layer.top_k * (1 + ROUNDING):
            raise UploadError(
                f"A reply reports activations of '{layer.name}' that sum to {total:.6g}, but a token activates at "
                f"most {layer.top_k} expert(s)."
            )
    return report
