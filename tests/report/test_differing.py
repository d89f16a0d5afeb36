"""Settings in which the configs of a comparison differ, besides the method."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from fedguild.config import load_config
from fedguild.measuring.log.folder import Run
from fedguild.report.differing import differing_grid, differing_settings


def run_of(preset: str, *overrides: str, **options: object) -> Run:
    config = load_config(preset, [*overrides, f"seed={len(overrides)}"])
    plain = config.model_dump(mode="json")
    return Run(Path(), plain, {}, None, (), (), (), (), method_options={**config.method.options, **options})


def test_settings_and_shared_options_are_listed_and_what_names_a_run_is_not() -> None:
    """Budgets by name, defaults as the runs used them; an option of one method alone is its own."""
    flame = run_of("flame/tiny-tasks", rank=8, scale="own", temperature=2)
    fedit = run_of("fedit/tiny-tasks-ranks", "training.learning_rate=0.5", rank=20, scale="common", weights="size")
    budgets = [{**budget, "rank": 3} for budget in fedit.config["federation"]["budgets"]]
    fedit = replace(fedit, config={**fedit.config, "federation": {**fedit.config["federation"], "budgets": budgets}})
    found = differing_settings({"a": [flame], "b": [fedit]})
    ranks = {f"federation.budgets.b{number}.rank" for number in range(1, 5)}
    assert set(found) == {"training.learning_rate", "method.rank", "method.scale", *ranks}
    assert found["method.rank"] == {"a": "8", "b": "20"}
    grid = differing_grid({"a": [flame], "b": [fedit]})
    assert grid is not None
    assert [cell.text for cell in next(row for row in grid.rows if row[0].text == "method.scale")[1:]] == [
        "own",
        "common",
    ]


def test_a_setting_that_one_row_lacks_differs_unless_it_is_a_methods_own() -> None:
    plain = run_of("flame/tiny-tasks", temperature=2)
    other = run_of("fedit/tiny-tasks")
    other = replace(other, config={**other.config, "data": {**other.config["data"], "options": {"largest": 20}}})
    assert differing_settings({"a": [plain], "b": [other]}) == {"data.options.largest": {"b": "20"}}
    grid = differing_grid({"a": [plain], "b": [other]})
    assert grid is not None
    assert [cell.text for cell in grid.rows[0]] == ["data.options.largest", "–", "20"]


def test_alike_configs_differ_in_nothing() -> None:
    assert differing_grid({"a": [run_of("flame/tiny-tasks")], "b": [run_of("fedit/tiny-tasks")]}) is None
