"""TensorBoard: event files in the folder `tensorboard` of the run's folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fedguild.runs.tracking import Begun, TrackedRun


class TensorBoard:
    """Writes event files; TensorBoard shows every run below a folder under its folder's name.

    Events have no project, name, group or tags.
    """

    PACKAGE: ClassVar[str] = "tensorboard"
    EXTRA: ClassVar[str] = "tensorboard"
    TAKES_BACK: ClassVar[bool] = True

    _writer: Any

    def begin(self, run: TrackedRun) -> Begun:
        """Opens a new event file, whose first event makes TensorBoard drop values of the others after `run.round`."""
        from torch.utils.tensorboard import SummaryWriter

        folder = run.folder / "tensorboard"
        self._writer = SummaryWriter(str(folder), purge_step=run.round + 1)
        return Begun(folder.name)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, round)
        self._writer.flush()

    def finish(self, *, failed: bool) -> None:
        self._writer.close()


TRACKER = TensorBoard
