"""sweep: which runs it makes, how values are told apart, and which setting it chooses by which score."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedguild.config import Config, load_config
from fedguild.core.errors import DivergedError
from fedguild.core.payload import Payload
from fedguild.core.progress import Progress
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.index import PLAN_FILE
from fedguild.report.sweep import SweepTable, tabulate
from fedguild.runs.api.sweeping import split_values
from fedguild.server import checkpoint
from tests.cli.conftest import FakeExperiment, Invoke
from tests.report.runs import write_run

GRID = ("sweep", "flame/tiny-tasks", "method.rank=4,8", "training.learning_rate=1e-3,3e-3", "--output", "grid")


class Ranked(FakeExperiment):
    """Runs whose score grows with the rank, and a little with the learning rate."""

    def run(self, config: Config, output: Path, *, progress: Progress, **more: object) -> SimpleNamespace:
        result = super().run(config, output, progress=progress, **more)
        if config.training.learning_rate >= 1:
            (output / "checkpoints").rename(output / "later")
            checkpoint.save(output / "checkpoints", 1, Payload(), fingerprint=config.fingerprint())
            (output / "diverged.json").write_text(json.dumps({"reason": "The training of round 2 diverged."}))
            raise DivergedError("The training of round 2 diverged.")
        return result

    @staticmethod
    def _write(config: Config, output: Path) -> None:
        FakeExperiment._write(config, output)
        (output / "metrics.jsonl").unlink()
        score = 0.4 + 0.05 * config.method.options["rank"] / 4 + 4 * config.training.learning_rate
        write_run(output, name=config.name, seed=config.seed, final={"b1": score, "b4": score - 0.1}, rounds=4)
        (output / "config.yaml").write_text(config.resolved_yaml())


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch, experiment: FakeExperiment) -> Ranked:
    fake = Ranked()
    monkeypatch.setitem(sys.modules, "fedguild.runs.experiment", fake)
    monkeypatch.setattr("fedguild.runs.experiment", fake, raising=False)
    return fake


def test_every_combination_and_seed_is_a_run_scored_on_validation_examples(invoke: Invoke, ranked: Ranked) -> None:
    result = invoke(*GRID, "--seeds", "0,1")
    assert result.exit_code == 0, result.output
    names = [f"rank-{rank}_learning_rate-{rate}" for rank in (4, 8) for rate in ("1e-3", "3e-3")]
    assert [str(folder) for _, folder in ranked.calls] == [
        f"grid/{name}/seed-{seed}" for name in names for seed in (0, 1)
    ]
    config = load_config("grid/rank-8_learning_rate-3e-3/seed-1/config.yaml")
    assert (config.method.options["rank"], config.training.learning_rate, config.seed) == (8, 3e-3, 1)
    assert config.evaluation.split == "validation"
    assert "method.rank=8, training.learning_rate=3e-3 is best" in result.stderr
    assert "Report: grid/sweep.html" in result.stderr
    page = Path("grid/sweep.html").read_text()
    assert all(text in page for text in ("method.rank", "3e-3", "★", 'aria-label="Heat map: mean'))
    planned = json.loads(Path("grid", PLAN_FILE).read_text())["cells"]  # for `fedguild watch grid`
    assert [f"grid/{cell['folder']}" for cell in planned] == [str(folder) for _, folder in ranked.calls]


def test_the_same_command_continues_and_one_with_more_values_adds(invoke: Invoke, ranked: Ranked) -> None:
    invoke(*GRID, "--seeds", "0")
    Path("grid/rank-4_learning_rate-1e-3/seed-0/report.html").unlink()
    ranked.calls.clear()
    more = invoke("sweep", "flame/tiny-tasks", "method.rank=4,8,16", *GRID[3:], "--seeds", "0", "--json")
    assert [(what, str(folder)) for what, folder in ranked.calls] == [
        ("resume", "grid/rank-4_learning_rate-1e-3/seed-0"),
        ("run", "grid/rank-16_learning_rate-1e-3/seed-0"),
        ("run", "grid/rank-16_learning_rate-3e-3/seed-0"),
    ]
    shown = json.loads(more.stdout)
    assert shown["best"] == {"method.rank": "16", "training.learning_rate": "3e-3"}
    assert len(shown["settings"]) == 6
    assert "With one seed nothing is known of the spread." in more.stderr


def test_a_split_that_is_asked_for_is_kept(invoke: Invoke, ranked: Ranked) -> None:
    result = invoke(
        "sweep", "flame/tiny-tasks", "method.rank=4,8", "evaluation.split=test", "--seeds", "0", "-o", "one"
    )
    assert load_config("one/rank-4/seed-0/config.yaml").evaluation.split == "test"
    assert "There are no validation scores" in result.stderr
    assert "Line chart: test exact match by method.rank; best: method.rank=8" in Path("one/sweep.html").read_text()


def test_a_setting_that_diverges_is_left_and_told(invoke: Invoke, ranked: Ranked) -> None:
    arguments = ("sweep", "flame/tiny-tasks", "method.rank=4", "training.learning_rate=1e-3,9.0", "--seeds", "0,1")
    result = invoke(*arguments, "-o", "grid", "--json")
    assert result.exit_code == 0, result.output
    shown = json.loads(result.stdout)
    assert shown["best"] == {"training.learning_rate": "1e-3"}
    assert [one["diverged"] for one in shown["settings"]] == [[], [0, 1]]
    assert "1 setting diverged: training.learning_rate=9.0." in result.stderr
    ranked.calls.clear()
    again = invoke(*arguments, "-o", "grid")
    assert (again.exit_code, ranked.calls) == (0, [])
    assert "seed 0: diverged before; remove grid/learning_rate-9.0/seed-0 to try it again" in again.stderr
    alone = invoke("sweep", "flame/tiny-tasks", "training.learning_rate=8.0,9.0", "--seeds", "0", "-o", "other")
    assert alone.exit_code == 3
    assert "Every setting of the sweep diverged. The training of round 2" in alone.stderr


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (["training.steps=3"], "There is nothing to sweep"),
        (["method.rank=4,8", "method.rank=2,3"], "method.rank is swept twice"),
        (["method.rank=4,,8"], "has an empty value, or one twice"),
        (["method.rank=4,4"], "has an empty value, or one twice"),
        (["seed=0,1"], "Give --seeds 0,1"),
        (["method.rank=4,8", "seed=3"], "seed=3 is a setting of one run, and a sweep has several.\nGive --seeds 3"),
        (["method.rank=4,8", "output=here"], "Give --output here"),
        (["method.rank=4,8", "output=a,b"], "output is not a setting to sweep"),
        (["method.rank=4,8", "name=a,b"], "name is not a setting to sweep"),
        (["method.rank=4,8", "method.rank=2"], "method.rank is both swept and set to one value"),
        (["method.rank=4,0"], "method.rank"),
        (["method.rnak=4,8"], "method.rnak: flame has no such option"),
        (["training.steps=[1,2"], "lacks a closing ]"),
    ],
)
def test_nonsense_is_refused_before_anything_runs(invoke, ranked, settings, told):
    result = invoke("sweep", "flame/tiny-tasks", *settings)
    assert (result.exit_code, ranked.calls) == (2, [])
    assert told in result.stderr


@pytest.mark.parametrize(
    ("text", "values"),
    [
        ("4", ["4"]),
        ("4, 8,16", ["4", "8", "16"]),
        ("[a,b]", ["[a,b]"]),
        ("[a],[a,b]", ["[a]", "[a,b]"]),
        ("{scheme: iid},{scheme: dirichlet, alpha: 0.5}", ["{scheme: iid}", "{scheme: dirichlet, alpha: 0.5}"]),
        ("'a,b.jsonl',c.jsonl", ["'a,b.jsonl'", "c.jsonl"]),
        ('["x, y]",z],2', ['["x, y]",z]', "2"]),
        ("it's,that", ["it's", "that"]),
    ],
)
def test_values_are_separated_by_commas_outside_of_brackets_and_quotes(text: str, values: list[str]) -> None:
    assert split_values(text) == values


@pytest.fixture
def table(tmp_path: Path) -> SweepTable:
    """Three settings over three seeds, the second the best, the third close to it."""
    finals = {"low": 0.3, "high": 0.6, "close": 0.6}
    runs = {
        name: [
            load_run(write_run(tmp_path / name / str(seed), name=name, seed=seed, final={"b1": final, "b4": final}))
            for seed in (0, 1, 2)
        ]
        for name, final in finals.items()
    }
    return tabulate(["k"], {"low": {"k": "1"}, "high": {"k": "2"}, "close": {"k": "3"}}, runs)


def test_the_table_says_which_is_best_and_from_which_it_cannot_be_told(table: SweepTable) -> None:
    best = table.best
    assert best.label in ("high", "close")
    (other,) = [one for one in table.settings if one.label in ("high", "close") and one is not best]
    (low,) = [one for one in table.settings if one.label == "low"]
    assert table.is_close(other)
    assert not table.is_close(low)
    difference = table.below_best(low)
    assert difference is not None
    seeds = [low.scores("mean")[seed] - best.scores("mean")[seed] for seed in (0, 1, 2)]
    assert difference.mean == pytest.approx(sum(seeds) / 3)
    assert table.split == "test"
    assert "optimistic" in " ".join(table.sentences())
    honest = replace(table, split="validation")
    assert honest.sentences()[0].startswith("By the validation exact match (mean over the budgets), k=")
    assert "No test example had a part in the choice" in " ".join(honest.sentences())
    assert f"`fedguild evaluate` on {best.label}/seed-0 of" in " ".join(honest.sentences())
    strong = [row[0].text for row in honest.grid().rows if row[0].strong]
    assert strong == [best.values["k"]]
