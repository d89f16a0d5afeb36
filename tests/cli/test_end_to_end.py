"""The commands on the real experiment: the embedded model, two clients, one round of two steps."""

import json
import shutil
from pathlib import Path

import pytest

from fedguild.measuring.log.records import RunLog
from tests.cli.conftest import Invoke
from tests.runs.runs import comparable

SMALL = [
    "federation.clients=2",
    "federation.rounds=1",
    "federation.budgets=[{name: large, active_experts: 8, rank: 4}, {name: small, active_experts: 1, rank: 2}]",
    "training.steps=2",
    "method.rank=4",
    "data.options={train_examples: 120, test_examples: 12}",
]


def test_run_evaluate_partition_and_report_agree(invoke: Invoke, tmp_path: Path) -> None:
    ran = invoke("run", "flame/tiny-tasks", *SMALL, "--output", "run", "--json")
    assert ran.exit_code == 0, ran.output
    scores = {row["budget"]["name"]: row["score"] for row in json.loads(ran.stdout)["rows"]}
    assert set(scores) == {"large", "small"}
    again = json.loads(invoke("evaluate", "run", "--json").stdout)
    assert again["scores"] == pytest.approx(scores)
    shown = json.loads(invoke("partition", "flame/tiny-tasks", *SMALL, "--json").stdout)
    recorded = json.loads(Path("run/partition.json").read_text())
    assert shown["labels"] == recorded["labels"]
    assert [client["counts"] for client in shown["clients"]] == recorded["counts"]
    assert [client["budget"] for client in shown["clients"]] == ["large", "small"]
    assert Path(invoke("report", "run").stdout.strip()).stat().st_size > 10_000
    exported = invoke("export", "run", "--budget", "small", "--output", "model")
    assert exported.stdout == "model\n", exported.output
    assert json.loads(Path("model/config.json").read_text())["num_experts_per_tok"] == 1
    twice = invoke("run", "run/config.yaml", "--output", "run")
    assert twice.exit_code == 2
    assert "run already holds a run" in twice.stderr


@pytest.mark.usefixtures("undrawn")
def test_compare_trains_here_and_in_a_process_alike(invoke: Invoke) -> None:
    arguments = ["flame/tiny-tasks", "fedit/tiny-tasks-ranks", *SMALL, "--seeds", "0", "--json"]
    here = invoke("compare", *arguments, "--output", "here")
    assert here.exit_code == 0, here.output
    table = json.loads(here.stdout)
    assert [method["label"] for method in table["methods"]] == ["flame-tiny-tasks", "fedit-tiny-tasks-ranks"]
    flops = {method["label"]: method["training_flops"]["small"] for method in table["methods"]}
    assert flops["flame-tiny-tasks"] < 0.7 * flops["fedit-tiny-tasks-ranks"]
    assert table["equal_inference"]
    assert json.loads(invoke("compare", *arguments, "--output", "here").stdout) == table
    name = "fedit-tiny-tasks-ranks"
    shutil.copytree("here", "apart", ignore=lambda folder, files: [name] if folder == "here" else [])
    apart = invoke("compare", *arguments, "--output", "apart", "--jobs", "2")
    assert apart.exit_code == 0, apart.output
    here_and_apart = [comparable(RunLog(Path(folder) / name / "seed-0").read()) for folder in ("here", "apart")]
    assert here_and_apart[0] == here_and_apart[1]
    assert f"{name} seed 0: round 1/1" in apart.stderr
    assert Path("apart", name, "seed-0", "report.html").stat().st_size > 10_000, "a process writes what tests leave out"
    assert json.loads(apart.stdout)["reference"] == table["reference"]


@pytest.mark.long
def test_a_failed_process_is_named(invoke: Invoke) -> None:
    arguments = ["flame/tiny-tasks", "fedit/tiny-tasks-ranks", *SMALL, "--seeds", "0", "--jobs", "2"]
    result = invoke("compare", *arguments, "model.path=nowhere/at-all", "--output", "failed")
    assert result.exit_code == 2
    assert "seed 0 failed: Cannot load the model 'nowhere/at-all'" in result.stderr
