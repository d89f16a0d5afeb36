"""The grid of runs under `compare`, `sweep` and the recorded tables: every row at every seed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from fedguild.config import Config, TableCell, load_saved
from fedguild.config.explaining import Layer
from fedguild.config.loading import Given, Override
from fedguild.config.table import ONLY_COLUMN
from fedguild.config.trust import trust
from fedguild.core.errors import ConfigError
from fedguild.core.files import write_json, write_text
from fedguild.core.layout import CHECKPOINTS, CONFIG, METHOD, STOPPED
from fedguild.core.locking import run_lock
from fedguild.measuring.log.folder import read_mapping
from fedguild.measuring.log.index import PLAN_FILE, REPORT_FILE
from fedguild.runs.api.inputs import Inputs
from fedguild.runs.results import has_begun
from fedguild.server import checkpoint

SEEDS = (0, 1, 2)
_OWN_SETTINGS = {"seed": "seeds", "output": "output"}
"""Setting of a run -> the option that sets it for the runs of a grid."""


@dataclass(frozen=True)
class Row:
    """A config that is run at every seed.

    Attributes:
        given: The config as it was given.
        settings: Overrides of this row.
        layers: Settings that override the config's and are overridden by all overrides.
        column: The column of a table; empty if there is only one.
        values: Swept key -> value.
    """

    given: Given
    settings: tuple[str, ...] = ()
    layers: tuple[Layer, ...] = ()
    column: str = ""
    values: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Cell:
    """A row at one seed, and the folder of its run."""

    config: Config
    folder: Path
    row: Row

    @property
    def config_to_run(self) -> Config:
        """The config as it runs: trackers see the runs of a grid as a group, each with its own name."""
        from fedguild.runs.tracking.sending import for_comparison

        return for_comparison(self.config, self.folder.absolute().parents[1].name)

    @property
    def title(self) -> str:
        return f"{self.config.name} seed {self.config.seed}"

    def state(self) -> Literal["absent", "partial", "finished"]:
        """Returns the progress of the run in the folder.

        Raises:
            ConfigError: the folder holds a run with other settings.
        """
        from fedguild.report.differing import flat

        if not has_begun(self.folder):
            return "absent"
        saved = load_saved(self.folder / CONFIG)
        if saved.fingerprint() != self.config.fingerprint():
            settings = (set(flat(config.model_dump(mode="json"))) for config in (saved, self.config))
            others = {key for key, _ in set.symmetric_difference(*settings)} - {*self.config.changes_since(saved)}
            raise ConfigError(
                f"{self.folder} holds a run with settings other than {self.config.name}, seed {self.config.seed}: "
                f"{', '.join(sorted(others))}.",
                "Give another --output, or remove that folder.",
            )
        last = checkpoint.latest(self.folder / CHECKPOINTS)
        ended = last == self.config.federation.rounds or (self.folder / STOPPED).is_file()
        return "finished" if ended and (self.folder / REPORT_FILE).is_file() else "partial"

    def rewrite_config(self) -> list[str]:
        """Writes this config into the folder of a run that has begun; returns the settings that differed.

        Raises:
            CheckpointError: another process is working on the run.
        """
        path, config = self.folder / CONFIG, self.config_to_run
        changed = config.changes_since(load_saved(path))
        if changed:
            with run_lock(self.folder):
                trust(path, config.code)
                write_text(path, config.resolved_yaml(read_mapping(self.folder / METHOD).get("options", {})))
        return changed


@dataclass(frozen=True)
class RunGrid:
    """Rows × seeds.

    Attributes:
        folder: Parent folder of the runs: `COLUMN/NAME/seed-N`, without columns `NAME/seed-N`.
        cells: The runs, row by row.
        inputs: What was given in Python for all of them.
        reference: Of a comparison, the row that the others are compared with.
        table: Of a comparison, the name of its built-in table; empty if there is none.
    """

    folder: Path
    cells: tuple[Cell, ...]
    inputs: Inputs
    reference: str = ""
    table: str = ""

    @property
    def columns(self) -> list[str]:
        return list(dict.fromkeys(cell.row.column for cell in self.cells))

    def rows(self, column: str = "") -> dict[str, list[Cell]]:
        rows: dict[str, list[Cell]] = {}
        for cell in self.cells:
            if cell.row.column == column:
                rows.setdefault(cell.config.name, []).append(cell)
        return rows

    def write_plan(self) -> None:
        """Writes the planned runs, for a page that shows those that have not begun, and for `load_comparison`."""
        cells = [
            {
                "row": cell.config.name,
                "column": cell.row.column,
                "seed": cell.config.seed,
                "folder": cell.folder.relative_to(self.folder).as_posix(),
            }
            for cell in self.cells
        ]
        write_json(self.folder / PLAN_FILE, {"cells": cells, "reference": self.reference, "table": self.table})


def plan_grid(
    rows: Sequence[Row],
    seeds: Sequence[int],
    folder: Path,
    overrides: Sequence[Override] = (),
    inputs: Inputs | None = None,
    of: Literal["comparison", "sweep"] = "comparison",
) -> RunGrid:
    """Returns the grid of some rows and seeds; every config is checked before any is run.

    Args:
        rows: The rows, those of a column together.
        overrides: Settings of all rows.
        of: What the runs belong to, for messages.

    Raises:
        FedGuildError: a config or a method's options are wrong or do not fit, two rows have the same name, a seed or a
            folder is among the settings, or the seeds are not a sequence of different numbers.
    """
    _refuse_own_settings(overrides, of)
    inputs = inputs or Inputs()
    cells = []
    for row in rows:
        for seed in _checked(seeds):
            settings = [*overrides, *row.settings, f"seed={seed}"]
            config = require_fit(inputs.config(row.given, settings, between=row.layers))
            cells.append(Cell(config, folder / row.column / config.name / f"seed-{seed}", row))
    folders = [cell.folder for cell in cells]
    repeated = next((cell.config.name for cell in cells if folders.count(cell.folder) > 1), None)
    if repeated is not None:
        raise ConfigError(f"Two of the configs are named '{repeated}'.", "Give each its own `name`.")
    return RunGrid(folder, tuple(cells), inputs)


def table_rows(cells: Sequence[TableCell]) -> list[Row]:
    columns = list(dict.fromkeys(cell.column for cell in cells))
    named = columns != [ONLY_COLUMN]
    ordered = sorted(cells, key=lambda cell: columns.index(cell.column))
    return [Row(cell.preset, layers=cell.layers, column=cell.column if named else "") for cell in ordered]


def require_fit(config: Config) -> Config:
    """Checks that a config's method takes its options and fits; returns the config.

    Raises:
        ModelError, ConfigError: the method or one of its options is unknown, out of range, or does not fit.
    """
    from fedguild.runs.setup import check_config
    from fedguild.runs.tracking import check_trackers

    check_config(config)
    check_trackers(config.tracking.trackers)
    return config


def _refuse_own_settings(overrides: Sequence[Override], of: str) -> None:
    """Raises ConfigError for settings that differ between the runs of a grid; as overrides they would do nothing."""
    given = [each.items() if isinstance(each, Mapping) else [str(each).partition("=")[::2]] for each in overrides]
    for key, value in ((str(key).strip(), value) for pairs in given for key, value in pairs):
        if key in _OWN_SETTINGS:
            option = _OWN_SETTINGS[key]
            raise ConfigError(
                f"{key}={value} is a setting of one run, and a {of} has several.",
                f"Give --{option} {value}, or in Python `{option}`.",
            )


def _checked(seeds: Sequence[int]) -> tuple[int, ...]:
    if not isinstance(seeds, Iterable) or not (seeds := tuple(seeds)):
        raise ConfigError(f"seeds takes a sequence of whole numbers, got {seeds!r}.", "For example seeds=[0, 1, 2].")
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"A seed is given twice: {', '.join(map(str, seeds))}.")
    return seeds
