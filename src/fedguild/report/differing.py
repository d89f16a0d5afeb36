"""The settings in which the configs of a comparison differ, besides their methods."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedguild.measuring.log.folder import Run
from fedguild.report import units
from fedguild.report.grid import Cell, Grid

_OF_A_RUN = ("name", "output", "seed", "method.name", "tracking.", "callbacks")
"""Settings that name a run or watch it."""


def differing_settings(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, str]]:
    """Returns dotted key -> label -> value, of every setting that not all rows have with the same value.

    Options of the methods count as the runs used them, defaults included. An option that some methods do not have is
    compared among those that have it.

    Args:
        runs: Label -> the row's runs; those of a row differ in their seeds only.
    """
    by_label = {label: dict(flat_settings(members[0])) for label, members in runs.items()}
    keys = dict.fromkeys(key for settings in by_label.values() for key in settings)
    found = {}
    for key in keys:
        values = {label: settings[key] for label, settings in by_label.items() if key in settings}
        everywhere = len(values) == len(by_label) or key.startswith("method.")
        if not (everywhere and len(set(values.values())) == 1) and not key.startswith(_OF_A_RUN):
            found[key] = values
    return found


def differing_grid(runs: Mapping[str, Sequence[Run]]) -> Grid | None:
    """Returns settings × methods; None if the configs differ in nothing besides the method."""
    found = differing_settings(runs)
    if not found:
        return None
    body = [(Cell(key), *(Cell(values.get(label, units.MISSING)) for label in runs)) for key, values in found.items()]
    return Grid("Settings that differ, besides the method", (Cell("Setting"), *map(Cell, runs)), tuple(body))


def flat_settings(run: Run) -> Iterator[tuple[str, str]]:
    """Yields dotted key -> value as text, of every setting of a run's config and every option of its method."""
    yield from flat({**run.config, "method": {"name": run.method, **run.method_options}})


def flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Yields every leaf of nested mappings with its dotted name."""
    for key, inner in value.items():
        if isinstance(inner, Mapping):
            yield from flat(inner, f"{prefix}{key}.")
        elif isinstance(inner, list) and inner and all(isinstance(one, Mapping) for one in inner):
            for place, one in enumerate(inner):
                yield from flat(one, f"{prefix}{key}.{one.get('name', place)}.")
        else:
            yield f"{prefix}{key}", ", ".join(map(str, inner)) if isinstance(inner, list) else str(inner)
