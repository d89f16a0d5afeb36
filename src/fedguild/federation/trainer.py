"""The trainer: the long-lived process on a client's machine that keeps the backbone and answers."""

from __future__ import annotations

import os
from pathlib import Path

from fedguild.config.site import load_site
from fedguild.engines.flower import link
from fedguild.federation.desk import Desk


def run_trainer(folder: Path) -> None:
    """Loads the site's data and model, then answers until the process that started it is gone.

    Raises:
        FedGuildError: the site's file, data or model has a fault.
    """
    site = load_site(folder)
    desk = Desk(site, folder)
    print(f"Loading {site.model.path}.", flush=True)
    desk.prepare()
    print("Ready.", flush=True)
    parent = os.getppid()
    link.serve(desk.work, desk.answer, running=lambda: os.getppid() == parent)
