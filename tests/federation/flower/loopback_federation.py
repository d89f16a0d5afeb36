"""A federation of small clients in this process, over the loopback Grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedguild.config import Config
from fedguild.core.files import write_text
from fedguild.core.progress import Silent
from fedguild.federation.flower.adapter import GridTransport
from fedguild.federation.serving import serve
from fedguild.federation.site import ServerSettings, SiteSettings
from fedguild.federation.trainer_service import TrainerService
from fedguild.runs.experiment import RunResult
from fedguild.runs.setup import preparation
from tests.federation.flower.loopback import LoopbackGrid, LoopbackNode
from tests.runs.runs import small_config

CLIENTS = 3
QUICK = ("federation.clients=3", "federation.rounds=2", "federation.cohort_size=1")


class Lines(Silent):
    """Keeps the lines that the server prints."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)

    def says(self, *parts: str) -> bool:
        return any(all(part in line for part in parts) for line in self.lines)


def site_of(config: Config, client: int, **changes: Any) -> SiteSettings:
    """Returns the settings of one client's site, which holds its share of the run's data."""
    data = {**config.data.model_dump(), "seed": config.seed, "shares": config.federation.clients, "share": client}
    del data["max_length"]
    settings = {"client": client, "server": "127.0.0.1:1", "model": config.model.model_dump(), "data": data}
    accept = {"min_scored": 1, **changes.pop("accept", {})}  # the runs of these tests score few examples
    return SiteSettings.model_validate({**settings, "accept": accept, **changes})


def trainers_of(config: Config, folder: Path, changes: Sequence[dict[str, Any]] = ()) -> list[TrainerService]:
    sites = [
        site_of(config, index, **change) for index, change in enumerate(changes or [{}] * config.federation.clients)
    ]
    return [
        TrainerService(site, folder / f"client-{site.client:03d}", load=lambda config: preparation.load_model(config))
        for site in sites
    ]


def grid_of(trainers: Sequence[TrainerService]) -> LoopbackGrid:
    return LoopbackGrid(LoopbackNode(100 + trainer.site.client, trainer.handle) for trainer in trainers)


def serve_on(
    grid: LoopbackGrid, config: Config, folder: Path, progress: Lines | None = None, **server: Any
) -> RunResult:
    write_text(folder / "run.yaml", config.resolved_yaml())
    settings = ServerSettings.model_validate(
        {"server_evaluation": True, "wait_seconds": 5, "reconnect_seconds": 0, "deliver": False, **server}
    )
    return serve(GridTransport(grid), settings, folder, progress=progress, poll_seconds=0.0)


__all__ = ["CLIENTS", "QUICK", "Lines", "grid_of", "serve_on", "site_of", "small_config", "trainers_of"]
