"""`fedguild compare`: several configs over several seeds, in one table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from fedguild.cli.options import JsonOption
from fedguild.cli.output import note, show, show_json
from fedguild.cli.progress import TerminalProgress
from fedguild.config import Config, load_config
from fedguild.errors import ConfigError, nearest

EXAMPLES = (
    "fedguild compare flame/tiny-tasks fedit/tiny-tasks-ranks --seeds 0,1,2",
    "fedguild compare flame/tiny-dolly fedit/tiny-dolly data.train=dolly.jsonl --output runs/dolly",
)


@dataclass(frozen=True)
class Cell:
    """One config, as given on the command line, at one seed, and the folder of its run."""

    given: str
    config: Config
    folder: Path

    def state(self) -> Literal["absent", "partial", "finished"]:
        """Returns how far the run in the folder has come.

        Raises:
            ConfigError: the folder holds a run of other settings.
        """
        from fedguild.experiment import CHECKPOINTS
        from fedguild.report.html import REPORT_FILE
        from fedguild.server import checkpoint

        written = self.folder / "config.yaml"
        if not written.is_file():
            return "absent"
        if load_config(str(written)).fingerprint() != self.config.fingerprint():
            raise ConfigError(
                f"{self.folder} holds a run of other settings than {self.config.name} with seed {self.config.seed}.",
                "Give another --output, or remove that folder.",
            )
        last = checkpoint.latest(self.folder / CHECKPOINTS)
        finished = last == self.config.federation.rounds and (self.folder / REPORT_FILE).is_file()
        return "finished" if finished else "partial"


def command(
    context: typer.Context,
    configs: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG|KEY=VALUE",
            help="Presets or YAML files, then settings on top of each of them.",
            show_default=False,
        ),
    ],
    seeds: Annotated[str, typer.Option("--seeds", help="Seeds, separated by commas.")] = "0,1,2",
    reference: Annotated[
        str | None, typer.Option("--reference", help="Config that the others are compared with; the last by default.")
    ] = None,
    output: Annotated[Path, typer.Option("--output", "-o", help="Folder of all the runs.")] = Path("runs/compare"),
    as_json: JsonOption = False,
) -> None:
    """Run several configs over several seeds and print a paper's table.

    Every config and seed is a run in OUTPUT/NAME/seed-N. Finished runs are kept, half-finished
    ones are resumed, so the same command goes on after an interruption.
    """
    cells = plan_cells(configs, _parsed_seeds(seeds), output)
    names = list(dict.fromkeys(cell.config.name for cell in cells))
    reference_name = _reference_name(reference, cells)
    context.obj.resume_with = "the same command again"

    from fedguild.report.comparison import compare
    from fedguild.report.html import write_comparison
    from fedguild.report.record import load_run

    for cell in cells:
        _complete(cell)
    folders = {name: [cell.folder for cell in cells if cell.config.name == name] for name in names}
    table = compare({name: [load_run(folder) for folder in folders[name]] for name in names}, reference_name)
    page = write_comparison(folders, output, reference=reference_name)
    if as_json:
        show_json(table.to_json())
    else:
        show(table.score_grid().to_rich(), table.cost_grid().to_rich())
    for warning in table.warnings:
        note(f"Careful: {warning}")
    note(f"Report: {page}")


def plan_cells(configs: Sequence[str], seeds: Sequence[int], output: Path) -> list[Cell]:
    """Returns a cell for every config and seed, configs in the order given, seeds within.

    Args:
        configs: Presets and files; whatever is of the form key=value is an override for each of them.
        seeds: The seeds.
        output: The folder that the cells' folders lie in.

    Raises:
        ConfigError: there is no config, one is wrong, or two have the same name.
    """
    overrides = [text for text in configs if "=" in text]
    names = [text for text in configs if "=" not in text]
    if not names:
        raise ConfigError(
            "There is no config to compare.", "Give presets or YAML files: `fedguild presets` lists some."
        )
    cells = []
    for name in names:
        for seed in seeds:
            config = load_config(name, [*overrides, f"seed={seed}"])
            cells.append(Cell(name, config, output / config.name / f"seed-{seed}"))
    folders = [cell.folder for cell in cells]
    repeated = next((cell.config.name for cell in cells if folders.count(cell.folder) > 1), None)
    if repeated is not None:
        raise ConfigError(f"Two of the configs are named '{repeated}'.", "Give each a `name` of its own.")
    return cells


def _parsed_seeds(text: str) -> tuple[int, ...]:
    try:
        seeds = tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ConfigError(f"--seeds takes whole numbers separated by commas, got '{text}'.") from error
    if len(set(seeds)) < len(seeds):
        raise ConfigError(f"--seeds names a seed twice: '{text}'.")
    return seeds


def _reference_name(reference: str | None, cells: Sequence[Cell]) -> str:
    """Returns the run name that a reference means, which may be given as on the command line."""
    names = {cell.given: cell.config.name for cell in cells} | {cell.config.name: cell.config.name for cell in cells}
    if reference is None:
        return cells[-1].config.name
    if reference not in names:
        raise ConfigError(f"The reference '{reference}' is none of the compared configs.", nearest(reference, names))
    return names[reference]


def _complete(cell: Cell) -> None:
    from fedguild import experiment

    title = f"{cell.config.name} seed {cell.config.seed}"
    state = cell.state()
    if state == "finished":
        note(f"{title}: finished already")
        return
    with TerminalProgress(title=title) as progress:
        if state == "partial":
            experiment.resume(cell.folder, progress=progress)
        else:
            experiment.run(cell.config, cell.folder, progress=progress)
