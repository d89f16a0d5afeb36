"""Reader of run folders: config, environment, partition and metrics, with queries and pandas frames of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any, Literal, get_args

import yaml
from pydantic import ValidationError

from fedguild.config.renamed import with_new_names
from fedguild.core.errors import CheckpointError, ConfigError, nearest
from fedguild.core.layout import CONFIG, ENVIRONMENT, METHOD, PARTITION
from fedguild.core.score_names import MTAL, POOLED, RECEIVED, TRAINED, Scope, metric_name
from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    ObservationRecord,
    PartitionRecord,
    PrivacyRecord,
    Record,
    RoundRecord,
    RoutingRecord,
    RunLog,
)
from fedguild.measuring.log.samples import Sample, read_samples

if TYPE_CHECKING:
    import pandas

ClientScope = Literal["client", "trained", "received", "pooled"]
"""A client's own model, the same as trained, as received, and as received on all clients' data."""
MEANS: Mapping[ClientScope, str] = {"client": MTAL, "trained": TRAINED, "received": RECEIVED, "pooled": POOLED}
"""Scope -> name of its mean over clients."""


FrameOf = Literal["scores", "tasks", "clients", "rounds", "observations"]
FRAMES: tuple[FrameOf, ...] = get_args(FrameOf)


@dataclass(frozen=True)
class BudgetFacts:
    """A column of the tables: a tier of compute as it was evaluated.

    Attributes:
        active_experts: Active experts per token in the evaluation; None if it is not recorded or the model is dense.
        rank: LoRA rank that the tier can train.
        inference_flops_per_token: Forward FLOPs for a token, adapters merged.
    """

    name: str
    active_experts: int | None = None
    rank: int | None = None
    inference_flops_per_token: float | None = None


class Described:
    """A run as its config describes it; what the config lacks is empty or 0.

    `model` is the backbone's path, `data` the corpus; `name` is the folder's if the config has none.
    """

    folder: Path
    config: Mapping[str, Any]

    def setting(self, *path: str, default: Any = None) -> Any:
        """Returns the config's value under nested keys, or `default` where one is absent."""
        value: Any = self.config
        for key in path:
            if not isinstance(value, Mapping) or key not in value:
                return default
            value = value[key]
        return value

    @property
    def name(self) -> str:
        return str(self.setting("name") or self.folder.name)

    @property
    def method(self) -> str:
        method = self.setting("method")
        return str((method.get("name") if isinstance(method, Mapping) else method) or "")

    @property
    def model(self) -> str:
        return str(self.setting("model", "path") or "")

    @property
    def data(self) -> str:
        return str(self.setting("data", "dataset") or "")

    @property
    def partition_scheme(self) -> str:
        scheme, alpha = self.setting("data", "partition", "scheme"), self.setting("data", "partition", "alpha")
        if scheme == "dirichlet" and isinstance(alpha, (int, float)):
            return f"Dirichlet {alpha:g}"
        return f"{scheme} partition" if scheme else ""

    @property
    def number_of_clients(self) -> int:
        return self._whole("federation", "clients")

    @property
    def planned_rounds(self) -> int:
        return self._whole("federation", "rounds")

    @property
    def seed(self) -> int:
        return self._whole("seed")

    def _whole(self, *path: str) -> int:
        value = self.setting(*path)
        return value if isinstance(value, int) else 0


