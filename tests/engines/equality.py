"""Comparison of a run on another engine with one on `local`: the same bytes, and with cohorts of one the same bits.

It knows neither methods nor engines: a case of `tests.methods.test_matrix` has a method's settings, and the caller
brings the function that makes the engine of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from fedguild.config import Config
from fedguild.core.layout import MEMORY
from fedguild.measuring.log.records import ClientRecord, RunLog
from fedguild.methods import METHODS
from fedguild.runs import experiment
from fedguild.runs.setup import Experiment
from fedguild.runs.setup.experiment import Scorer
from fedguild.server.engine import Engine
from tests.methods.test_matrix import CASES
from tests.runs.runs import Ended, assert_same, ended, save_model, small_config

SETTINGS = (
    "federation.rounds=2",
    "federation.cohort_size=1",
    "federation.client_fraction=0.75",
    "evaluation.every=2",
    "evaluation.max_examples=2",
    "evaluation.clients=true",
    "evaluation.trained=true",
    "data.options={train_examples: 96, test_examples: 12, families: [sum, reverse]}",
)
QUICK = ("fedmoe", "flora", "pfl-moe")
"""Methods that differ in what a client is sent and keeps besides LoRA: other experts, merged changes, memory."""
METHODS_TO_COMPARE = [
    pytest.param(label, marks=() if label in QUICK else pytest.mark.long) for label in sorted(METHODS)
]
"""Every method; those that are not quick in `make test-long`."""
MakeEngine = Callable[[Experiment], tuple[Engine, Scorer | None]]


def save_models(folder: Path) -> dict[str, Path]:
    return {family: save_model(folder / family, family) for family in sorted({case.family for case in CASES.values()})}


def case_config(label: str, models: dict[str, Path], *overrides: str) -> Config:
    """Returns the config of a case: two rounds, three of four clients in each, cohorts of one client."""
    case = CASES[label]
    config = small_config(models[case.family], *SETTINGS, *overrides)
    name = label.partition(" ")[0]
    assert name in METHODS
    config = config.model_copy(update={"method": type(config.method)(name=name, options=dict(case.options))})
    if case.family == "llama":
        budgets = tuple(budget.model_copy(update={"active_experts": 0}) for budget in config.federation.budgets)
        config = config.model_copy(update={"federation": config.federation.model_copy(update={"budgets": budgets})})
    return config


def assert_equal_to_local(
    label: str, models: dict[str, Path], folder: Path, make_engine: MakeEngine, *overrides: str
) -> None:
    """Asserts that a case ends alike on an engine and on `local`: bytes, metrics, tensors, memory."""
    config = case_config(label, models, *overrides)
    experiment.run(config, folder / "local")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.runs.experiment.make_engine", make_engine)
        experiment.run(config, folder / "other")
    assert traffic(folder / "other") == traffic(folder / "local")
    assert_same(ended(folder / "other"), ended(folder / "local"))


def traffic(folder: Path) -> list[tuple[int, int, int, int, dict[str, int]]]:
    records = [record for record in RunLog(folder).read() if isinstance(record, ClientRecord)]
    assert records
    return [(r.round, r.client, r.download_bytes, r.upload_bytes, r.upload_parts) for r in records]


def newest_memory(run: Ended) -> Ended:
    return replace(run, memory={name.split("/")[-2]: content for name, content in sorted(run.memory.items())})


def site_memory(folder: Path) -> dict[str, bytes]:
    paths = sorted(folder.rglob(f"{MEMORY}/*/*.memory"), key=lambda path: path.name)
    return {path.parent.name: path.read_bytes() for path in paths}
