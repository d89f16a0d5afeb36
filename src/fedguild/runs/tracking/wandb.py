"""Weights & Biases: a run of a project, on its server or, with `WANDB_MODE=offline`, in the run's folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, ClassVar
from uuid import uuid4

from fedguild.runs.tracking import Begun, TrackedRun


class Wandb:
    """Logs rounds as the steps of a wandb run.

    Only the values are sent: no console output, no code, no system metrics. wandb's own environment variables apply
    (`WANDB_MODE`, `WANDB_ENTITY`, `WANDB_BASE_URL`, …).
    """

    PACKAGE: ClassVar[str] = "wandb"
    EXTRA: ClassVar[str] = "wandb"
    TAKES_BACK: ClassVar[bool] = False

    _run: Any

    def begin(self, run: TrackedRun) -> Begun:
        """Begins a run, or continues it by its id.

        Raises:
            RuntimeError: wandb would ask for a login.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        import wandb

        mode = os.environ.get("WANDB_MODE", "online")
        if mode not in ("offline", "disabled", "dryrun") and not wandb.api.api_key:
            raise RuntimeError("not logged in; `wandb login`, or set WANDB_MODE=offline")
        identity = run.id or uuid4().hex[:12]
        while next(run.folder.glob(f"wandb/*{time.strftime('%Y%m%d_%H%M%S')}-{identity}"), None):
            time.sleep(0.1)  # wandb names a folder by the second, and would overwrite this one
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            group=run.group or None,
            tags=list(run.tags) or None,
            config=dict(run.settings),
            dir=str(run.folder),
            id=identity,
            resume="allow" if run.id else None,
            reinit="create_new",
            settings=wandb.Settings(
                silent=True,
                console="off",
                save_code=False,
                disable_git=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        held = self._run.step - 1
        return Begun(identity, held if run.id and held >= 0 else None)

    def add(self, round: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=round, commit=True)

    def finish(self, *, failed: bool) -> None:
        self._run.finish(exit_code=int(failed))


TRACKER = Wandb
