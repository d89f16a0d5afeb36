"""Tables: every one that ships is whole, and a cell's settings lie in the order that the table says."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import yaml

from fedguild.client.budget import Budget
from fedguild.config import Config, Table, load_config, table_cells, tables
from fedguild.config.table import TABLES_FOLDER, ShippedTable, TableCell, require_claimed_scores
from fedguild.core.errors import ConfigError
from fedguild.methods import build_method
from fedguild.methods.fedalign_moe.regulariser import adaptive_weights
from fedguild.runs.setup import check_config
from tests.backbones import tiny_backbone

NAMES = [table.name for table in tables()]
PLAN = yaml.safe_load((Path(__file__).parents[2] / "docs/methods/records/plan.yaml").read_text("utf-8"))
"""Table -> the seeds and settings with which it is recorded."""


@cache
def shipped(name: str) -> ShippedTable:
    return next(table for table in tables() if table.name == name)


@cache
def configs_of(name: str) -> list[tuple[TableCell, Config]]:
    """Returns a table's cells, each with its config."""
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
        check_config(config)


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_a_shipped_table_fits_its_model(name: str) -> None:
    for config in {checked_settings(config): config for _, config in configs_of(name)}.values():
        check_config(config)


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_column_differ_in_nothing_but_the_method(name: str) -> None:
    """Data, clients and evaluation are the same for all rows, but for what a row is named for.

    Only rows that are scored so have every client answer all the questions, or its own with a model of its own.
    """
    table = shipped(name).load()
    for column in table.columns:
        configs = [config for cell, config in configs_of(name) if cell.column == column]
        for section, but in (("data", None), ("evaluation", {"pooled", "clients"})):
            sections = {getattr(config, section).model_dump_json(exclude=but) for config in configs}
            assert len(sections) == 1, (column, section)
        for key in ("clients", "client_fraction", "budgets"):
            assert len({repr(getattr(config.federation, key)) for config in configs}) == 1, (column, key)
        rounds = {config.federation.rounds for config in configs}
        assert max(rounds) - min(rounds) <= 1, "FDLoRA's first stage is a round of its own"
        trainings = [config.training.model_dump() for config in configs]
        assert all(training == trainings[0] for training in trainings), column


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


def test_a_rows_own_score_lies_above_the_tables() -> None:
    table = small_table().model_copy(update={"score": "mtal"})
    assert table.scores == {"flame": "mtal", "mine": "mtal"}
    rows = {**table.rows, "mine": table.rows["mine"].model_copy(update={"score": "pooled"})}
    assert table.model_copy(update={"rows": rows}).scores == {"flame": "mtal", "mine": "pooled"}


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

    A row named `attention` is there to leave the experts out.
    """
    for cell in table_cells(name, shipped(name).load()):
        config = cell.config()
        settings = build_method(config.method.name, config.method.options).settings
        default = config.method.name == "smoe-llb"
        has_router = cell.row.endswith("-router") and not cell.row.endswith("-no-router")
        routers = ("router",) if has_router or (default and cell.row == "smoe-llb") else ()
        dense_or_experts = "mlp" if config.model.path == "allenai/OLMo-1B-hf" else "experts"
        adapted = {"attention"} if cell.row == "attention" else {"attention", dense_or_experts, *routers}
        assert set(settings.targets) == adapted, (cell.row, cell.column)
        assert getattr(settings, "alpha", 20) == 20, (cell.row, cell.column)


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


@pytest.mark.parametrize("name", ["flame/decide-english", "flame/figure-3", "flame/figure-3-tiny"])
def test_flames_temperature_is_compared_without_clipping(name: str) -> None:
    """The paper clips nowhere; t x the two frequencies, as trained otherwise in the presets."""
    configs = configs_of(name)
    assert {config.training.max_grad_norm for _, config in configs} == {None}
    compared = {
        (config.method.options["temperature"], config.method.options.get("frequency_by_active", False))
        for _, config in configs
    }
    assert compared == {(0, False), *((t, by_k) for t in (1, 2, 4, 8) for by_k in (False, True))}


@pytest.mark.parametrize(
    "name",
    [
        "fedalign-moe/table-1-english",
        "fedalign-moe/table-1-tiny",
        "fedalign-moe/table-2-english",
        "fedalign-moe/table-2-tiny",
        "guild/table-fedalign-english",
        "guild/table-fedamole-english",
    ],
)
def test_pfl_moe_personalises_once_with_twenty_epochs_of_its_gate(name: str) -> None:
    """As pfl-moe/tiny-ag_news, which personalises once too; 4 epochs are for personalising in every round."""
    alike = load_config("pfl-moe/tiny-ag_news")
    for config in (config for cell, config in configs_of(name) if cell.row == "pfl-moe"):
        assert config.method.options["personal_from"] == config.federation.rounds
        for option in ("gate_epochs", "gate_learning_rate"):
            assert config.method.options[option] == alike.method.options[option]
        assert config.method.options["gate_epochs"] == 20


WITHOUT_DMR = {"modulation": "none", "phi": "fixed", "penalty": "none", "utilisation_update": False}
WITH_DMR = {"modulation": "candidate", "candidates": 16}


def ub_smoe_factors() -> dict[str, dict[str, object]]:
    """{the model's gating, Eq. 2's} x {neither, DMR, PG, both}, and PG at an expert's own norm."""
    parts = {"": (False, False), "-dmr": (True, False), "-pg": (False, True), "-both": (True, True)}
    rows: dict[str, dict[str, object]] = {}
    for name, gating in (("native", "native"), ("eq2", "renormalised")):
        for part, (dmr, pg) in parts.items():
            injected = {"pseudo_gradient": "batch" if pg else "none"}
            rows[f"{name}{part}"] = {"gating": gating, **(WITH_DMR if dmr else WITHOUT_DMR), **injected}
    return {**rows, "eq2-pg-own": {**rows["eq2-pg"], "pseudo_gradient_norm": "expert"}}


