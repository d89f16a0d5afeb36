"""Settings of shipped tables and presets that the papers, or the authors' released scripts, fix."""

from __future__ import annotations

from typing import Any

import pytest

from fedguild.config import Config, load_config, table_cells, tables
from fedguild.methods import build_method


def configs(name: str) -> dict[tuple[str, str], Config]:
    """Row and column of a table -> the cell's config."""
    content = next(table for table in tables() if table.name == name).load()
    return {(cell.row, cell.column): cell.config() for cell in table_cells(name, content)}


def test_fedamoles_figure_7_has_four_clients_an_expert_with_twenty_to_fifty_clients() -> None:
    """k^c of the released scripts; on SNLI and on Natural Instructions with a task for each client."""
    found = {
        (config.data.dataset, config.federation.clients): config.method.options["clients_per_expert"]
        for (row, _), config in configs("fedamole/figure-7").items()
        if row == "fedamole"
    }
    assert found == {(corpus, count): 4 for corpus in ("snli", "natural_instructions") for count in (20, 30, 40, 50)}
    for config in configs("fedamole/figure-7").values():
        if config.data.dataset == "natural_instructions":
            assert config.data.options["max_tasks"] == config.federation.clients


def test_fedamoles_figure_9_has_the_released_rates_and_sizes() -> None:
    """a: k^c by the rate, at E = 15 and b = 8; b: E by b."""
    first = {
        (config.method.options["clients_per_expert"], config.training.learning_rate)
        for config in configs("fedamole/figure-9a").values()
    }
    assert first == {(count, rate) for count in (2, 3, 4, 5) for rate in (5e-4, 1e-4, 5e-5, 1e-5)}
    sizes = [config.method.options for config in configs("fedamole/figure-9a").values()]
    assert {(options["experts"], options["experts_per_client"]) for options in sizes} == {(15, 8)}
    second = {
        (config.method.options["experts"], config.method.options["experts_per_client"])
        for config in configs("fedamole/figure-9b").values()
    }
    assert second == {(experts, most) for experts in (15, 20, 25, 30) for most in (8, 10, 12, 14)}


@pytest.mark.parametrize("name", ["flame/figure-3", "flame/figure-3-tiny", "flame/figure-4"])
def test_flames_figures_3_and_4_have_their_ten_settings_unclipped_and_with_perplexity(name: str) -> None:
    """Five temperatures with the frequency as published and by k_i; at t = 0 the two are one row."""
    cells = configs(name)
    ten = {
        (column, config.method.options["temperature"], by_k)
        for (_, column), config in cells.items()
        for by_k in (
            (False, True)
            if config.method.options["temperature"] == 0
            else (config.method.options.get("frequency_by_active", False),)
        )
    }
    columns = {column for _, column in cells}
    assert ten == {(column, t, by_k) for column in columns for t in (0, 1, 2, 4, 8) for by_k in (False, True)}
    assert {config.training.max_grad_norm for config in cells.values()} == {None}
    assert all(config.evaluation.perplexity for config in cells.values())


@pytest.mark.parametrize(
    ("of_four", "of_forty"), [("flame/figure-3", "flame/figure-4"), ("flame/table-5", "flame/table-7")]
)
def test_flames_additional_results_differ_from_the_main_ones_in_their_clients_alone(of_four, of_forty):
    """4 and 40 clients, on both data sets at Dirichlet 5 and 0.5 (the appendix, additional results)."""
    small, large = configs(of_four), configs(of_forty)
    assert small.keys() == large.keys()
    assert {column for _, column in small} == {"alpagasus-5", "alpagasus-0.5", "dolly-5", "dolly-0.5"}
    assert {config.federation.clients for config in small.values()} == {4}
    assert {config.federation.clients for config in large.values()} == {40}
    for place, config in small.items():
        alone = config.model_copy(update={"federation": config.federation.model_copy(update={"clients": 40})})
        assert alone.fingerprint() == large[place].fingerprint(), place


def test_pfl_moes_gate_trains_for_the_papers_200_epochs_on_real_models() -> None:
    """At 1e-3, once, in the last round; the small models' presets say why theirs is shorter."""
    corpora = ("ag_news", "hellaswag", "mmlu", "piqa")
    real = [f"pfl-moe/{model}-{corpus}" for model in ("switch", "deepseek-v2-lite") for corpus in corpora]
    for name in real:
        config = load_config(name)
        assert config.method.options["gate_epochs"] == 200
        assert config.method.options.get("gate_learning_rate", 1e-3) == 1e-3
        assert config.method.options["personal_from"] == config.federation.rounds


def test_a_table_that_compares_trained_experts_with_lora_has_both_with_lora_too() -> None:
    """On Switch three methods train the experts' weights, the other two LoRA on them: unlike without rows -lora."""
    compared = []
    for shipped in tables():
        kinds = {
            row: kind_of_experts(config)
            for (row, column), config in configs(shipped.name).items()
            if "switch" in config.model.path.lower()
        }
        if set(kinds.values()) < {"full", "lora"}:
            continue
        full = {row for row, kind in kinds.items() if kind == "full"}
        assert {f"{row}-lora" for row in full} <= kinds.keys(), shipped.name
        assert {kinds[f"{row}-lora"] for row in full} == {"lora"}, shipped.name
        compared.append(shipped.name)
    assert compared == ["fedalign-moe/figure-10", "fedalign-moe/table-1", "fedalign-moe/table-2"]


def kind_of_experts(config: Config) -> str:
    """`full` where a method trains the experts' own weights, as those with an option for it do by default on Switch."""
    return "full" if options_of(config).get("experts") == "full" else "lora"


@pytest.mark.parametrize(
    "name",
    [
        "fedalign-moe/table-1",
        "fedalign-moe/table-2",
        "fedalign-moe/figure-10",
        "fedamole/table-1",
        "fedamole/table-5",
        "fedamole/figure-7",
    ],
)
def test_methods_of_half_a_lora_stand_beside_those_of_a_whole_one_at_its_rank(name: str) -> None:
    """FedSA-LoRA and RoLoRA have the targets and the rank that FedIT or PFL-MoE have in the same column."""
    cells = configs(name)
    for _, column in cells:
        whole = options_of(cells.get(("fedit", column)) or cells["pfl-moe", column])
        for half in ("fedsa-lora", "rolora"):
            own = options_of(cells[half, column])
            assert (own["rank"], own["alpha"]) == (whole["rank"], whole["alpha"]), (half, column)


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        ("ub-smoe/table-4-homogeneous", {"rolora"}),
        ("ub-smoe/table-4", {"smoe-llb-no-router", "a3smoe-router", "ub-smoe-router"}),
        ("ub-smoe/table-20", {"half-clamped", "skewed-clamped", "half-scaled", "two-scaled", "skewed-scaled"}),
    ],
)
def test_a_table_has_the_rows_that_its_paper_leaves_out(name: str, rows: set[str]) -> None:
    """In every column: halves of a LoRA, routers trained and not, and phi's range clamped and scaled."""
    cells = configs(name)
    assert {(row, column) for row in rows for _, column in cells} <= cells.keys()


def options_of(config: Config) -> dict[str, Any]:
    """The options of a config's method, defaults included."""
    return build_method(config.method.name, config.method.options).settings.model_dump()
