"""A run on preference pairs: told, trained by DPO, scored on each budget, or refused before a model is loaded."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

import fedguild
from fedguild.config import load_config
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.data import ClientData, Example
from fedguild.measuring.log.folder import load_run
from fedguild.report.summary import run_summary
from fedguild.report.tables import run_table
from fedguild.runs.setup import of_client
from tests.runs.test_chat_data import SMALL, Told

PAIRS = [{"prompt": f"Name bird {n}.", "chosen": f"Robin {n}.", "rejected": f"No, {n}!"} for n in range(24)]
FAST = (
    *SMALL,
    "training.learning_rate=0.01",
    "data.max_length=64",
    "federation.budgets=[{name: a, active_experts: 2}, {name: b, active_experts: 1}]",
)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in PAIRS))
    return path


def test_a_run_on_pairs(file: Path, tmp_path: Path) -> None:
    told = Told()
    result = fedguild.run("fedit/tiny-tasks", *FAST, dataset=str(file), output=tmp_path / "run", progress=told)
    assert f"Data: {file}: preference pairs (prompt, chosen, rejected); trained on by DPO." in told.lines
    folder = load_run(tmp_path / "run")
    first, last = (
        [one for one in folder.evaluations if (one.round, one.scope) == (number, "budget")] for number in (0, 1)
    )
    assert [(one.score, one.metrics["reward_margin"]) for one in first] == [(0.5, pytest.approx(0, abs=1e-4))] * 2
    assert all(one.score == one.metrics["preference_accuracy"] for one in last)
    assert all(one.metrics["reward_margin"] > 0 for one in last)
    assert "rouge_l" not in last[0].metrics
    assert {one.metric for one in folder.evaluations} == {"preference_accuracy"}
    assert "Scored by preference accuracy." in told.lines
    assert run_table(folder).grid().title.startswith("fedit-tiny-tasks: test preference accuracy after round 1")
    assert "scores" in run_summary(run_table(folder))[0]
    assert " in preference accuracy" in run_summary(run_table(folder))[0]
    for client in folder.clients:
        assert client.train_loss is not None
        assert 0 < client.train_loss < math.log(2)
    assert result.scores


def test_the_chosen_answers_alone(file: Path, tmp_path: Path) -> None:
    told = Told()
    overrides = [*FAST, "training.objective=sft"]
    fedguild.run("fedit/tiny-tasks", *overrides, dataset=str(file), output=tmp_path / "run", progress=told)
    assert [line for line in told.lines if "chosen answers alone (training.objective=sft)" in line]
    folder = load_run(tmp_path / "run")
    assert all("rouge_l" in one.metrics for one in folder.evaluations if one.scope == "budget")


def test_a_faulty_metric_is_found_before_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.runs.setup.preparation.load_backbone", lambda **_: pytest.fail("loaded"))
    rows = [{"instruction": f"Name bird {n}.", "response": "Robin."} for n in range(24)]
    with pytest.raises(FedGuildError, match=r"The metric 'mine' returned None"):
        fedguild.run(
            "fedit/tiny-tasks", *FAST, dataset=rows, metrics={"mine": lambda *_: None}, output=tmp_path / "run"
        )


def test_what_cannot_train_on_pairs_is_refused(file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.runs.setup.preparation.load_backbone", lambda **_: pytest.fail("loaded"))
    with pytest.raises(ConfigError, match=r"smoe-llb cannot train on preference pairs by DPO: it balances"):
        fedguild.run("smoe-llb/tiny-tasks", *FAST, dataset=str(file), output=tmp_path / "found")
    with pytest.raises(ConfigError, match=r"smoe-llb cannot train on preference pairs by DPO: it balances"):
        fedguild.run("smoe-llb/tiny-tasks", "training.objective=dpo", output=tmp_path / "known")
    with pytest.raises(ConfigError, match=r"training\.objective is dpo, but the data are no preference pairs"):
        fedguild.run("fedit/tiny-tasks", *FAST, "training.objective=dpo", output=tmp_path / "none")


def test_a_site_uses_its_pairs_as_the_run_says() -> None:
    """A site reads its data before it knows a run."""
    example = replace(Example("q", "good", "", ""), rejected=Example("q", "bad", "", ""))
    data = ClientData((example,), (example,), (example,))
    assert of_client(data, load_config("fedit/tiny-tasks"), "here") is data
    alone = of_client(data, load_config("fedit/tiny-tasks", ["training.objective=sft"]), "here")
    assert {one.rejected for own in (alone.train, alone.validation, alone.test) for one in own} == {None}
    with pytest.raises(ConfigError, match="smoe-llb cannot train on preference pairs"):
        of_client(data, load_config("smoe-llb/tiny-tasks"), "here")
    with pytest.raises(ConfigError, match="no preference pairs: here"):
        of_client(alone, load_config("fedit/tiny-tasks", ["training.objective=dpo"]), "here")
