"""init: a config from six answers, checked before it is written, that runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from fedguild.cli import app
from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from fedguild.runs.api import drafting
from tests.cli.conftest import Invoke
from tests.data.writing import write_jsonl

SMALL = ("federation.rounds=2", "federation.clients=2", "training.steps=1", "evaluation.max_examples=2")


def test_what_the_defaults_write_runs_for_two_rounds(invoke: Invoke) -> None:
    written = invoke("init", "--yes")
    assert (written.exit_code, written.stdout) == (0, "fedguild.yaml\n"), written.output
    assert written.stderr.endswith("Next: fedguild run\n")
    ran = invoke("run", *SMALL, "--json")
    assert ran.exit_code == 0, ran.output
    assert json.loads(ran.stdout)["round"] == 2


def test_a_file_that_is_there_is_never_touched(invoke: Invoke) -> None:
    Path("fedguild.yaml").write_text("mine")
    result = invoke("init", "--yes")
    assert result.exit_code == 2
    assert "fedguild.yaml exists, and is left as it is" in result.stderr
    assert Path("fedguild.yaml").read_text() == "mine"
    with pytest.raises(ConfigError, match="exists"):
        drafting.write("text", Path("fedguild.yaml"))


def test_answers_as_options(invoke: Invoke) -> None:
    arguments = ["--model", "llama-3.2-1b", "--data", "dolly", "--clients", 6, "--budgets", "16,4", "--where", "ray"]
    result = invoke("init", "mine.yaml", "--yes", *arguments)
    assert result.exit_code == 0, result.output
    config = load_config("mine.yaml")
    assert (config.model.path, config.data.dataset, config.federation.clients) == ("llama-3.2-1b", "dolly", 6)
    assert [(one.active_experts, one.rank) for one in config.federation.budgets] == [(0, 16), (0, 4)]
    assert (config.method.name, config.federation.engine.name, config.name) == ("flexlora", "ray", "mine")
    assert all(
        line.strip().startswith("#") or ":" in line or not line for line in Path("mine.yaml").read_text().split("\n")
    )


def test_a_file_is_looked_at(invoke: Invoke, tmp_path: Path) -> None:
    rows = [{"question": f"Say {n}.", "reply": "x", "category": "ab"[n % 2]} for n in range(60)]
    file = write_jsonl(tmp_path / "own data.jsonl", rows)
    named = ["--data", file, "--columns", "response=reply"]
    unnamed = invoke("init", "--yes", "--data", file)
    assert unnamed.exit_code == 2
    assert "lacks a column for the response" in unnamed.stderr
    assert (
        "Its 60 rows have question, reply, category. Name the columns with --columns response=COLUMN" in unnamed.stderr
    )
    assert not Path("fedguild.yaml").exists()
    result = invoke("init", "--yes", *named, "--clients", 3)
    assert result.exit_code == 0, result.output
    assert "60 rows of instructions and responses (question, reply, category)" in result.stderr
    config = load_config("fedguild.yaml")
    assert (config.data.train, config.data.options) == (str(file), {"response_column": "reply"})
    assert config.data.partition.scheme == "dirichlet"
    too_many = invoke("init", "other.yaml", "--yes", *named, "--clients", 30)
    assert "60 rows do not reach for 30 clients" in too_many.stderr
    assert not Path("other.yaml").exists()


def test_conversations_get_a_chat_template(invoke: Invoke, tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "Name a bird."}, {"role": "assistant", "content": "Wren."}]
    file = write_jsonl(tmp_path / "chats.jsonl", [{"messages": turns}] * 30)
    result = invoke("init", "--yes", "--data", file, "--clients", 2)
    assert result.exit_code == 0, result.output
    assert "30 rows of chat messages (messages)" in result.stderr
    data = load_config("fedguild.yaml").data
    assert (data.chat_template, data.train_on, data.partition.scheme) == ("plain", "all_turns", "iid")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--budgets", "16,8"], "'b1' has active_experts 16"),
        (["--budgets", "1,8"], "Budgets differ and fall"),
        (["--budgets", "a"], "Budgets are whole numbers"),
        (["--method", "flam"], "Did you mean 'flame'?"),
        (["--method", "flame", "--model", "llama-3.2-1b"], "needs a mixture-of-experts model"),
        (["--model", "./nowhere"], "There is no folder ./nowhere"),
        (["--data", "dollie"], "Did you mean 'dolly'?"),
        (["--data", "telequad"], "give a file or a folder"),
        (["--columns", "answer=x"], "Accepted: KEY=COLUMN"),
    ],
)
def test_what_would_not_run_is_not_written(invoke: Invoke, arguments: list[str], told: str) -> None:
    result = invoke("init", "--yes", *arguments)
    assert result.exit_code == 2, result.output
    assert told in result.stderr
    assert not Path("fedguild.yaml").exists()


def test_six_questions_each_asked_again_until_the_answer_is_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    own = write_jsonl(tmp_path / "own.jsonl", [{"ask": f"Say {n}.", "say": "x"} for n in range(40)])
    given = ["embedded", str(own), "ask", "say", "none", "2", "8,2", "flam", "flame", "moon", "federation"]
    result = CliRunner().invoke(app, ["init"], input="\n".join(given) + "\n")
    assert result.exit_code == 0, result.output
    for question in ("Model: ", "Data: ", "Number of clients", "Budgets: active experts", "Method ", "Where "):
        assert question in result.stderr
    assert "Did you mean 'flame'?" in result.stderr
    assert "fedguild federation init union --clients 2 --config fedguild.yaml" in result.stderr
    config = load_config("fedguild.yaml")
    assert config.data.options == {"instruction_column": "ask", "response_column": "say"}
    assert [one.active_experts for one in config.federation.budgets] == [8, 2]


@pytest.mark.parametrize("method", ["fedit", "fed-sb", "fedprompt", "florist", "ub-smoe", "fedmoe"])
def test_other_methods_get_options_that_they_have(method: str) -> None:
    data = drafting.look_at_data("tasks")
    answers = drafting.Answers("embedded", data, 4, (8, 2), method)
    assert drafting.check(drafting.draft(answers, Path("x.yaml")), Path("x.yaml")).method.name == method
