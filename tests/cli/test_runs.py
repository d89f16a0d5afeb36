"""run, resume, compare, evaluate and report: what they ask for and what they print."""

import json
from pathlib import Path

import pytest

import fedguild
from fedguild.config import load_config, load_saved
from fedguild.core.errors import ConfigError
from fedguild.measuring.log.index import read_plan
from fedguild.runs.api.run_grid import Row, plan_grid
from fedguild.runs.exporting import Exported, Subject
from fedguild.runs.terminal import TerminalProgress
from tests.cli.conftest import FakeExperiment, Invoke
from tests.report.runs import write_run

pytestmark = pytest.mark.usefixtures("undrawn")

PAIR = ("flame/tiny-tasks", "fedit/tiny-tasks-ranks")


def test_run_prints_the_table_on_stdout_and_progress_on_stderr(invoke: Invoke, experiment: FakeExperiment) -> None:
    result = invoke("run", "flame/tiny-tasks", "seed=3", "--output", "out")
    assert result.exit_code == 0, result.output
    assert experiment.calls == [("run", Path("out"))]
    assert all(budget in result.stdout for budget in ("b1", "b2", "b3", "b4"))
    assert "loading the model" in result.stderr
    assert "round 1/4" in result.stderr
    assert "b1 0.500" in result.stderr
    assert result.stderr.endswith("Report: out/report.html\n")


def test_run_takes_the_config_of_the_folder_where_none_is_named(invoke: Invoke, experiment: FakeExperiment) -> None:
    Path("fedguild.yaml").write_text("extends: flame/tiny-tasks\n")
    for arguments in ([], ["seed=3"], ["--json", "seed=3", "training.steps=2"]):
        result = invoke("run", *arguments, "--output", f"out-{len(arguments)}")
        assert result.exit_code == 0, result.output
    assert experiment.calls == [("run", Path(f"out-{number}")) for number in (0, 1, 3)]
    seeds = [load_config(f"out-{number}/config.yaml").seed for number in (0, 1, 3)]
    assert seeds == [0, 3, 3]
    Path("a=b.yaml").write_text("extends: fedit/tiny-tasks\n")
    assert invoke("run", "a=b.yaml", "--output", "named").exit_code == 0
    assert load_config("named/config.yaml").method.name == "fedit"


@pytest.mark.parametrize(
    "arguments", [["run"], ["run", "seed=1"], ["sweep", "seed=1"], ["partition"], ["profile"], ["profile", "seed=1"]]
)
def test_without_a_config_the_way_to_one_is_told(invoke, experiment, arguments):
    result = invoke(*arguments)
    assert (result.exit_code, result.stdout, experiment.calls) == (2, "", [])
    assert result.stderr == (
        "Error: No config is named, and there is no fedguild.yaml in this folder.\n"
        "`fedguild init` writes one, `fedguild presets` lists those that ship, for example flame/tiny-tasks.\n"
    )


def test_resume_goes_back_to_a_round(invoke: Invoke, experiment: FakeExperiment) -> None:
    invoke("run", "flame/tiny-tasks")
    for round in (2, 0):
        result = invoke("resume", "runs/flame-tiny-tasks", "--round", str(round))
        assert result.exit_code == 0, result.output
        assert experiment.calls[-1] == ("resume", Path("runs/flame-tiny-tasks"), round)
    assert invoke("resume", "runs/flame-tiny-tasks", "--round", "-1").exit_code == 2


def test_resume_says_where_settings_may_change(invoke: Invoke, experiment: FakeExperiment) -> None:
    result = invoke("resume", "runs/mine", "federation.rounds=9")
    assert result.exit_code == 2
    assert not experiment.calls
    assert result.stderr == (
        "Error: resume takes no settings, got federation.rounds=9.\n"
        "Those that may change are changed in runs/mine/config.yaml.\n"
    )


