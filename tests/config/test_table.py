"""Tables: every one that ships is whole, and a cell's settings lie in the order that the table says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest

from fedguild.client.budget import Budget
from fedguild.config import Config, Table, load_config, table_cells, tables
from fedguild.config.table import TABLES_FOLDER, ShippedTable, TableCell, require_claimed_scores
from fedguild.core.errors import ConfigError
from fedguild.methods import build_method
from fedguild.runs.setup import check_config
from tests.backbones import tiny_backbone

NAMES = [table.name for table in tables()]


@cache
def shipped(name: str) -> ShippedTable:
    return next(table for table in tables() if table.name == name)


@cache
def configs_of(name: str) -> list[tuple[TableCell, Config]]:
    return [(cell, cell.config()) for cell in table_cells(name, shipped(name).load())]


def checked_settings(config: Config) -> str:
    """Returns what `check_config` looks at: columns often differ only in their data, and rows in a learning rate."""
    return config.model_dump_json(
        include={
            "method": True,
            "model": True,
            "federation": True,
            "privacy": True,
            "training": {"batch_size"},
            "evaluation": {"answer_mode", "split", "diagnostics", "max_new_tokens"},
            "data": {"max_length", "split"},
        },
        exclude={"federation": {"rounds"}},
    )


_CHECKED: set[str] = set()


def check_once(settings: str, config: Config) -> None:
    """Checks a config unless one like it was checked before: tables share many of their rows."""
    if settings not in _CHECKED:
        check_config(config)
        _CHECKED.add(settings)


def test_every_file_of_the_folder_is_a_table_with_a_description() -> None:
    assert {TABLES_FOLDER / f"{name}.yaml" for name in NAMES} == set(TABLES_FOLDER.rglob("*.y*ml"))
    assert all(table.description for table in tables())


@pytest.mark.parametrize("name", NAMES)
def test_a_column_of_a_shipped_table_fits_its_models(name: str) -> None:
    table = shipped(name).load()
    configs = configs_of(name)
    assert len(configs) == len(table.rows) * len(table.columns)
    assert all(config.name == cell.row for cell, config in configs)
    last = list(table.columns)[-1]
    for config in {checked_settings(config): config for cell, config in configs if cell.column == last}.values():
        check_once(checked_settings(config), config)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_a_shipped_table_fits_its_model(name: str) -> None:
    for config in {checked_settings(config): config for _, config in configs_of(name)}.values():
        check_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_column_differ_in_nothing_but_the_method(name: str) -> None:
    """Data, clients, training and evaluation are the same for all rows, but for what a row is named for.

    A row may state a learning rate of its own, which `tests/tools/test_records.py` holds to the validation records.
    Only rows that are scored so have every client answer all the questions, or its own with a model of its own.
    """
    table = shipped(name).load()
    for column in table.columns:
        rows = {cell.row: config for cell, config in configs_of(name) if cell.column == column}
        configs = list(rows.values())
        for section, but in (("data", None), ("evaluation", {"pooled", "clients"})):
            sections = {getattr(config, section).model_dump_json(exclude=but) for config in configs}
            assert len(sections) == 1, (column, section)
        for key in ("clients", "client_fraction", "budgets"):
            assert len({repr(getattr(config.federation, key)) for config in configs}) == 1, (column, key)
        rounds = {config.federation.rounds for config in configs}
        assert max(rounds) - min(rounds) <= 1, "FDLoRA's first stage is a round of its own"
        own_rate = {name for name, row in table.rows.items() if "learning_rate" in row.settings.get("training", {})}
        trainings = [config.training.model_dump(exclude={"learning_rate"}) for config in configs]
        assert all(training == trainings[0] for training in trainings), column
        assert len({config.training.learning_rate for row, config in rows.items() if row not in own_rate}) <= 1, column


@pytest.mark.parametrize("name", NAMES)
def test_what_a_table_shows_of_a_row_is_scored(name: str) -> None:
    """Where clients answer all the questions, that is also what is shown; it costs a pass of them all for each."""
    table = shipped(name).load()
    for cell, config in configs_of(name):
        score = table.scores[cell.row]
        assert config.evaluation.pooled == (score == "pooled"), (cell.row, cell.column)
        assert config.evaluation.clients or score != "mtal" or config.method.name == "fedamole", (cell.row, cell.column)
        assert config.evaluation.received or score != "received", (cell.row, cell.column)


@pytest.mark.parametrize("name", NAMES)
def test_the_rows_of_a_shipped_table_are_scored_alike(name: str) -> None:
    """One protocol in a column: every row has the table's score, and its runs take it."""
    content = shipped(name).load()
    assert set(content.scores.values()) == {content.score}
    setting = {"mtal": "clients"}.get(content.score, content.score)
    if content.score != "mean":
        for cell, config in configs_of(name):
            assert getattr(config.evaluation, setting), f"{cell.row}, {cell.column}: evaluation.{setting}"


