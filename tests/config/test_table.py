"""Tables: every one that ships is whole, and a cell's settings lie in the order that the table says."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.config import Table, load_config, table_cells, tables
from fedguild.config.table import TABLES_FOLDER, ShippedTable
from fedguild.errors import ConfigError
from fedguild.methods import build_method

NAMES = [table.name for table in tables()]


def shipped(name: str) -> ShippedTable:
    return next(table for table in tables() if table.name == name)


def test_every_file_of_the_folder_is_a_table_with_a_description() -> None:
    assert {TABLES_FOLDER / f"{name}.yaml" for name in NAMES} == set(TABLES_FOLDER.rglob("*.y*ml"))
    assert all(table.description for table in tables())


@pytest.mark.parametrize("name", NAMES)
def test_every_cell_of_a_shipped_table_is_a_config_of_a_known_method(name: str) -> None:
    table = shipped(name).load()
    cells = table_cells(name, table)
    assert len(cells) == len(table.rows) * len(table.columns)
    for cell in cells:
        config = cell.config()
        assert config.name == cell.row
        build_method(config.method.name, config.method.options)


@pytest.mark.parametrize("name", NAMES)
def test_the_cells_of_a_column_differ_in_nothing_but_the_method(name: str) -> None:
    """Data, clients and evaluation are the same for all rows, but for what a row is named for."""
    table = shipped(name).load()
    cells = table_cells(name, table)
    for column in table.columns:
        configs = [cell.config() for cell in cells if cell.column == column]
        for section in ("data", "evaluation"):
            assert len({getattr(config, section).model_dump_json() for config in configs}) == 1, (column, section)
        assert len({config.federation.clients for config in configs}) == 1
        rounds = {config.federation.rounds for config in configs}
        assert max(rounds) - min(rounds) <= 1, "FDLoRA's first stage is a round of its own"
        assert len({config.training.learning_rate for config in configs}) == 1


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
    with pytest.raises(ConfigError, match="none of the rows a"):
        ShippedTable("mine", "", path).load()


def test_a_bad_setting_of_a_row_is_named_with_its_place() -> None:
    table = small_table()
    broken = table.model_copy(update={"settings": {"federation": {"round": 3}}})
    with pytest.raises(ConfigError, match=r"mine: unknown key 'federation.round'"):
        table_cells("mine", broken)[0].config()
