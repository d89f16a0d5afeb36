"""Sweeps: one config with every combination of some settings, over several seeds."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.config.explaining import Layer
from fedguild.config.renamed import answers_old_arguments
from fedguild.core.errors import ConfigError, DivergedError
from fedguild.runs.api.inputs import gather
from fedguild.runs.api.launch import Launch, ProgressOf, Tell, say_nothing, silent
from fedguild.runs.api.run_grid import SEEDS, Row, RunGrid, plan_grid
from fedguild.runs.results import Sweep, divergence

if TYPE_CHECKING:
    from fedguild.config import Config
    from fedguild.config.loading import Given
    from fedguild.measuring.scores.metrics import Metric
    from fedguild.runs.api.inputs import Dataset, Partition
    from fedguild.runs.callbacks import Callback

_CLOSING = {"[": "]", "{": "}", "(": ")"}
_LONGEST_NAME = 80


@answers_old_arguments
def sweep(
    config: Given,
    *settings: str,
    seeds: Sequence[int] = SEEDS,
    output: str | Path | None = None,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback] = (),
    jobs: int = 1,
    launcher: Literal["local", "ray"] = "local",
    address: str | None = None,
    cores: int = 1,
    progress: ProgressOf = silent,
    tell: Tell = say_nothing,
) -> Sweep:
    """Runs a config with every combination of some settings over several seeds, and chooses the best.

    Every combination and seed is a run in `output/SETTING/seed-N`. Finished runs are kept, unfinished ones are resumed:
    the same call continues after an interruption, and one with more values or seeds adds to the existing runs. Unless a
    setting says otherwise, the runs are scored on validation examples (`evaluation.split=validation`), so that the
    choice does not use test examples. A run that diverges is kept; its setting cannot be the best.

    Args:
        config: As in `run`.
        settings: `key.sub=value` for every run, or `key.sub=value,value,…` to sweep. Commas inside brackets, braces and
            quotes do not separate: `method.targets=[attention],[attention,experts]` has two values,
            `data.train='a,b.jsonl'` has one.
        seeds: The seeds of every combination.
        output: Folder for all the runs; by default `runs/sweep-NAME`, the name being the config's.
        dataset: As in `run`.
        partition: As in `run`.
        metrics: As in `run`; with one job and the launcher `local` only.
        callbacks: As in `run`; with one job and the launcher `local` only.
        jobs: Runs at the same time, each in a process with its share of the CPU cores.
        launcher: `local`: on this machine; `ray`: each run as a task of a Ray cluster.
        address: The Ray cluster; None to start Ray on this machine.
        cores: With `ray`, CPU cores of each run.
        progress: Returns the receiver of a run's progress reports by the run's title; with one job only.
        tell: Receives a line for each run that is finished.

    Raises:
        FedGuildError: nothing is swept, a setting or a value of it is wrong, a run failed, in which case the others can
            be continued, or all of them diverged.

    Examples:
        >>> import fedguild
        >>> small = ["federation.clients=2", "federation.rounds=1", "training.steps=1", "evaluation.max_examples=2"]
        >>> found = fedguild.sweep("fedit/tiny-tasks", *small, "method.rank=1,2", seeds=[0], output="runs/ranks")
        >>> found.frame()["method.rank"].tolist(), found.table.split
        (['1', '2'], 'validation')
    """
    given = gather(dataset, partition, metrics, callbacks)
    launch = Launch(jobs, launcher, address, cores, progress, tell, may_diverge=True)
    fixed, swept = divide(settings)
    base = given.config(config, [*fixed, *(f"{key}={values[0]}" for key, values in swept.items())])
    asked = any(text.partition("=")[0].strip() in ("evaluation.split", "evaluation") for text in fixed)
    validates = base.data.split.validation > 0 and not asked
    layers = (Layer("sweep", {"evaluation": {"split": "validation"}}),) if validates else ()
    rows = [
        Row(config, (*(f"{key}={value}" for key, value in values.items()), f"name={name}"), layers, values=values)
        for name, values in setting_names(swept).items()
    ]
    folder = Path(output) if output else default_folder(base)
    grid = plan_grid(rows, seeds, folder, fixed, given, of="sweep")
    launch.complete(grid)
    return _tabulated(grid, list(swept))


def default_folder(config: Config) -> Path:
    """Returns the default folder of a sweep's runs, `runs/sweep-NAME`; `config` has the settings for every run."""
    return Path("runs") / f"sweep-{config.name}"


