"""The trainer's process: what it says, and how long it lives."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from fedguild.federation import trainer
from fedguild.federation.site import SiteSettings


def test_it_loads_then_answers_until_its_parent_has_ended(tmp_path, monkeypatch, capsys):
    said: list[str] = []

    class Service:
        work = tmp_path / "work"

        def __init__(self, site: SiteSettings, folder: Path) -> None:
            assert (site.client, folder) == (3, tmp_path)

        def prepare(self) -> None:
            said.append(capsys.readouterr().out)

        def handle(self) -> None: ...

    def serve(work: Path, handle: Callable[..., object], *, running: Callable[[], bool]) -> None:
        said.append(capsys.readouterr().out)
        assert work == Service.work
        assert running()
        monkeypatch.setattr(os, "getppid", lambda: 1)
        assert not running()

    (tmp_path / "site.yaml").write_text("client: 3\nserver: 127.0.0.1:9443\nmodel: {path: embedded}\n")
    monkeypatch.setattr(trainer, "TrainerService", Service)
    monkeypatch.setattr(trainer.ipc, "serve", serve)
    trainer.run_trainer(tmp_path)
    assert said == ["Loading embedded.\n", "Ready.\n"]