@pytest.mark.parametrize("name", NAMES)
def test_the_claims_of_a_shipped_table_are_about_scores_that_it_has(name: str) -> None:
    table = shipped(name).load()
    require_claimed_scores(name, table)
    taken = {"mtal": "clients", "trained": "trained", "received": "received", "pooled": "pooled"}
    for claim in table.claims:
        needed = {claim.higher: taken.get(claim.score or "")}
        needed |= dict.fromkeys(claim.lower, taken.get(claim.over or claim.score or ""))
        for cell, config in configs_of(name):
            setting = needed.get(cell.row)
            assert setting is None or getattr(config.evaluation, setting), (
                f"'{claim.says}': {cell.row} is not scored so"
            )


@pytest.mark.parametrize(("score", "told"), [("b5", "Did you mean 'b"), ("trainde", "Did you mean 'trained'")])
def test_a_claim_about_a_score_that_is_not_there_is_refused(score: str, told: str) -> None:
    table = shipped("flame/table-2-tiny").load()
    claim = table.claims[0].model_copy(update={"score": score})
    with pytest.raises(ConfigError, match=f"'{claim.says}' is about the score '{score}'") as refused:
        require_claimed_scores("flame/table-2-tiny", table.model_copy(update={"claims": (claim,)}))
    assert told in refused.value.hint


def test_a_column_has_no_score(tmp_path: Path) -> None:
    path = tmp_path / "table.yaml"
    path.write_text("preset: a\nreference: a\nrows: {a: {score: best}}\n")
    with pytest.raises(ConfigError, match=r"a\.score: .*'mean', 'mtal', 'trained', 'received' or 'pooled', got 'best'"):
        ShippedTable("mine", "", path).load()
    path.write_text("preset: a\nreference: a\nrows: {a: {}}\ncolumns: {b: {score: mean}}\n")
    with pytest.raises(ConfigError, match=r"unknown key 'columns\.b\.score'"):
        ShippedTable("mine", "", path).load()


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("ub-smoe/")])
def test_rows_of_ub_smoe_have_its_alpha_and_targets(name: str) -> None:
    """LoRA's alpha of 20 on attention and experts (Appendix E.5); the losses of SMoE-LLB need the routers' too.

    A row named `attention` is there to leave the experts out. On SmolLM2 the rows have FLAME's alpha, as both papers'
    tables share their runs.
    """
    alpha = 16 if name.endswith("-smollm2") else 20
    for cell in table_cells(name, shipped(name).load()):
        config = cell.config()
        settings = build_method(config.method.name, config.method.options).settings
        default = config.method.name == "smoe-llb"
        has_router = cell.row.endswith("-router") and not cell.row.endswith("-no-router")
        routers = ("router",) if has_router or (default and cell.row == "smoe-llb") else ()
        dense_or_experts = "mlp" if config.model.path == "allenai/OLMo-1B-hf" else "experts"
        adapted = {"attention"} if cell.row == "attention" else {"attention", dense_or_experts, *routers}
        assert set(settings.targets) == adapted, (cell.row, cell.column)
        assert getattr(settings, "alpha", alpha) == alpha, (cell.row, cell.column)


@pytest.mark.parametrize("name", ["ub-smoe/table-4-homogeneous", "ub-smoe/table-4-homogeneous-tiny"])
def test_homogeneous_clients_train_with_their_budgets_experts(name: str) -> None:
    model = tiny_backbone("olmoe", num_experts=16, num_experts_per_tok=8).info
    table = shipped(name).load()
    for cell in table_cells(name, table):
        config = cell.config()
        (budget,) = config.federation.budgets
        options = {**config.method.options, "rank": 4}
        plan = build_method(config.method.name, options).plan(model, Budget(budget.name, budget.active_experts, 4))
        assert plan.active_experts == budget.active_experts == {"b1": 1, "b2": 2, "b3": 4, "b4": 8}[cell.column]


def small_table() -> Table:
    return Table.model_validate(
        {
            "preset": "{row}/tiny-{column}",
            "reference": "flame",
            "rows": {
                "flame": {"settings": {"federation": {"rounds": 9, "clients": 7}}},
                "mine": {"preset": "fedit", "settings": {"method": "fedprompt"}},
            },
            "columns": {"tasks": {"settings": {"federation": {"rounds": 3}}}, "other": {"preset": "dolly"}},
            "settings": {"seed": 5},
        }
    )


