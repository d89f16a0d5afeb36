"""Fixtures of the tests with hostile clients."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.config import Config, load_config
from fedguild.methods import METHODS
from tests.runs.runs import load_models_once, small_settings

SETTINGS = (
    "federation.clients=3",
    "federation.rounds=2",
    "federation.cohort_size=1",
    "evaluation.every=99",
    "evaluation.max_examples=2",
    "training.steps=1",
)


def config_of(model: str, base: str, *overrides: str) -> Config:
    """Returns a config of a few seconds: a preset on a model, with the settings of these tests."""
    settings = small_settings(Path(model), *SETTINGS, *overrides)
    ranked = "rank" in METHODS.load(base.partition("/")[0]).Settings.model_fields
    return load_config(base, [each for each in settings if ranked or not each.startswith("method.rank")])


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads every model once for all runs, servers and trainers in this process."""
    load_models_once(monkeypatch, "runs.setup.preparation", "federation.testing", "federation.serving")


@pytest.fixture(scope="session")
def config(olmoe_folder: Path) -> Config:
    """FedIT with three clients of a random model, two rounds of one step."""
    return config_of(str(olmoe_folder), "fedit/tiny-tasks")
