"""The trainer: the long-lived process on a client's machine that keeps the backbone and answers requests."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedguild.config import Config
from fedguild.federation.flower import ipc
from fedguild.federation.site import load_site
from fedguild.federation.trainer_service import TrainerService


def run_trainer(folder: Path) -> None:
    """Loads the site's data and model, then answers requests until the parent process has ended.

    Raises:
        FedGuildError: the site's file, data or model has a fault.
    """
    site = load_site(folder)
    service = TrainerService(site, folder)
    print(f"Loading {site.model.path}.", flush=True)
    service.prepare()
    print("Ready.", flush=True)
    parent = os.getppid()
    ipc.serve(service.work, service.handle, running=lambda: os.getppid() == parent)


def check_run(folder: Path, config: Config) -> tuple[list[str], str]:
    """Returns what a site's operator should know of a run, and why the site refuses it; empty if it does not.

    Raises:
        FedGuildError: the site's file, data or model has a fault, or the run does not fit the model.
    """
    site = load_site(folder)
    with contextlib.chdir(folder):  # where the trainer runs, and so where the site's relative paths begin
        service = TrainerService(site, Path())
        found, refusal = service.exposure(config)
        return [str(found), *filter(None, [service.unscored(config)])], refusal