def test_the_settings_of_a_column_lie_above_a_rows_and_overrides_above_all() -> None:
    flame, mine = table_cells("mine", small_table(), columns=["tasks"])
    assert (flame.preset, mine.preset) == ("flame/tiny-tasks", "fedit/tiny-tasks")
    config = flame.config(["federation.clients=5"])
    assert (config.federation.rounds, config.federation.clients, config.seed) == (3, 5, 5)
    assert config.method.options == load_config("flame/tiny-tasks").method.options
    assert (mine.config().method.name, mine.config().method.options, mine.config().name) == ("fedprompt", {}, "mine")


def test_rows_and_columns_are_chosen_in_the_order_asked() -> None:
    cells = table_cells("mine", small_table(), rows=["mine", "flame"], columns=["other"])
    assert [(cell.row, cell.column, cell.preset) for cell in cells] == [
        ("mine", "other", "fedit/tiny-dolly"),
        ("flame", "other", "flame/tiny-dolly"),
    ]


def test_bad_tables_say_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no row 'flam'") as caught:
        table_cells("mine", small_table(), rows=["flam"])
    assert "flame" in caught.value.hint
    with pytest.raises(ConfigError, match="no column 'dolly'"):
        table_cells("mine", small_table(), columns=["dolly"])
    unknown = small_table().model_copy(update={"preset": "{row}/nowhere"})
    with pytest.raises(ConfigError, match="no preset 'flame/nowhere' for flame, tasks"):
        table_cells("mine", unknown)
    path = tmp_path / "table.yaml"
    path.write_text("preset: a\nreference: x\nrows: {a: {}}\nrow: 1\n")
    with pytest.raises(ConfigError, match="unknown key 'row'"):
        ShippedTable("mine", "", path).load()
    path.write_text("preset: a\nreference: x\nrows: {a: {}}\n")
    with pytest.raises(ConfigError, match="not one of the rows a"):
        ShippedTable("mine", "", path).load()


def test_a_bad_setting_of_a_row_is_named_with_its_place() -> None:
    table = small_table()
    broken = table.model_copy(update={"settings": {"federation": {"round": 3}}})
    with pytest.raises(ConfigError, match=r"mine: unknown key 'federation.round'"):
        table_cells("mine", broken)[0].config()


@pytest.mark.parametrize(
    ("name", "row", "column", "preset"),
    [
        ("ub-smoe/table-5", "ub-smoe", "non-iid", "ub-smoe/olmoe-telequad"),
        ("ub-smoe/table-7", "ub-smoe", "uniform", "ub-smoe/olmoe-commonsense-32-uniform"),
        ("ub-smoe/table-7", "ub-smoe", "long-tail", "ub-smoe/olmoe-commonsense-32-long-tail"),
        ("ub-smoe/table-7", "ub-smoe", "reverse", "ub-smoe/olmoe-commonsense-32-reverse"),
        ("flame/table-2", "flame", "dolly-5", "flame/olmoe-dolly"),
        ("flame/table-4", "flame", "dolly-0.5-half", "flame/olmoe-dolly-40"),
        ("flame/table-4", "flame", "alpagasus-0.5-half", "flame/olmoe-alpagasus-40"),
        ("ub-smoe/table-6-tiny", "dmr", "all", "ub-smoe/tiny-commonsense-dmr"),
        ("ub-smoe/table-6-tiny", "flame", "all", "flame/tiny-commonsense"),
        ("ub-smoe/table-6-tiny", "smoe-llb", "all", "smoe-llb/tiny-commonsense"),
        ("fedalign-moe/figures-13-14-tiny", "index", "ag_news-0.1", "fedalign-moe/tiny-ag_news-index"),
        (
            "fedalign-moe/figures-13-14-tiny",
            "averaged-gates",
            "ag_news-0.1",
            "fedalign-moe/tiny-ag_news-averaged-gates",
        ),
        ("fedalign-moe/figures-13-14-tiny", "fedavg", "hellaswag-0.1", "fedavg/tiny-hellaswag"),
        ("fedalign-moe/figures-13-14", "fedavg", "switch-mmlu", "fedavg/switch-mmlu"),
        ("fedalign-moe/table-2-tiny", "fedprox", "dirichlet-0.1", "fedprox/tiny-ag_news"),
        ("fedalign-moe/table-2-tiny", "fedalign-moe", "dirichlet-0.1", "fedalign-moe/tiny-ag_news"),
    ],
)
def test_a_cell_that_ships_as_a_preset_too_is_that_preset(name: str, row: str, column: str, preset: str) -> None:
    """All that decides a result is the same, the method's defaults written out."""
    (cell,) = table_cells(name, shipped(name).load(), rows=[row], columns=[column])
    configs = [cell.config(["seed=3"]), load_config(preset, ["seed=3"])]
    settings = [build_method(config.method.name, config.method.options).settings for config in configs]
    assert settings[0] == settings[1]
    same = [config.model_copy(update={"method": configs[0].method}) for config in configs]
    assert same[0].fingerprint() == same[1].fingerprint()
