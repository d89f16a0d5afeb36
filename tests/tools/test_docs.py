"""The generated parts of the documentation are up to date."""

from __future__ import annotations

import hashlib
import re
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedguild
from fedguild.config import Config, table_cells, tables
from fedguild.config.table import ShippedTable
from fedguild.core import layout
from fedguild.core.errors import DataError
from fedguild.measuring.log.folder import load_run
from fedguild.methods import build_method
from fedguild.model.families import FAMILIES
from fedguild.model.packaged import packaged
from fedguild.runs.api.launch import Launch
from fedguild.runs.api.run_grid import Cell
from tests.measuring.costs.test_published import all_compared
from tests.report.runs import FLAME_FINAL, write_run
from tools import generate
from tools.english import tasks as english
from tools.records import tables as recording
from tools.records.cells import CellRecord, read_records, record_of
from tools.records.remarks import CALLS, render_remark
from tools.smollm2.dense import SHA256

ROOT = Path(__file__).parents[2]
write_small = partial(write_run, clients=4, layers=1)
CONDITIONS = ROOT / "docs" / "methods" / "records" / "conditions.yaml"
"""What the records were run with beside their configs."""


def test_the_first_run_lists_the_files_of_a_run() -> None:
    page = (ROOT / "docs" / "guides" / "first-run.md").read_text("utf-8")
    files = (layout.CONFIG, layout.METHOD, layout.ENVIRONMENT, layout.PARTITION, layout.SAMPLES, layout.STOPPED)
    for name in (*files, layout.DIVERGED, layout.CHECKPOINTS, layout.MEMORY):
        assert f"`{name}" in page, name


def test_tables_and_indexes_are_up_to_date(monkeypatch: pytest.MonkeyPatch) -> None:
    ours = {id(row.claim): row for row in all_compared()}
    monkeypatch.setattr(generate, "compare", lambda claim, build: ours[id(claim)])
    pages = sorted(str(page.relative_to(ROOT)) for page in generate.outdated())
    assert not pages, f"{', '.join(pages)}: not up to date. Run `make docs`."
    assert not generate.strays(), "figures and pages of no recorded table"


NUMBER = re.compile(r"(?<![\w./])(?<!\w-)\d+(?:\.\d+)?(?:e-?\d+)?(?![\w/])")
NOT_PROSE = re.compile(r"\{\{.*?\}\}|\{%.*?%\}|\{#.*?#\}|`[\w-]+/[\w-]+`|\]\([^)]*\)", re.DOTALL)
"""In a remark: calls, Jinja's statements and comments, names of tables, and where links lead."""
SYMBOL = re.compile(r"\b[a-z] = \d+(?:\.\d+)?|\b95 % interval")
"""A setting by its symbol, `t = 0`; and the level of the intervals."""

CALLED = re.compile(r"\bof\('([\w/-]+)'\)")
"""Another table that a remark or an overview calls."""


def typed_by_hand(remark: str, settings: set[float]) -> list[str]:
    """The numbers in a remark's text that are none of some settings."""
    prose = SYMBOL.sub(" ", " ".join(NOT_PROSE.sub(" ", remark).split()))
    return [number for number in NUMBER.findall(prose) if float(number) not in settings]