def test_compare_runs_every_cell_and_prints_scores_and_costs(invoke: Invoke, experiment: FakeExperiment) -> None:
    result = invoke("compare", *PAIR, "--seeds", "0,1", "--output", "grid")
    assert result.exit_code == 0, result.output
    assert [str(folder) for _, folder in experiment.calls] == [
        "grid/flame-tiny-tasks/seed-0",
        "grid/flame-tiny-tasks/seed-1",
        "grid/fedit-tiny-tasks-ranks/seed-0",
        "grid/fedit-tiny-tasks-ranks/seed-1",
    ]
    assert "±" in result.stdout
    assert "− fedit-tiny-tasks-ranks" in result.stdout
    assert Path("grid/comparison.html").is_file()
    assert [(cell["row"], cell["seed"], cell["folder"]) for cell in read_plan(Path("grid")).cells] == [
        ("flame-tiny-tasks", 0, "flame-tiny-tasks/seed-0"),
        ("flame-tiny-tasks", 1, "flame-tiny-tasks/seed-1"),
        ("fedit-tiny-tasks-ranks", 0, "fedit-tiny-tasks-ranks/seed-0"),
        ("fedit-tiny-tasks-ranks", 1, "fedit-tiny-tasks-ranks/seed-1"),
    ]


def test_compare_keeps_finished_cells_and_resumes_half_finished_ones(invoke, experiment):
    arguments = ("compare", *PAIR, "--seeds", "0,1", "--output", "grid", "--json")
    first = invoke(*arguments).stdout
    (checkpoint,) = Path("grid/fedit-tiny-tasks-ranks/seed-1/checkpoints").iterdir()
    checkpoint.rename(str(checkpoint).replace("00004", "00002"))
    Path("grid/flame-tiny-tasks/seed-1/report.html").unlink()
    experiment.calls.clear()
    second = invoke(*arguments)
    assert [(call, str(folder)) for call, folder in experiment.calls] == [
        ("resume", "grid/flame-tiny-tasks/seed-1"),
        ("resume", "grid/fedit-tiny-tasks-ranks/seed-1"),
    ]
    assert json.loads(second.stdout) == json.loads(first)
    assert "flame-tiny-tasks seed 0: already finished" in second.stderr


def test_a_half_finished_cell_goes_on_with_what_does_not_change_results(
    invoke: Invoke, experiment: FakeExperiment
) -> None:
    """As after too little memory for as many clients at a time."""
    arguments = ("compare", "flame/tiny-tasks", "--seeds", "0", "--output", "grid")
    invoke(*arguments)
    folder = Path("grid/flame-tiny-tasks/seed-0")
    (folder / "report.html").unlink()
    same = invoke(*arguments)
    assert "goes on with" not in same.stderr
    (folder / "report.html").unlink()
    changed = invoke(*arguments, "federation.cohort_size=1", "model.gradient_checkpointing=true")
    assert changed.exit_code == 0, changed.output
    assert "seed 0: goes on with other values of model.gradient_checkpointing, federation.cohort_size" in changed.stderr
    assert experiment.calls[-1] == ("resume", folder)
    written = load_saved(folder / "config.yaml")
    assert (written.federation.cohort_size, written.model.gradient_checkpointing) == (1, True)


def test_compare_is_not_shared_by_the_processes_of_torchrun(
    invoke: Invoke, experiment: FakeExperiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("WORLD_SIZE", "2"), ("RANK", "1"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "29500")):
        monkeypatch.setenv(name, value)
    result = invoke("compare", "flame/tiny-tasks", "--seeds", "0", "--output", "grid")
    assert result.exit_code == 2
    assert "torchrun's processes share one run" in result.stderr
    assert not Path("grid").exists()


def test_compare_does_not_mix_runs_of_other_settings(invoke: Invoke, experiment: FakeExperiment) -> None:
    invoke("compare", "flame/tiny-tasks", "--seeds", "0", "--output", "grid")
    result = invoke("compare", "flame/tiny-tasks", "training.steps=3", "--seeds", "0", "--output", "grid")
    assert result.exit_code == 2
    told = "holds a run with settings other than flame-tiny-tasks, seed 0: training.steps."
    assert f"grid/flame-tiny-tasks/seed-0 {told}" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--seeds", "0,x"], "--seeds takes whole numbers separated by commas, got '0,x'"),
        (["--seeds", "1,1"], "--seeds names a seed twice"),
        (["--reference", "flame"], "Known: fedit-tiny-tasks-ranks, fedit/tiny-tasks-ranks, flame-tiny-tasks"),
    ],
)
def test_compare_refuses_nonsense_before_anything_runs(invoke, experiment, arguments, told):
    result = invoke("compare", *PAIR, *arguments)
    assert (result.exit_code, experiment.calls) == (2, [])
    assert told in result.stderr