def flame_factors() -> dict[str, dict[str, object]]:
    """t x the two frequencies, and what the rescaler adds at t = 2."""
    rows: dict[str, dict[str, object]] = {f"t-{t}": {"temperature": t} for t in (0, 1, 2, 4, 8)}
    rows |= {f"t-{t}-by-k": {"temperature": t, "frequency_by_active": True} for t in (1, 2, 4, 8)}
    return rows | {
        "t-2-no-rescaler": {"temperature": 2, "rescaler": "none"},
        "t-2-static": {"temperature": 2, "rescaler": "static"},
    }


@pytest.mark.parametrize(
    ("name", "rows", "columns", "batch"),
    [
        ("ub-smoe/decide-english", ub_smoe_factors(), {f"k-{k}": k for k in (1, 2, 4, 8)}, 2),
        ("flame/decide-english", flame_factors(), {"dirichlet-5": 5, "dirichlet-0.5": 0.5}, 8),
    ],
)
def test_what_decides_has_all_of_its_factors(
    name: str, rows: dict[str, dict[str, object]], columns: dict[str, float], batch: int
) -> None:
    """Every row in every column, no other difference between methods, and five seeds in the plan of records."""
    configs = configs_of(name)
    assert {(cell.row, cell.column) for cell, _ in configs} == {(row, column) for row in rows for column in columns}
    reference = shipped(name).load().reference
    common = next(config.method.options for cell, config in configs if cell.row == reference)
    common = {option: value for option, value in common.items() if option not in rows[reference]}
    for cell, config in configs:
        assert config.method.options == {**common, **rows[cell.row]}, cell.row
        factor = columns[cell.column]
        if name.startswith("flame/"):
            assert config.data.partition.alpha == factor
        else:
            assert {budget.active_experts for budget in config.federation.budgets} == {factor}
        assert config.training.batch_size == batch
    assert PLAN[name]["seeds"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("name", "of_paper", "but"),
    [
        ("guild/table-flame-english", "flame/table-2-english", set()),
        ("guild/table-ub-smoe-english", "ub-smoe/table-4-english", {"ub-smoe-candidate"}),
        ("guild/table-fedamole-english", "fedamole/table-1-english", set()),
        ("guild/table-fedalign-english", "fedalign-moe/table-1-english", set()),
    ],
)
def test_guild_is_compared_with_all_rows_of_a_papers_table(name: str, of_paper: str, but: set[str]) -> None:
    """In every column, with the same method, data, clients and training."""
    rows = set(shipped(of_paper).load().rows)
    assert but < rows
    here = {(cell.row, cell.column): config for cell, config in configs_of(name)}
    for cell, config in configs_of(of_paper):
        if cell.row not in but:
            same = here[cell.row, cell.column]
            for section in ("method", "model", "data", "federation", "training"):
                assert getattr(same, section) == getattr(config, section), (cell.row, cell.column, section)


