"""TensorBoard events with a run's records; observations with columns appear only on the report's page."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedguild.errors import ConfigError
from fedguild.server.run_log import ClientRecord, EvaluationRecord, ObservationRecord, Record, RoundRecord


class Tracker:
    """Writes scores, losses and costs to `FOLDER/tensorboard`; does nothing unless enabled.

    Args:
        folder: The run folder.
        enabled: Whether anything is written.
        first_round: TensorBoard drops the events that an interrupted run wrote from this round on.

    Raises:
        ConfigError: it is enabled, but TensorBoard is not installed.
    """

    def __init__(self, folder: Path, *, enabled: bool, first_round: int = 0) -> None:
        self._writer: Any = None
        if enabled:
            try:
                from torch.utils.tensorboard import SummaryWriter
            except ImportError as error:
                raise ConfigError(
                    "tracking.tensorboard needs TensorBoard, which is not installed.",
                    "pip install 'fedguild[track]', or set tracking.tensorboard=false.",
                ) from error
            self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=first_round)

    def __enter__(self) -> Tracker:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def add(self, records: Sequence[Record]) -> None:
        """Adds a round's records."""
        if self._writer is None:
            return
        for record in records:
            for tag, value in _scalars(record).items():
                self._writer.add_scalar(tag, value, record.round)
        self._writer.flush()


def _scalars(record: Record) -> dict[str, float]:
    if isinstance(record, EvaluationRecord):
        return {f"score/{record.scope}/{record.name}": record.score}
    if isinstance(record, ClientRecord):
        name = f"client-{record.client:03d}"
        return {
            **({} if record.train_loss is None else {f"loss/{name}": record.train_loss}),
            f"upload_bytes/{name}": float(record.upload_bytes),
            f"download_bytes/{name}": float(record.download_bytes),
        }
    if isinstance(record, ObservationRecord) and not record.columns:
        return {
            f"observed/{record.name}/{row}": value for row, (value, *_) in zip(record.rows, record.values, strict=True)
        }
    if isinstance(record, RoundRecord):
        return {"round_seconds": record.seconds}
    return {}
