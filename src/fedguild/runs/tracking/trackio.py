"""Trackio: a run of a local project (`trackio show`), or of the Space that `TRACKIO_SPACE_ID` names."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from fedguild.runs.tracking import Begun, TrackedRun


class Trackio:
    """Logs rounds as the steps of a Trackio run.

    Trackio identifies a run by its name, so the name ends with part of the id. It has no tags; they are a key of the
    run's config.
    """

    PACKAGE: ClassVar[str] = "trackio"
    EXTRA: ClassVar[str] = "trackio"
    TAKES_BACK: ClassVar[bool] = False

    _run: Any

    def begin(self, run: TrackedRun) -> Begun:
        with contextlib.redirect_stdout(sys.stderr):
            import trackio

            name = run.id or f"{run.name}-{uuid4().hex[:6]}"
            self._run = trackio.init(
                project=run.project,
                name=name,
                group=run.group or None,
                config={**run.settings, "tags": list(run.tags)},
                resume="must" if run.id else "never",
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        following = getattr(self._run, "_next_step", None) if run.id else None  # no public name says it
        return Begun(name, None if following is None else following - 1)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round)

    def finish(self, *, failed: bool) -> None:
        with contextlib.redirect_stdout(sys.stderr):
            self._run.finish()


TRACKER = Trackio