@dataclass(frozen=True)
class Run(Described):
    """The content of a run folder.

    Attributes:
        folder: Where it was read from.
        config: The resolved config, as plain YAML values.
        environment: Versions and machine, as plain JSON values.
        partition: The distribution of the data over the clients, if it was recorded.
        rounds: Complete rounds, in order.
        clients: Local trainings, in order of writing.
        evaluations: Scores, in order of writing.
        routing: Expert activations, in order of writing.
        observations: Figures that the method itself reported, in order of writing.
        privacy: Privacy spent by the clients after each round, in order of writing; empty without differential privacy.
        guarantee: What is protected, from whom and under which assumptions, in sentences; empty without it.
        method_options: Every option of the method as it runs, defaults included.
        samples: Answers to a few held-out examples, before and after training.
    """

    folder: Path
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    partition: PartitionRecord | None
    rounds: Sequence[RoundRecord]
    clients: Sequence[ClientRecord]
    evaluations: Sequence[EvaluationRecord]
    routing: Sequence[RoutingRecord]
    observations: Sequence[ObservationRecord] = ()
    privacy: Sequence[PrivacyRecord] = ()
    guarantee: Sequence[str] = ()
    method_options: Mapping[str, Any] = field(default_factory=dict)
    samples: Sequence[Sample] = ()

    @property
    def split(self) -> str:
        """The split that the tables show: `test` if it was scored, else `validation`."""
        return "test" if any(record.split == "test" for record in self.evaluations) else "validation"

    @property
    def metric(self) -> str:
        """What the scores of that split are, in words, such as `accuracy`; `score` where the log does not say."""
        return metric_name(record.metric for record in self.evaluations if record.split == self.split)

    @property
    def last_round(self) -> int:
        return max(record.round for record in self.evaluations if record.split == self.split)

    def until(self, round: int) -> Run:
        """Returns the run as it was after a round, from its records until then; the config remains the whole run's.

        Raises:
            CheckpointError: it was not evaluated after that round.
        """
        lists = ("rounds", "clients", "evaluations", "routing", "observations", "privacy", "samples")
        kept: dict[str, Any] = {
            name: [record for record in getattr(self, name) if record.round <= round] for name in lists
        }
        earlier = replace(self, **kept)
        if not any(record.round == round for record in earlier.evaluations):
            raise CheckpointError(
                f"{self.folder} was not evaluated after round {round}.",
                "Choose a round that `evaluation.every` divides, or the last one.",
            )
        return earlier

    def scored(self, scope: Scope, round: int) -> dict[str, EvaluationRecord]:
        """Returns the evaluations of a scope after a round, by name, in the shown split."""
        return {
            record.name: record
            for record in self.evaluations
            if (record.scope, record.round, record.split) == (scope, round, self.split)
        }

    def curve(self, scope: Scope, name: str) -> list[tuple[int, float]]:
        """Returns (round, score) of one name over the rounds, in the shown split."""
        points = {
            record.round: record.score
            for record in self.evaluations
            if (record.scope, record.name, record.split) == (scope, name, self.split)
        }
        return sorted(points.items())

    def client_mean(self, scope: ClientScope, round: int) -> float | None:
        """Returns the mean over clients of their models' scores; None if none was scored.

        Clients count equally; one without examples does not count.
        """
        recorded = self.scored("summary", round).get(MEANS[scope])
        if recorded:
            return recorded.score
        scores = [record.score for record in self.scored(scope, round).values() if record.examples != 0]
        return fmean(scores) if scores else None

    def client_deviation(self, scope: ClientScope, round: int) -> float | None:
        """Returns the sample deviation over the clients of those scores; None for fewer than two of them."""
        scores = [record.score for record in self.scored(scope, round).values() if record.examples != 0]
        recorded = self.scored("summary", round).get(MEANS[scope])
        computed = stdev(scores) if len(scores) > 1 else None
        return recorded.metrics.get("deviation", computed) if recorded else computed

    def client_curve(self, scope: ClientScope) -> list[tuple[int, float]]:
        """Returns (round, mean over clients) over the rounds that scored clients."""
        numbers = sorted({record.round for record in self.evaluations})
        return [(number, mean) for number in numbers if (mean := self.client_mean(scope, number)) is not None]

    def budgets(self) -> tuple[BudgetFacts, ...]:
        """Returns the evaluated budgets: in the config's order, then those that it does not list."""
        scored = self.scored("budget", self.last_round)
        listed = {str(entry["name"]): entry for entry in self.setting("federation", "budgets", default=[])}
        is_dense = any(record.active_experts == 0 for record in self.clients)
        as_budgeted = self.setting("evaluation", "active_experts", default="budget") == "budget" and not is_dense
        order = [name for name in listed if name in scored] + [name for name in scored if name not in listed]
        return tuple(
            BudgetFacts(
                name=name,
                active_experts=scored[name].active_experts
                or (listed.get(name, {}).get("active_experts") if as_budgeted else None)
                or None,
                rank=listed.get(name, {}).get("rank"),
                inference_flops_per_token=scored[name].inference_flops_per_token,
            )
            for name in order
        )

    @property
    def last_routing(self) -> RoutingRecord | None:
        return max(self.routing, key=lambda record: record.round, default=None)

    def rejections(self) -> list[tuple[int, int, str]]:
        """Returns (round, client, reason) of every upload that was not aggregated."""
        return [(record.round, entry.client, entry.reason) for record in self.rounds for entry in record.rejected]

    def frame(self, of: FrameOf) -> pandas.DataFrame:
        """Returns what the run has recorded in all its rounds, as `RunResult.frame` describes it.

        Raises:
            ConfigError: there is no such frame.
        """
        import pandas

        if of not in FRAMES:
            raise ConfigError(f"There is no frame of '{of}'.", nearest(of, FRAMES))
        return pandas.DataFrame(list(self._rows(of)))

    def _rows(self, of: FrameOf) -> Iterator[dict[str, Any]]:
        if of == "scores":
            for score in self.evaluations:
                yield {**score.model_dump(exclude={"kind", "metrics", "by_task"}), **score.metrics}
        elif of == "tasks":
            for score in self.evaluations:
                place = score.model_dump(include={"round", "scope", "name", "split"})
                for task, value in score.by_task.items():
                    yield {**place, "task": task, "score": value, "metric": score.task_metrics.get(task, score.metric)}
        elif of == "clients":
            for trained in self.clients:
                parts = {f"upload_bytes_{part}": size for part, size in trained.upload_parts.items()}
                yield {**trained.model_dump(exclude={"kind", "upload_parts"}), **parts}
        elif of == "rounds":
            for one in self.rounds:
                phases = {f"seconds_{phase}": spent for phase, spent in one.phase_seconds.items()}
                counts = {name: len(getattr(one, name)) for name in ("participants", "rejected", "strays")}
                yield {"round": one.round, "seconds": one.seconds, **counts, **phases}
        else:
            for seen in self.observations:
                for row, values in zip(seen.rows, seen.values, strict=True):
                    for column, value in zip(seen.columns or [""], values, strict=True):
                        yield {"round": seen.round, "name": seen.name, "row": row, "column": column, "value": value}


