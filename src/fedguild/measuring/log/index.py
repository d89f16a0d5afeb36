"""The runs of a folder, one line each: the content of the index page and the live page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from fedguild.core.layout import CONFIG
from fedguild.core.locking import HOLDER
from fedguild.core.score_names import HEADLINES, Scope, metric_name
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.folder import FollowedRun
from fedguild.measuring.log.records import EvaluationRecord, Record, RoundRecord, RunLog
from fedguild.measuring.log.standing import Standing, standing

REPORT_FILE = "report.html"
COMPARISON_FILE = "comparison.html"
SWEEP_FILE = "sweep.html"
PLAN_FILE = "cells.json"
"""The file in which a comparison says which runs it consists of, before it begins them."""
DEPTH = 4
"""Levels of folders below the given one in which runs are looked for."""


class RunSummary(FollowedRun):
    """A run in one line; it may be in progress.

    Attributes:
        how: Its standing.
        round: The last complete round.
        score: The last score: the mean over the budgets, or over the clients; None before the first.
        before: The score before training.
        metric: What the score is, in words; `score` before the first and where that is not recorded.
        seconds: Wall time of its complete rounds.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, RoundRecord, EvaluationRecord)
        self.how, self.round, self.seconds, self.has_report = Standing("waiting"), 0, 0.0, False
        self.score: float | None = None
        self.before: float | None = None
        self.metric = metric_name(())
        self._stamp: tuple[Any, ...] | None = None
        self._by_round: dict[int, float] = {}
        self._scores: dict[tuple[Scope, str, str], dict[int, float]] = {}
        self._metrics: set[str] = set()
        self.refresh()

    def refresh(self) -> bool:
        """Reads what is new; returns False without reading if no file has changed."""
        stamp = tuple(_stamp(self.folder / name) for name in (CONFIG, RunLog.FILE, ActivityLog.FILE, REPORT_FILE))
        busy = (self.folder / HOLDER).exists()
        if stamp == self._stamp and not busy and self.how.word != "running":
            return False
        self._stamp = stamp
        self.read_config()
        while True:
            records, began = self.records.read()
            if began:
                self._scores, self._by_round, self._metrics = {}, {}, set()
            for record in records:
                self._take(record)
            if not records:
                break
        if not busy:
            self.records.close()
        self.round, self.seconds = max(self._by_round, default=0), sum(self._by_round.values())
        self.how = standing(self.folder, ActivityLog(self.folder).last_ending(), self.round, self.planned_rounds)
        self.score, self.before = self._headline()
        self.metric = metric_name(self._metrics)
        self.has_report = (self.folder / REPORT_FILE).is_file()
        return True

    def to_json(self) -> dict[str, Any]:
        return {
            **{name: getattr(self, name) for name in ("name", "method", "model", "data", "round", "score", "before")},
            "metric": self.metric,
            "clients": self.number_of_clients,
            "seed": self.seed if self.config else None,
            "rounds": self.planned_rounds,
            "word": self.how.word,
            "reason": self.how.reason,
            "seconds": self.seconds,
            "has_report": self.has_report,
        }

    def _take(self, record: Record) -> None:
        if record.kind == "round":
            self._by_round[record.round] = record.seconds
        elif record.kind == "evaluation" and record.scope in ("summary", "budget") and math.isfinite(record.score):
            self._scores.setdefault((record.scope, record.name, record.split), {})[record.round] = record.score
            self._metrics.add(record.metric)

    def _headline(self) -> tuple[float | None, float | None]:
        """Returns the last score and that before training, of the first mean that was recorded."""
        for split in ("test", "validation"):
            for name in HEADLINES:
                scores = self._scores.get(("summary", name, split))
                if scores:
                    return scores[max(scores)], scores.get(0)
            budgets = [
                by_round for (scope, _, of), by_round in self._scores.items() if (scope, of) == ("budget", split)
            ]
            if budgets:
                last = max(max(by_round) for by_round in budgets)
                return _mean_of(budgets, last), _mean_of(budgets, 0)
        return None, None


def find_runs(folder: Path, depth: int = DEPTH) -> list[Path]:
    """Returns the folders of runs below a folder, itself excluded, in the order of their names."""
    try:
        inside = sorted(entry for entry in folder.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    except OSError:
        return []
    found = []
    for each in inside:
        if is_run(each):
            found.append(each)
        elif depth > 1:
            found += find_runs(each, depth - 1)
    return found


@dataclass(frozen=True)
class GroupPage:
    """A page about several runs.

    Attributes:
        kind: `comparison` or `sweep`.
        name: The name of its folder.
        place: Its folder, relative to the one that was searched; `.` for that itself.
        file: The name of its file.
    """

    kind: str
    name: str
    place: str
    file: str


def find_pages(folder: Path, runs: Iterable[Path]) -> list[GroupPage]:
    """Returns the pages of comparisons and sweeps in a folder and between it and runs below it, by place."""
    places = {folder}
    for run in runs:
        for parent in run.parents:
            if parent in places:
                break
            places.add(parent)
    kinds = {COMPARISON_FILE: "comparison", SWEEP_FILE: "sweep"}
    return [
        GroupPage(kind, place.resolve().name, place.relative_to(folder).as_posix(), file)
        for place in sorted(places)
        for file, kind in kinds.items()
        if (place / file).is_file()
    ]


def is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG, ActivityLog.FILE, HOLDER))


@dataclass(frozen=True)
class Plan:
    """What a comparison or sweep is to run, from its folder.

    Attributes:
        cells: The runs: `row`, `column`, `seed`, and `folder` relative to that of the plan; empty without a plan.
        reference: Of a comparison, the row that the others are compared with; None if it is not recorded.
        table: Of a comparison, the name of its built-in table; empty if there is none.
    """

    cells: Sequence[Mapping[str, Any]] = ()
    reference: str | None = None
    table: str = ""


def read_plan(folder: Path) -> Plan:
    """Returns the plan in a folder; an empty one if there is none."""
    try:
        plan = json.loads((folder / PLAN_FILE).read_text("utf-8"))
        known = [cell for cell in plan["cells"] if {"row", "column", "seed", "folder"} <= set(cell)]
        below = [cell for cell in known if not Path(cell["folder"]).is_absolute() and ".." not in cell["folder"]]
        return Plan(below, plan.get("reference") or None, str(plan.get("table", "")))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return Plan()


def _mean_of(budgets: Sequence[Mapping[int, float]], number: int) -> float | None:
    """Returns the mean over the budgets after a round, which logs of earlier versions lack; None without scores."""
    scores = [by_round[number] for by_round in budgets if number in by_round]
    return fmean(scores) if scores else None


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
