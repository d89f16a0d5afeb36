"""Fixtures of the tests with hostile clients."""

from __future__ import annotations

import pytest

from fedguild import setup
from fedguild.config import Config
from fedguild.model.backbone import Backbone
from tests.experiment.runs import save_model, small_config

_LOADED: dict[str, Backbone] = {}
SETTINGS = (
    "federation.clients=3",
    "federation.rounds=2",
    "federation.cohort_size=1",
    "evaluation.every=99",
    "evaluation.max_examples=2",
    "training.steps=1",
)


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, no_report: None) -> None:
    """Loads every model once for all runs, servers and trainers in this process."""
    load_model = setup.load_model

    def load(config: Config) -> Backbone:
        key = config.model.model_dump_json()
        if key not in _LOADED:
            _LOADED[key] = load_model(config)
        return _LOADED[key]

    for module in ("setup", "testing", "federation.serving"):
        monkeypatch.setattr(f"fedguild.{module}.load_model", load)


@pytest.fixture(scope="session")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """FedIT with three clients of a random model, two rounds of one step."""
    return small_config(save_model(tmp_path_factory.mktemp("model")), *SETTINGS, base="fedit/tiny-tasks")