def config_of(folder: Path) -> Path:
    """Returns the config's file in a run's folder.

    Raises:
        CheckpointError: it has none.
    """
    if not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} is not the folder of a run: it has no config.yaml.",
            "Give the folder that `fedguild run` wrote, for example runs/flame-tiny-tasks.",
        )
    return folder / CONFIG


def load_run(folder: Path, *, needs_scores: bool = True) -> Run:
    """Reads a run folder.

    Args:
        needs_scores: Whether to refuse a run that has no score yet, whose tables and figures would be empty.

    Raises:
        CheckpointError: the folder is not that of a run, a file of it is damaged, or it has no score yet.
    """
    config_file = config_of(folder)
    records = RunLog(folder).read()
    evaluations = [record for record in records if isinstance(record, EvaluationRecord)]
    if needs_scores and not evaluations:
        raise CheckpointError(
            f"{folder / RunLog.FILE} holds no score yet, so there is nothing to report.",
            "Wait for the first evaluation, or continue the run with `fedguild resume`.",
        )
    return Run(
        folder=folder,
        config=with_new_names(read_mapping(config_file)),
        environment=read_mapping(folder / ENVIRONMENT),
        partition=_read_partition(folder / PARTITION),
        rounds=[record for record in records if isinstance(record, RoundRecord)],
        clients=[record for record in records if isinstance(record, ClientRecord)],
        evaluations=evaluations,
        routing=[record for record in records if isinstance(record, RoutingRecord)],
        observations=[record for record in records if isinstance(record, ObservationRecord)],
        privacy=[record for record in records if isinstance(record, PrivacyRecord)],
        guarantee=read_mapping(folder / "privacy.json").get("guarantee", ()),
        method_options=read_mapping(folder / METHOD).get("options", {}),
        samples=read_samples(folder),
    )


def has_scores(folder: Path) -> bool:
    """Whether a folder is that of a run, and the run has a score."""
    is_run = (folder / CONFIG).is_file()
    return is_run and any(isinstance(record, EvaluationRecord) for record in RunLog(folder).read())


class FollowedRun(Described):
    """A run that may be in progress: its config and its records of some kinds, each read once.

    Args:
        folder: The run's folder; it need not exist yet.
        kinds: The kinds of records.
    """

    def __init__(self, folder: Path, *kinds: type[Record]) -> None:
        self.folder = folder
        self.config: Mapping[str, Any] = {}
        self.records = RunLog(folder).follow(*kinds)
        self._config_stamp: tuple[int, int] | None = None

    def read_config(self) -> bool:
        """Reads the config if it is new; returns whether it was."""
        path = self.folder / CONFIG
        try:
            status = path.stat()
        except OSError:
            return False
        stamp = status.st_mtime_ns, status.st_ino
        if stamp == self._config_stamp:
            return False
        self.config = with_new_names(read_if_whole(path))
        self._config_stamp = stamp if self.config else None
        return True


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the named values of a YAML or JSON file; empty if there is no file.

    Raises:
        CheckpointError: the file is damaged.
    """
    if not path.exists():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        value = yaml.safe_load(text) if path.suffix == ".yaml" else json.loads(text)
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read: {' '.join(str(error).split())}.") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} must hold named values, but holds a {type(value).__name__}.")
    return value


def read_if_whole(path: Path) -> dict[str, Any]:
    """Returns the named values of a file that another process may be writing; empty if it cannot be read."""
    try:
        return read_mapping(path)
    except CheckpointError:
        return {}


def _read_partition(path: Path) -> PartitionRecord | None:
    if not path.exists():
        return None
    try:
        return PartitionRecord.model_validate_json(path.read_bytes())
    except ValidationError as error:
        raise CheckpointError(f"{path} is not a partition of a run: {error.errors()[0]['msg']}.") from error