def divide(settings: Iterable[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Returns the overrides for every run, and key -> values of those to sweep.

    Raises:
        ConfigError: nothing is to be swept, a key is swept twice, or a value is empty or given twice.
    """
    fixed: list[str] = []
    swept: dict[str, list[str]] = {}
    for text in settings:
        if not isinstance(text, str):
            raise ConfigError(
                f"{text!r} is not a setting.",
                "In Python every setting is an argument of its own: sweep(config, 'method.rank=4,8').",
            )
        key, equals, values = text.partition("=")
        parts = split_values(values) if equals else [text]
        if len(parts) < 2:
            fixed.append(text)
            continue
        key = key.strip()
        if key == "seed":
            raise ConfigError("The seeds of a sweep are not a setting to sweep.", f"Give --seeds {values}.")
        if key in ("output", "name"):
            raise ConfigError(f"{key} is not a setting to sweep: every run of a sweep has its own.")
        if key in swept:
            raise ConfigError(f"{key} is swept twice.", f"Give all its values at once: {key}=A,B,C.")
        if not all(parts) or len(set(parts)) < len(parts):
            raise ConfigError(
                f"'{text}' has an empty value, or one twice.",
                "Values are separated by commas; brackets, braces and quotes keep what is inside of them together.",
            )
        swept[key] = parts
    for key in (text.partition("=")[0].strip() for text in fixed):
        if key in swept:
            raise ConfigError(
                f"{key} is both swept and set to one value.", f"Give all its values at once: {key}=A,B,C."
            )
    if not swept:
        raise ConfigError(
            "There is nothing to sweep.", "Give a setting several values, for example training.learning_rate=1e-4,3e-4."
        )
    return fixed, swept


def split_values(text: str) -> list[str]:
    """Splits a swept setting at commas outside of brackets, braces and quotes.

    Raises:
        ConfigError: a bracket or a quote is not closed.
    """
    parts, start, open_, quote = [], 0, [], ""
    for place, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"" and not text[start:place].strip():
            quote = character  # a quote inside of a word is an apostrophe
        elif character in _CLOSING:
            open_.append(_CLOSING[character])
        elif open_ and character == open_[-1]:
            open_.pop()
        elif character in "'\"" and open_:
            quote = character
        elif character == "," and not open_:
            parts.append(text[start:place].strip())
            start = place + 1
    if quote or open_:
        raise ConfigError(f"'{text}' lacks a closing {quote or open_[-1]}.")
    return [*parts, text[start:].strip()]


def setting_names(swept: Mapping[str, Sequence[str]]) -> dict[str, dict[str, str]]:
    """Returns a name for each combination, and its values; the last key changes fastest.

    A name has the keys' last words and the values, for example `rank-4_learning_rate-1e-4`, or a checksum of the values
    if that is too long or not distinct.
    """
    leaves = [key.rsplit(".", 1)[-1] for key in swept]
    words = leaves if len(set(leaves)) == len(leaves) else [key.replace(".", "-") for key in swept]
    combinations = [dict(zip(swept, values, strict=True)) for values in itertools.product(*swept.values())]
    plain = [
        "_".join(f"{word}-{_safe(one[key])}" for word, key in zip(words, swept, strict=True)) for one in combinations
    ]
    named = {}
    for name, one in zip(plain, combinations, strict=True):
        if len(name) > _LONGEST_NAME or plain.count(name) > 1 or any(_safe(v) != v for v in one.values()):
            checksum = hashlib.sha256(repr(sorted(one.items())).encode()).hexdigest()[:8]
            name = f"{name[:_LONGEST_NAME].rstrip('-_.')}-{checksum}"
        named[name] = one
    return named


def _safe(value: str) -> str:
    return re.sub(r"[^A-Za-z0-9.]+", "-", value).strip("-.") or "x"


def _tabulated(grid: RunGrid, swept: Sequence[str]) -> Sweep:
    from fedguild.measuring.log.folder import load_run
    from fedguild.report.html import write_sweep
    from fedguild.report.sweep import tabulate

    runs, diverged, values = {}, {}, {}
    for name, cells in grid.rows().items():
        finished = [cell.state() == "finished" for cell in cells]
        values[name] = cells[0].row.values
        runs[name] = [cell.folder for cell, ended in zip(cells, finished, strict=True) if ended]
        diverged[name] = [cell.config.seed for cell in cells if divergence(cell.folder)]
    if all(diverged.values()):
        first = next(filter(None, (divergence(cell.folder) for cell in grid.cells)), "")
        raise DivergedError(f"Every setting of the sweep diverged. {first}", "Sweep lower learning rates.")
    loaded = {name: [load_run(one) for one in folders] for name, folders in runs.items()}
    table = tabulate(swept, values, loaded, diverged)
    page = write_sweep(table, runs, grid.folder, f"Sweep of {', '.join(swept)}")
    return Sweep(grid.folder, table, runs, page)
