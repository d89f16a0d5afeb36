"""Rows, a small config on a random model that is loaded once, and runs that write no report."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import fedguild
from fedguild.config import Config
from fedguild.model.backbone import Backbone, load_backbone
from tests.runs.runs import load_models_once, small_settings

ROWS: list[dict[str, Any]] = [
    {"instruction": f"Say {number}.", "response": str(number % 3), "label": f"kind {number % 2}"}
    for number in range(48)
]
BASE = "flame/tiny-tasks"
CLIENTS = 4


@pytest.fixture(scope="session")
def settings(olmoe_folder: Path) -> list[str]:
    """Overrides that make a run of four clients and three rounds small."""
    return [*small_settings(olmoe_folder), "evaluation.max_examples=2"]


@pytest.fixture(scope="session")
def own_data(settings: list[str]) -> list[str]:
    """The same for a run with a dataset of its own, which has none of the options of generated tasks."""
    return [setting for setting in settings if not setting.startswith("data.options")]


@pytest.fixture(scope="package", autouse=True)
def _once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        load_models_once(patch, "runs.setup.preparation")
        yield


@pytest.fixture(autouse=True)
def _undrawn(undrawn: None) -> None:
    """Comparisons write pages without figures."""


METHODS = {
    "ub-smoe": "{name: ub-smoe, rank: 2, targets: [attention, router, experts], candidates: 3}",
    "fedamole": "{name: fedamole, rank: 2, experts: 6, active_experts: 2, experts_per_client: 4, embedding_share: 0.3, "
    "targets: [attention]}",
    "pfl-moe": "{name: pfl-moe, rank: 2, targets: [q_proj, experts]}",
}
"""Methods whose models cannot be merged, with small settings."""


@pytest.fixture(scope="session")
def routed_runs(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> dict[str, Path]:
    """Method -> the folder of its run of one round."""
    plain = [setting for setting in settings if not setting.startswith("method.")]
    plain += ["federation.rounds=1", "training.learning_rate=0.05", "evaluation.max_examples=1"]
    return {
        name: fedguild.run(BASE, *plain, f"method={method}", output=tmp_path_factory.mktemp("runs") / name).folder
        for name, method in METHODS.items()
    }


@pytest.fixture(scope="session")
def fedit(tmp_path_factory: pytest.TempPathFactory, settings: list[str]) -> Path:
    """The folder of a run of one round whose model is an adapter."""
    plain = [setting for setting in settings if not setting.startswith("method.")]
    method = "method={name: fedit, rank: 2, targets: [attention, router, experts]}"
    folder = tmp_path_factory.mktemp("runs") / "fedit"
    return fedguild.run(BASE, *plain, "federation.rounds=1", method, output=folder).folder


def loaded_anew(config: Config) -> Backbone:
    """Stands in for `load_model` of a run where something is attached to the model, and stays attached."""
    return load_backbone(**config.model.model_dump())


@pytest.fixture
def loaded_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.runs.setup.preparation.load_model", loaded_anew)