def test_fedamoles_assignment_is_decided_at_three_rates_and_two_lengths_scored_at_the_end() -> None:
    configs = configs_of("fedamole/decide-english")
    assert {cell.row: config.method.options.get("assignment") for cell, config in configs} == {
        "relevance": None,
        "once": "once",
        "fixed": "fixed",
        "random": "random",
    }
    cells = {(config.training.learning_rate, config.federation.rounds) for _, config in configs}
    assert cells == {(rate, rounds) for rate in (5e-4, 2e-3, 8e-3) for rounds in (10, 40)}
    assert {config.evaluation.every for _, config in configs} == {40}


def test_fedalign_moes_parts_are_decided_with_each_strength_by_region_and_by_index() -> None:
    compared = {
        (
            config.method.options.get("regularisation", 0.1),
            config.method.options.get("adaptive_weights", True),
            config.method.options.get("aggregation", "region"),
        )
        for cell, config in configs_of("fedalign-moe/decide-english")
        if "sharp" not in cell.row
    }
    weights = ("region", "index")
    assert compared == {
        *((0, True, weight) for weight in weights),
        *((strength, adaptive, weight) for strength in (0.1, 1) for adaptive in (True, False) for weight in weights),
    }
    equal = [
        config for _, config in configs_of("fedalign-moe/decide-english") if "equal_weight" in config.method.options
    ]
    assert {config.method.options["equal_weight"] for config in equal} == {"mean"}
    assert len(equal) == 5


def test_fedalign_moes_strength_is_decided_where_it_differs_between_experts_too() -> None:
    """At the overlaps of 64 experts, 1e-4 to 7e-4 for most, Eq. 9's alpha is equal for all but in the rows `sharp`."""
    sharp = {
        cell.row: build_method(config.method.name, config.method.options).settings
        for cell, config in configs_of("fedalign-moe/decide-english")
        if cell.row in ("lambda-0.1-region", "lambda-0.1-sharp-region", "lambda-0.1-sharp-constant-region")
    }
    plain, adaptive, constant = sharp.values()
    assert constant == adaptive.model_copy(update={"adaptive_weights": False, "equal_weight": "mean"})
    overlaps = torch.tensor([1e-4, 7e-4])
    low, high = adaptive_weights(overlaps, plain.overlap_threshold, plain.overlap_temperature).tolist()
    assert high - low < 0.001
    low, high = adaptive_weights(overlaps, adaptive.overlap_threshold, adaptive.overlap_temperature).tolist()
    assert high - low > 0.5


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


def test_the_causes_of_ub_smoe_are_tested_at_its_deciding_tables_settings() -> None:
    """At k = 1, with other rounds; the row without LoRA on the experts is A3SMoE's, which averages the rest alike."""
    decides = {cell.row: config for cell, config in configs_of("ub-smoe/decide-english") if cell.column == "k-1"}
    found = set()
    for cell, config in configs_of("ub-smoe/causes-english"):
        alike = decides["native" if cell.row == "attention" else cell.row]
        for section in ("model", "data", "training"):
            assert getattr(config, section) == getattr(alike, section), (cell.row, section)
        assert config.federation.budgets[0].active_experts == alike.federation.budgets[0].active_experts == 1
        if cell.row == "attention":
            assert config.method.name == "a3smoe"
            options = {**alike.method.options, "targets": ["attention"]}
            assert {name: options[name] for name in config.method.options} == config.method.options
        else:
            assert config.method == alike.method
        found.add((cell.row, config.federation.rounds))
    assert found == {(row, rounds) for row in ("native", "native-dmr", "attention") for rounds in (4, 8, 16)}
