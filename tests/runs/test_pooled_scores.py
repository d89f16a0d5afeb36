"""Clients' own models on all clients' held-out examples."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean

import pytest

from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.runs import experiment
from tests.runs.runs import save_model, small_config


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("model") / "olmoe")


def scores(folder: Path, scope: str) -> dict[str, EvaluationRecord]:
    records = [record for record in RunLog(folder).read() if isinstance(record, EvaluationRecord)]
    return {record.name: record for record in records if (record.round, record.scope) == (1, scope)}


def test_every_client_answers_all_the_questions(olmoe: Path, tmp_path: Path) -> None:
    """A client of FLAME runs the global LoRA with its own rescaler, so it may differ from its budget's score."""
    options = ("federation.rounds=1", "evaluation.pooled=true")
    experiment.run(small_config(olmoe, *options), tmp_path / "run")
    pooled, budgets = scores(tmp_path / "run", "pooled"), scores(tmp_path / "run", "budget")
    assert list(pooled) == [f"client-{index:03d}" for index in range(4)]
    assert {record.examples for record in pooled.values()} == {record.examples for record in budgets.values()}
    assert not scores(tmp_path / "run", "client")
    summary = scores(tmp_path / "run", "summary")["pooled"]
    assert summary.score == pytest.approx(fmean(record.score for record in pooled.values()))


def test_a_client_of_pfl_moe_does_not_answer_with_the_global_adapter(olmoe: Path, tmp_path: Path) -> None:
    """Which is FedIT's, and what the budget's score is about; its mixture is held against an oracle elsewhere."""
    options = (
        "federation.rounds=1",
        "evaluation.pooled=true",
        "evaluation.perplexity=true",
        "method.personal_from=1",
        "federation.budgets=[{name: all, active_experts: 4}]",
    )
    experiment.run(small_config(olmoe, *options, base="pfl-moe/tiny-tasks"), tmp_path / "run")
    (budget,) = scores(tmp_path / "run", "budget").values()
    pooled = [record.metrics for record in scores(tmp_path / "run", "pooled").values()]
    assert len(pooled) > 1
    assert all(metrics != pytest.approx(budget.metrics) for metrics in pooled)
    assert pooled[0] != pytest.approx(pooled[1])