def test_cells_of_a_comparison(tmp_path: Path) -> None:
    rows = [Row(given) for given in PAIR]
    cells = plan_grid(rows, [4, 5], tmp_path, ["training.steps=7"]).cells
    assert [(cell.config.method.name, cell.config.seed) for cell in cells] == [
        ("flame", 4),
        ("flame", 5),
        ("fedit", 4),
        ("fedit", 5),
    ]
    assert {cell.config.training.steps for cell in cells} == {7}
    with pytest.raises(ConfigError, match="no config to compare"):
        fedguild.compare([], output=tmp_path)
    with pytest.raises(ConfigError, match="seed=3 is a setting of one run, and a comparison has several"):
        plan_grid(rows, [0], tmp_path, ["seed=3"])
    with pytest.raises(ConfigError, match="Two of the configs are named 'flame-tiny-tasks'"):
        plan_grid([rows[0], rows[0]], [0], tmp_path)


@pytest.mark.parametrize(("setting", "option"), [("seed=3", "--seeds 3"), ("output=here", "--output here")])
@pytest.mark.parametrize("compared", [PAIR, ["flame/table-2-tiny"]])
def test_a_setting_that_every_run_has_of_its_own_is_refused(invoke, experiment, compared, setting, option):
    result = invoke("compare", *compared, setting)
    assert (result.exit_code, experiment.calls) == (2, [])
    assert f"Give {option}" in result.stderr


def test_a_table_runs_every_cell_and_writes_a_page_for_each_column(invoke: Invoke, experiment: FakeExperiment) -> None:
    arguments = ("compare", "fedamole/table-1-tiny", "--rows", "fedit,fedamole", "--seeds", "0,1", "--output", "grid")
    result = invoke(*arguments, "--columns", "dirichlet-0.1,dirichlet-1")
    assert result.exit_code == 0, result.output
    assert [str(folder) for _, folder in experiment.calls] == [
        f"grid/{column}/{row}/seed-{seed}"
        for column in ("dirichlet-0.1", "dirichlet-1")
        for row in ("fedit", "fedamole")
        for seed in (0, 1)
    ]
    assert "fedit − fedamole" in result.stdout
    assert "fedamole/table-1-tiny:" in result.stdout
    written = Path("grid/table.md").read_text()
    assert "## dirichlet-0.1" in written
    assert "## dirichlet-1" in written
    assert Path("grid/dirichlet-1/comparison.html").is_file()
    experiment.calls.clear()
    answer = json.loads(invoke(*arguments, "--columns", "dirichlet-1", "--json").stdout)
    assert experiment.calls == []
    assert answer["reference"] == "fedamole"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["fedamole/table-1-tiny", "--rows", "flame"], "has no row 'flame'"),
        (["fedamole/table-1-tiny", "--columns", "snli"], "has no column 'snli'"),
        (["fedamole/table-1-tiny", "--reference", "flame"], "not one of the compared rows"),
        (["fedamole/table-1-tiny", "flame/tiny-tasks"], "give it alone"),
        (["flame/table-2-tiny", "method.dropout=0.1"], "method.dropout: flame has no such option"),
        (["fedit/tiny-tasks", "flame/tiny-tasks", "method.dropout=0.1"], "method.dropout: flame has no such option"),
        ([*PAIR, "--rows", "flame"], "none is given"),
    ],
)
def test_a_table_refuses_nonsense_before_anything_runs(invoke, experiment, arguments, told):
    result = invoke("compare", *arguments)
    assert (result.exit_code, experiment.calls) == (2, [])
    assert told in result.stderr