def settings_of(shipped: ShippedTable, planned: dict[str, Any]) -> set[float]:
    """The numbers among a table's settings: in its YAML but for the claims, in its plan, and its methods' options."""
    table, written = shipped.load(), yaml.safe_load(shipped.path.read_text("utf-8"))
    written = {name: value for name, value in written.items() if name != "claims"}
    cells = [cell.config().method for cell in table_cells(shipped.name, table, columns=[next(iter(table.columns))])]
    options = [build_method(one.name, one.options).settings.model_dump() for one in cells]
    planned = {name: value for name, value in planned.items() if name != "seeds"}
    return {float(number) for number in re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", str([written, planned, options]))}


def test_a_number_typed_by_hand_is_found() -> None:
    remark = "At {{ score('guild', 0.9) }}, Dirichlet 0.5 and t = 0 A3SMoE gains 0.075, 7 % or −2e-3 (`guild/table-2`)."
    assert typed_by_hand(remark, {0.5}) == ["0.075", "7", "2e-3"]
    assert typed_by_hand(remark, {0.5, 0.075, 7.0, 0.002}) == []
    assert typed_by_hand("-0.2, `0.3` and dirichlet-0.4", set()) == ["0.2", "0.3"]
    assert typed_by_hand("by the 95 %\ninterval, 95 % of", set()) == ["95"]


def test_no_figure_in_a_remark_is_typed_by_hand() -> None:
    """All are read from the records; what stands in the text are settings of its table."""
    plan = yaml.safe_load((recording.RECORDS / "plan.yaml").read_text("utf-8"))
    shipped = {table.name: table for table in tables()}
    found = sorted(recording.RECORDS.rglob("remark.txt"))
    assert len(found) > 5
    for path in found:
        name, text = path.parent.relative_to(recording.RECORDS).as_posix(), path.read_text("utf-8")
        called = {name, *CALLED.findall(text)}
        typed = typed_by_hand(text, set[float]().union(*(settings_of(shipped[one], plan[one]) for one in called)))
        assert not typed, f"the remark of {name} has {', '.join(typed)}, none of its settings: call a function for it"


def test_the_calls_of_remarks_are_listed_with_examples_that_run() -> None:
    """An example is one of the tables that Guild's page shows, whichever has its rows."""
    listed = re.findall(r"^\| `(\w+)(\(.*\))` \|", (recording.RECORDS / "README.md").read_text("utf-8"), re.MULTILINE)
    assert sorted(name for name, _ in listed) == sorted(CALLS)
    records = read_records(recording.RECORDS)
    for name, arguments in listed:
        rendered = []
        for shipped in tables():
            of_table = [record for record in records if record.table == shipped.name]
            if of_table:
                with suppress(DataError):
                    recorded = {shipped.name: (shipped.load(), of_table)}
                    rendered.append(render_remark(f"{{{{ {name}{arguments} }}}}", shipped.name, recorded))
        assert rendered, f"{name}{arguments}"


def test_no_figure_in_an_overview_is_typed_by_hand() -> None:
    """The settings are those of all tables that it calls."""
    plan = yaml.safe_load((recording.RECORDS / "plan.yaml").read_text("utf-8"))
    shipped = {table.name: table for table in tables()}
    found = sorted(recording.RECORDS.glob("*/overview.txt"))
    assert found
    for path in found:
        text = path.read_text("utf-8")
        called = set(CALLED.findall(text))
        assert len(called) > 1
        settings = set[float]().union(*(settings_of(shipped[name], plan[name]) for name in called))
        assert not typed_by_hand(text, settings), path


MEASURED = re.compile(r"± \d|\b0\.\d{3}")
"""What only a run can tell: an interval, or a score with three decimals."""


def test_no_measured_figure_is_typed_into_a_table_of_claims() -> None:
    """FedGuild's column says in words what the recorded tables below it, the costs or the log have in figures."""
    typed, read = [], 0
    for page in sorted((ROOT / "docs" / "methods").glob("*.md")):
        written = re.sub(r"<!-- generated: .*?<!-- end -->", "", page.read_text("utf-8"), flags=re.DOTALL)
        _, _, claims = written.partition("\n## Claims and our figures\n")
        rows = [line for line in claims.partition("\n## ")[0].splitlines() if line.startswith("| ")]
        cells = [row.rstrip(" |").rpartition(" | ")[2] for row in rows]
        read += len(cells)
        typed += [f"{page.name}: {cell}" for cell in cells if MEASURED.search(cell)]
    assert read > 100
    assert not typed


def test_every_method_shows_what_was_recorded_of_it() -> None:
    pages = {name: (generate.METHOD_PAGES / f"{name}.md").read_text("utf-8") for name in generate.METHODS}
    assert len(pages) > 20
    assert [name for name, text in pages.items() if "<!-- generated: recorded -->\n" not in text] == []


def test_the_plan_names_tables_that_ship() -> None:
    plan = yaml.safe_load((recording.RECORDS / "plan.yaml").read_text())
    assert plan.keys() <= {table.name for table in tables()}
    for settings in plan.values():
        assert settings.keys() <= {"seeds", "settings", "columns", "longer", "choose"}
        assert all("=" in override for override in settings.get("settings", ()))


def test_the_tables_of_the_english_model_are_on_data_where_pretraining_shows() -> None:
    """Of data that random weights learn as well, a table would compare methods on what no model has learnt."""
    measured = english.read_records(recording.RECORDS / "english")
    for plan in recording.plans():
        configs = [cell.config() for cell in plan.cells_by_place.values()]
        for corpus in {config.data.dataset for config in configs if config.model.path == "english"}:
            gained = english.gain([record for record in measured if record.task == corpus], "accuracy")
            assert gained is not None, f"{plan.name}: nobody measured what {corpus} gains from pre-training."
            assert gained.is_certain, f"{plan.name}: on {corpus} random weights may do as well."
            assert len(gained.seeds) > 2


HEADLINES = {"flame/table-2", "ub-smoe/table-4", "fedamole/table-1", "fedalign-moe/table-1"}
"""The papers' main tables, each in small and on the English model."""


def test_the_main_tables_have_five_seeds_and_every_table_three_and_perplexity() -> None:
    """Perplexity in all but those of privacy, which are about the score at an epsilon."""
    planned = {plan.name: plan for plan in recording.plans()}
    assert {f"{name}-{model}" for name in HEADLINES for model in ("tiny", "english")} <= planned.keys()
    for name, plan in planned.items():
        is_main = name.rpartition("-")[0] in HEADLINES or name.startswith("guild/table-")
        assert len(plan.seeds) >= (5 if is_main else 3), name
        if not name.startswith("ffa-lora/privacy-"):
            row, column = next(iter(plan.cells_by_place))
            assert plan.config(row, column, 0, plan.overrides_in(column, plan.overrides)).evaluation.perplexity, name


def test_the_tables_on_english_are_recorded_in_full() -> None:
    """Every cell with every seed: what the pages conclude from them is from the whole table, and a remark says it."""
    found = {(record.table, record.row, record.column, record.seed) for record in recording.valid_records()}
    on_english = [plan for plan in recording.plans() if plan.name.endswith("-english")]
    assert len(on_english) > 15
    for plan in on_english:
        assert (recording.RECORDS / plan.name / "remark.txt").is_file(), plan.name
        cells = {(plan.name, row, column, seed) for row, column in plan.cells_by_place for seed in plan.seeds}
        missing = sorted(cells - found)
        assert not missing, f"{len(missing)} cells of {plan.name} are not recorded, the first {missing[:3]}"


def test_every_record_is_of_its_cells_present_config() -> None:
    """A record of other settings would be shown as if it were of these."""
    stale = [str(record.path(recording.RECORDS).relative_to(recording.RECORDS)) for record in recording.outdated()]
    assert not stale, (
        f"{', '.join(stale[:5])} ({len(stale)} in all): of other settings than planned. Run `make tables`."
    )


@pytest.fixture(scope="module")
def recorded_configs() -> list[Config]:
    """A config of each cell that has a record."""
    cells = {plan.name: plan.cells_by_place for plan in recording.plans()}
    places = {(one.table, one.row, one.column) for one in recording.valid_records()}
    return [cells[table][row, column].config() for table, row, column in places]


def test_the_records_are_of_the_methods_present_defaults(recorded_configs: list[Config]) -> None:
    """A config's fingerprint has only the options that it gives; all others had the defaults of then."""
    names = {config.method.name for config in recorded_configs}
    present = {name: build_method(name, {}).settings.model_dump(mode="json") for name in names}
    written = yaml.safe_load(CONDITIONS.read_text("utf-8"))["defaults"]
    changed = {
        f"{name}: {option} is {present[name].get(option)!r}, was {written.get(name, {}).get(option)!r}"
        for name in names
        for option in present[name].keys() | written.get(name, {}).keys()
        if present[name].get(option) != written.get(name, {}).get(option)
    }
    assert not changed, (
        f"{'; '.join(sorted(changed))}. A new option: write it into {CONDITIONS.name}. A changed default: give the "
        "former value in the presets of the tables that were run with it, or run them again; then write the new one."
    )
    assert written.keys() == names


def test_the_records_are_of_the_present_weights(recorded_configs: list[Config]) -> None:
    """A config names a packaged model, not its weights: a checkpoint that is trained further voids the records."""
    names = {config.model.path for config in recorded_configs}
    mixture = ROOT / "tools" / "smollm2" / "mixture.safetensors"
    files = {"models/smollm2-moe": mixture} | {
        name: folder / "model.safetensors"
        for name in names
        if not name.startswith("models/") and (folder := packaged(name)) is not None
    }
    known = {"models/smollm2-135m": SHA256} | {
        name: hashlib.sha256(file.read_bytes()).hexdigest() for name, file in files.items()
    }
    assert known.keys() >= names, "a table is on a model that does not ship"
    present = {name: known[name] for name in names}
    assert yaml.safe_load(CONDITIONS.read_text("utf-8"))["weights"] == present


def test_a_record_of_other_settings_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a planned cell's config it counts; of another config, seed, row or table it does not."""
    records = tmp_path / "records"
    records.mkdir()
    settings = ("evaluation.every=4",)
    (records / "plan.yaml").write_text(yaml.safe_dump({"flame/table-2-tiny": {"seeds": [0], "settings": [*settings]}}))
    monkeypatch.setattr(recording, "RECORDS", records)
    (plan,) = recording.plans()
    column = next(iter(plan.table.columns))
    fingerprint = plan.fingerprint("flame", column, 0, settings)
    of_cell = {"table": plan.name, "column": column, "row": "flame", "seed": 0, "fingerprint": fingerprint}
    good = CellRecord(**of_cell, fedguild="0.3.0", round=4, split="test", scores={"mean": 0.5})
    good.write(records)
    assert recording.outdated() == []
    for change in ({"fingerprint": "x"}, {"seed": 1}, {"row": "gone"}, {"table": "flame/table-3"}):
        other = good.model_copy(update=change)
        path = other.write(records)
        assert recording.outdated() == [other], change
        path.unlink()
        good.write(records)


LONGER = {
    "seeds": [0, 1],
    "longer": {"rounds-4": "rounds-16", "rounds-8": "rounds-16"},
    "columns": {"rounds-16": ["evaluation.every=4"]},
}


@pytest.mark.long
@pytest.mark.parametrize(("jobs", "discard"), [(100, False), (1, True)])
def test_a_column_may_be_read_from_the_runs_of_a_longer_one(tmp_path, monkeypatch, jobs, discard):
    """One run of 16 rounds is recorded three times, with the scores and costs of its first 4, 8 and all rounds."""
    monkeypatch.setattr(recording, "ROOT", tmp_path)
    monkeypatch.setattr(recording, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(recording, "RUNS", tmp_path / "runs")
    plan = recording.Plan("guild/steps-english", LONGER)
    monkeypatch.setattr(recording, "plans", lambda *_: [plan])
    left = recording.Listing([plan]).left(plan)
    rows = len(plan.table.rows)
    assert (left.cells, left.rounds) == (rows * 3 * 2, rows * 2 * 16)
    completed: list[Path] = []

    def complete(launch: Launch, cells: list[Cell]) -> None:
        for cell in cells:
            if not cell.folder.exists():
                completed.append(cell.folder)
                write_small(cell.folder, name=cell.config.name, seed=cell.config.seed, rounds=16)

    monkeypatch.setattr(Launch, "complete_cells", complete)
    monkeypatch.setattr(Cell, "state", lambda cell: "absent")
    first = next(iter(plan.table.rows))
    recording.run(plan, jobs, [first], discard=discard)
    assert {one.row for one in recording.read_records(recording.RECORDS)} == {first}
    assert len(completed) == 2
    recording.run(plan, jobs, discard=discard)
    assert [folder.exists() for folder in completed] == [not discard] * rows * 2
    assert len(completed) == len(set(completed)) == rows * 2
    assert all(folder.parts[-3] == "rounds-16" for folder in completed)
    assert recording.outdated() == []
    found = {(one.row, one.column, one.seed): one for one in recording.read_records(recording.RECORDS)}
    assert len(found) == rows * 3 * 2
    for (row, column, seed), one in found.items():
        rounds = int(column.removeprefix("rounds-"))
        assert (one.round, one.run_rounds) == (rounds, None if rounds == 16 else 16)
        whole = found[row, "rounds-16", seed]
        assert one.upload_bytes == pytest.approx(whole.upload_bytes * rounds / 16)
        assert one.seconds == pytest.approx(whole.seconds * rounds / 16, abs=0.1)
        assert one.fingerprint == plan.config(row, column, seed, plan.overrides_in(column, ())).fingerprint()
    assert recording.Listing([plan]).left(plan).rounds == 0


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"columns": {"rounds-16": ["evaluation.every=3"]}}, "not evaluated after round 4, but every 3 rounds"),
        ({"columns": {"rounds-4": ["training.batch_size=3"]}}, "differ in more than the number of rounds"),
        ({"columns": {"rounds-16": ["evaluation.every=4", "evaluation.diagnostics=true"]}}, "differ in more than the"),
        ({"settings": ["training.round_schedule=cosine"]}, "schedule is over all rounds"),
        ({"longer": {"rounds-16": "rounds-4"}}, "not evaluated after round 16"),
        ({"longer": {"rounds-4": "rounds-32"}}, "settings of rounds-32, no column of it"),
    ],
)
def test_a_column_is_not_read_from_runs_that_are_no_continuation(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(SystemExit, match=said):
        recording.Plan("guild/steps-english", LONGER | settings).cells()


@pytest.mark.long
@pytest.mark.parametrize("preset", ["guild", "flame", "fedamole"])
def test_a_run_is_the_beginning_of_a_longer_one(preset: str, tmp_path: Path) -> None:
    """What a record has of two rounds is the same, to the last bit, when three rounds were run; but for its seconds."""
    small = ["federation.clients=4", "training.steps=2", "evaluation.max_examples=3", "evaluation.perplexity=true"]
    small += ["evaluation.clients=true", "evaluation.trained=true", "evaluation.received=true"]
    small += ["evaluation.eval_on_start=false", "training.batch_size=2"]
    found = []
    for rounds in (2, 3):
        settings = [*small, f"federation.rounds={rounds}", "evaluation.every=2"]
        fedguild.run(f"{preset}/tiny-tasks", *settings, output=tmp_path / str(rounds))
        record = record_of(load_run(tmp_path / str(rounds)).until(2), "table", "column", "row", "")
        found.append(record.model_copy(update={"seconds": None}))
    assert found[0] == found[1]
    assert found[0].round == 2
    assert found[0].scores


def test_a_setting_is_chosen_on_validation_examples_before_a_rows_cells_are_planned(tmp_path, monkeypatch):
    """The runs are written by hand; where the data lie is neither in the records nor in the fingerprints."""
    monkeypatch.setattr(recording, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(recording, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(generate, "RECORDS", tmp_path / "records")
    rates = ["1e-3", "4e-3"]
    choose = {"setting": "training.learning_rate", "values": rates, "seed": 100, "column": "dirichlet-0.5"}
    choose |= {"settings": ["federation.rounds=2"]}
    settings = {"seeds": [0], "settings": ["data.train=$DATA/train.json"], "choose": choose}
    plan = recording.Plan("flame/table-2-tiny", settings, tmp_path / "data")
    assert plan.needs_data()
    assert plan.cells() == []
    candidates = plan.candidates("flame")
    for value, candidate in candidates.items():
        config = candidate.cell.config
        assert (config.evaluation.split, config.seed, config.training.learning_rate) == (
            "validation",
            100,
            float(value),
        )
        assert config.data.train == str(tmp_path / "data/train.json")
        assert config.federation.rounds == 2
        write_small(
            candidate.cell.folder, name="flame", seed=100, final=dict.fromkeys(FLAME_FINAL, 0.3 + 10 * float(value))
        )
    plan.chosen("flame")
    assert plan.choice("flame").chosen == "4e-3"
    configs = [cell.cell.config for cell in plan.cells()]
    assert {(config.name, config.training.learning_rate) for config in configs} == {("flame", 4e-3)}
    assert all(config.federation.rounds != 2 for config in configs), "the choice's settings are not the table's"
    elsewhere = recording.Plan("flame/table-2-tiny", settings, tmp_path / "elsewhere")
    assert [cell.fingerprint for cell in elsewhere.cells()] == [cell.fingerprint for cell in plan.cells()]
    write_small(plan.cells()[0].cell.folder, name="flame", seed=0)
    recorded = plan.cells()[0].record().read_text("utf-8")
    assert str(tmp_path) not in recorded
    assert "$DATA/train.json" in recorded
    sentence = "`training.learning_rate` was chosen for each row before, among 1e-3, 4e-3, by the mean score"
    page = generate.table_pages()[generate.TABLE_PAGES / "flame-table-2-tiny.md"]
    assert sentence in page
    assert "(seed 100, dirichlet-0.5, with `federation.rounds=2`)" in page
    assert plan.is_chosen("flame")
    changed = {**settings, "choose": {**choose, "values": ["1e-3"]}}
    assert recording.Plan("flame/table-2-tiny", changed, None).choice("flame") is None, "it was chosen among others"


def test_fedamoles_ablation_on_smollm2_has_the_rate_that_fedamole_chose():
    """The ablation chooses nothing: its FedAMoLE is to be the very run of Table 1."""
    found = set()
    for plan in recording.plans(["fedamole/table-1-smollm2", "fedamole/table-3-smollm2"]):
        overrides = plan.row_overrides("fedamole")
        assert overrides is not None
        (cell,) = plan.runs(["fedamole"], ["snli"], overrides, [0], "runs")
        found.add(cell.fingerprint)
    assert len(found) == 1


def test_a_recorded_run_on_validation_examples_is_not_run_again_for_a_choice(tmp_path, monkeypatch):
    monkeypatch.setattr(recording, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(recording, "RUNS", tmp_path / "runs")
    choose = {"setting": "training.learning_rate", "values": ["1e-3", "4e-3"], "column": "dirichlet-0.5", "seed": 100}
    plan = recording.Plan("flame/table-2-tiny", {"seeds": [0], "choose": choose})
    for split, known in (("test", []), ("validation", ["4e-3"])):
        one = plan.candidates("flame")["4e-3"]
        record = CellRecord(
            table="flame/rates", column="rate-4e-3", row="flame", seed=100, fingerprint=one.fingerprint,
            fedguild="0", round=1, split=split, scores={"mean": 0.4},
        )  # fmt: skip
        record.write(tmp_path / "records")
        assert [one.fingerprint for one in plan.untried("flame")] == [
            one.fingerprint for value, one in plan.candidates("flame").items() if value not in known
        ]
    (untried,) = plan.untried("flame")
    write_small(untried.cell.folder, name="flame", seed=100, final=dict.fromkeys(FLAME_FINAL, 0.3))
    plan.chosen("flame")
    assert plan.choice("flame").tried == {"1e-3": pytest.approx(0.3, abs=0.01), "4e-3": 0.4}


@pytest.mark.parametrize(("spread", "refused"), [(0.01, False), (0.2, True)])
def test_a_choice_near_chance_is_refused(spread, refused, tmp_path, monkeypatch, capsys):
    """Three validation seeds a value; the best is 0.1 above chance in the mean."""
    monkeypatch.setattr(recording, "RECORDS", tmp_path / "records")
    monkeypatch.setattr(recording, "RUNS", tmp_path / "runs")
    monkeypatch.setattr(recording, "ROOT", tmp_path)
    choose = {"setting": "training.learning_rate", "values": ["1e-3", "4e-3"], "column": "dirichlet-0.5", "seed": 100}
    once = recording.Plan("flame/table-2-tiny", {"seeds": [0], "choose": choose})
    again = {**choose, "repeats": [101, 102], "chance": 0.25}
    plan = recording.Plan("flame/table-2-tiny", {"seeds": [0], "choose": again})
    assert len(plan.untried("flame")) == 6
    for value, first in plan.candidates("flame").items():
        for place, one in enumerate([first, *plan.repeats("flame")[value]]):
            score = (0.35 if value == "4e-3" else 0.2) + spread * (place - 1)
            final = dict.fromkeys(FLAME_FINAL, score)
            write_small(one.cell.folder, name="flame", seed=one.cell.config.seed, final=final)
    once.chosen("flame")
    assert not plan.is_chosen("flame"), "the further seeds are missing"
    assert len(plan.untried("flame")) == 4
    plan.chosen("flame")
    assert plan.is_chosen("flame")
    assert plan.untried("flame") == []
    assert plan.choice("flame").means == {"1e-3": pytest.approx(0.2, abs=0.01), "4e-3": pytest.approx(0.35, abs=0.01)}
    assert plan.choice("flame").chosen == "4e-3"
    assert plan.is_refused("flame") == refused
    assert bool(plan.cells()) != refused
    monkeypatch.setattr(recording, "finish", lambda *_: None)
    monkeypatch.setattr(recording.Planned, "record", lambda self: tmp_path / "recorded")
    recording.run(plan, 1, ["flame"])
    assert ("refused, its best value is within its spread" in capsys.readouterr().out) == refused


def test_readme_names_the_number_of_families() -> None:
    own = [family.name for family in FAMILIES.found() if family.origin == "fedguild"]
    assert f"[{len(own)} families](docs/guides/real-models.md#" in (ROOT / "README.md").read_text("utf-8")
