"""Fixtures of the tests over Flower."""

from __future__ import annotations

import pytest

from fedguild import setup
from fedguild.config import Config
from fedguild.model.backbone import Backbone

_LOADED: dict[str, Backbone] = {}


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, no_report: None) -> None:
    """Loads every model once for all runs, servers and trainers in this process."""
    load_model = setup.load_model

    def load(config: Config) -> Backbone:
        key = config.model.model_dump_json()
        if key not in _LOADED:
            _LOADED[key] = load_model(config)
        return _LOADED[key]

    monkeypatch.setattr(setup, "load_model", load)
    monkeypatch.setattr("fedguild.federation.serving.load_model", load)