def test_evaluate(invoke: Invoke, experiment: FakeExperiment) -> None:
    result = invoke("evaluate", "runs/a", "--split", "validation", "--json")
    assert json.loads(result.stdout) == {
        "folder": "runs/a",
        "split": "validation",
        "metric": "accuracy",
        "scores": {"b1": 0.75, "b4": 0.25},
        "mean": 0.5,
    }
    lines = [line.split() for line in invoke("evaluate", "runs/a").stdout.splitlines()]
    assert lines[0] == ["budget", "accuracy"]
    assert ["b4", "0.250"] in lines
    assert ["mean", "0.500"] in lines
    assert invoke("evaluate", "x", "--split", "train").exit_code == 2


@pytest.mark.parametrize(
    ("flags", "form"),
    [([], "peft"), (["--merged"], "merged"), (["--format", "merged"], "merged"), (["--format", "code"], "code")],
)
def test_export_prints_the_folder_and_why_it_is_merged(invoke, monkeypatch, flags, form):
    asked: list[object] = []

    def write(*arguments: object, round: int | None) -> Exported:
        asked.extend([*arguments, round])
        return Exported(Path("out"), "merged", "the merged form, as an adapter cannot carry it")

    monkeypatch.setattr("fedguild.runs.exporting.export", write)
    result = invoke("export", "run", "--budget", "b4", "--output", "out", "--round", "3", *flags)
    assert asked == [Path("run"), Subject(budget="b4"), Path("out"), form, 3]
    assert result.stdout == "out\n"
    first, second = result.stderr.splitlines()
    assert first == "This is the merged form, as an adapter cannot carry it."
    assert second.startswith("For anything that loads a Hugging Face checkpoint")


def test_report_prints_the_path_of_the_page(invoke: Invoke, tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    result = invoke("report", folder)
    assert result.stdout == f"{folder / 'report.html'}\n"
    assert (folder / "report.html").read_text().startswith("<!")
    (tmp_path / "empty").mkdir()
    assert "is not the folder of a run" in invoke("report", tmp_path / "empty").stderr


def test_progress_on_a_terminal_leaves_only_the_scores() -> None:
    from io import StringIO

    from rich.console import Console

    screen = StringIO()
    with TerminalProgress(Console(file=screen, width=100)) as progress:
        progress.round_started(2, 6)
        progress.step(1, 25, 0.5)
        progress.evaluated({"b1": 0.61, "b4": 0.4}, "exact match")
        progress.message("client 3 was rejected")
    first, second = [line for line in screen.getvalue().splitlines() if line.strip()][:2]
    assert first.startswith("round 2/6    exact match: b1 0.610  b4 0.400")
    assert second == "client 3 was rejected"


def test_run_json_is_json_and_nothing_else(invoke: Invoke, experiment: FakeExperiment) -> None:
    result = invoke("run", "flame/tiny-tasks", "--json")
    shown = json.loads(result.stdout)
    assert shown["folder"] == "runs/flame-tiny-tasks"
    assert shown["method"] == "flame"
    assert [row["budget"]["name"] for row in shown["rows"]] == ["b1", "b2", "b3", "b4"]


def test_resume_prints_the_table_too(invoke: Invoke, experiment: FakeExperiment) -> None:
    invoke("run", "flame/tiny-tasks")
    result = invoke("resume", "runs/flame-tiny-tasks")
    assert experiment.calls[-1] == ("resume", Path("runs/flame-tiny-tasks"))
    assert "b4" in result.stdout


def test_evaluate_where_every_client_has_a_model_of_its_own(invoke: Invoke, experiment: FakeExperiment) -> None:
    title, *lines = [line.split() for line in invoke("evaluate", "runs/personal").stdout.splitlines()]
    assert " ".join(title) == "client own model, accuracy as received, accuracy all data, accuracy"
    assert lines == [
        ["client-000", "0.750", "0.250", "0.500"],
        ["client-001", "0.500", "0.000", "0.500"],
        ["mean", "0.625", "0.125", "0.500"],
        ["deviation", "0.177", "–", "0.000"],
    ]
    shown = json.loads(invoke("evaluate", "runs/personal", "--json").stdout)
    assert shown["scores"] == {}
    assert shown["received"] == {"client-000": 0.25, "client-001": 0.0}
    assert shown["summaries"] == {"mtal": 0.625, "received": 0.125, "pooled": 0.5}
    assert shown["deviations"] == {"mtal": 0.177, "pooled": 0.0}
