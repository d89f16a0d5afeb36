"""Runs that score clients as trained, as received, and on all clients' held-out examples."""

from __future__ import annotations

from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.runs import experiment, scoring
from tests.runs.runs import Killed, ended, kill_at, small_config

BOTH = ("federation.rounds=2", "evaluation.trained=true", "evaluation.received=true", "training.learning_rate=0.05")


def scores(folder: Path, scope: str, round: int) -> dict[str, EvaluationRecord]:
    """The evaluations of a scope after a round, by name."""
    records = [record for record in RunLog(folder).read() if isinstance(record, EvaluationRecord)]
    return {record.name: record for record in records if (record.round, record.scope) == (round, scope)}


def test_every_client_is_scored_twice_on_its_own_data(olmoe_folder: Path, tmp_path: Path) -> None:
    result = experiment.run(small_config(olmoe_folder, *BOTH, "evaluation.perplexity=true"), tmp_path / "run")
    for number in range(3):
        trained, received = (scores(tmp_path / "run", scope, number) for scope in ("trained", "received"))
        assert list(trained) == list(received) == [f"client-00{index}" for index in range(4)]
        apart = [trained[name].metrics["perplexity"] - received[name].metrics["perplexity"] for name in trained]
        assert all(abs(gap) > 1e-3 for gap in apart) if number else apart == [0.0] * 4
        summary = scores(tmp_path / "run", "summary", number)
        assert summary["trained"].score == pytest.approx(fmean(record.score for record in trained.values()))
        assert "mtal" not in summary
    assert result.trained.keys() == result.received.keys()
    again = experiment.evaluate(tmp_path / "run")
    assert again.trained == result.trained
    assert again.received == result.received


@pytest.mark.parametrize(
    ("method", "own"), [("fedavg", "received"), ("pfl-moe", "trained"), ("fedex-lora", "received"), ("guild", None)]
)
def test_the_same_models_are_scored_once(method, own, olmoe_folder, tmp_path, monkeypatch):
    """A client's own model is what it trained or receives, or a third one; none is compared if the backbone changes."""
    scored: list[str] = []
    scored_as = scoring._scored

    def counted(experiment: Any, models: Any, examples: Any, where: Any) -> list[EvaluationRecord]:
        scored.append(where[0])
        return scored_as(experiment, models, examples, where)

    monkeypatch.setattr(scoring, "_scored", counted)
    scores_of_all = ("evaluation.clients=true", "evaluation.perplexity=true", "evaluation.pooled=false")
    settings = (*BOTH, *scores_of_all, "evaluation.every=2", "evaluation.eval_on_start=false")
    experiment.run(small_config(olmoe_folder, *settings, base=f"{method}/tiny-tasks"), tmp_path / "run")
    others = {"trained": ["received"], "received": ["trained"]}.get(own or "", ["trained", "received"])
    once = method != "fedex-lora"
    assert scored == ["budget", "client", *(others if once else ["trained", "received"])]
    client, *both = (scores(tmp_path / "run", scope, 2) for scope in ("client", "trained", "received"))
    for scope, found in zip(("trained", "received"), both, strict=True):
        same = [record.model_copy(update={"scope": scope}) for record in client.values()]
        assert (same == list(found.values())) == (scope == own), scope


def test_a_killed_run_has_the_same_scores(olmoe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The models as trained are of the round that counts, also after a round that was begun and not ended."""
    config = small_config(olmoe_folder, *BOTH, "federation.client_fraction=0.5")
    experiment.run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "killed")
    experiment.resume(tmp_path / "killed")
    assert ended(tmp_path / "killed").records == ended(tmp_path / "whole").records


def test_every_client_answers_all_the_questions(olmoe_folder: Path, tmp_path: Path) -> None:
    """A client of FLAME runs the global LoRA with its own rescaler, so it may differ from its budget's score."""
    options = ("federation.rounds=1", "evaluation.pooled=true")
    experiment.run(small_config(olmoe_folder, *options), tmp_path / "run")
    pooled, budgets = scores(tmp_path / "run", "pooled", 1), scores(tmp_path / "run", "budget", 1)
    assert list(pooled) == [f"client-{index:03d}" for index in range(4)]
    assert {record.examples for record in pooled.values()} == {record.examples for record in budgets.values()}
    assert not scores(tmp_path / "run", "client", 1)
    summary = scores(tmp_path / "run", "summary", 1)["pooled"]
    assert summary.score == pytest.approx(fmean(record.score for record in pooled.values()))


def test_a_client_of_pfl_moe_does_not_answer_with_the_global_adapter(olmoe_folder: Path, tmp_path: Path) -> None:
    """Which is FedIT's, and what the budget's score is about; its mixture is held against an oracle elsewhere."""
    options = (
        "federation.rounds=1",
        "evaluation.pooled=true",
        "evaluation.perplexity=true",
        "method.personal_from=1",
        "federation.budgets=[{name: all, active_experts: 4}]",
    )
    experiment.run(small_config(olmoe_folder, *options, base="pfl-moe/tiny-tasks"), tmp_path / "run")
    (budget,) = scores(tmp_path / "run", "budget", 1).values()
    pooled = [record.metrics for record in scores(tmp_path / "run", "pooled", 1).values()]
    assert len(pooled) > 1
    assert all(metrics != pytest.approx(budget.metrics) for metrics in pooled)
    assert pooled[0] != pytest.approx(pooled[1])
