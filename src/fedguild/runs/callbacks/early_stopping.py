"""Early stopping: ends a run whose score no longer improves."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

from fedguild.core.errors import ConfigError, nearest
from fedguild.core.score_names import SCORES
from fedguild.measuring.log.records import EvaluationRecord
from fedguild.runs.callbacks import Event, Saved


@dataclass(frozen=True)
class EarlyStopping:
    """A callback that stops a run after `patience` evaluations without a better score.

    It looks at the run's history only, so a resumed run stops where an uninterrupted one does. The score before
    training (round 0) counts, unless `evaluation.eval_on_start` is false.

    Attributes:
        monitor: A budget (`b1`), or a mean: `mean`, `mtal`, `trained`, `received`, `pooled`; `auto`: the first of these
            means that the run has.
        patience: Evaluations without an improvement before the run is stopped; at least 1.
        min_delta: Smallest change that counts as an improvement; at least 0.
        metric: A metric of that score instead of the score itself, for example `perplexity`; a budget's only.
        mode: Whether a larger value is better (`max`) or a smaller one (`min`).

    Raises:
        ValueError: an option is out of range.

    Examples:
        >>> from fedguild import EarlyStopping
        >>> EarlyStopping(monitor="b1", patience=2)
        EarlyStopping(monitor='b1', patience=2, min_delta=0.0, metric=None, mode='max')
    """

    monitor: str = "auto"
    patience: int = 3
    min_delta: float = 0.0
    metric: str | None = None
    mode: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        for option in ("monitor", "metric"):
            given = getattr(self, option)
            if not isinstance(given, str) and (option == "monitor" or given is not None):
                raise ValueError(f"{option} must be a name, got {given!r}")
        if not isinstance(self.patience, int) or self.patience < 1:
            raise ValueError(f"patience must be a whole number of at least 1, got {self.patience!r}")
        if not isinstance(self.min_delta, (int, float)) or not self.min_delta >= 0:
            raise ValueError(f"min_delta must be a number of at least 0, got {self.min_delta!r}")
        if self.mode not in ("max", "min"):
            raise ValueError(f"mode must be max or min, got {self.mode!r}")

    def require(self, scores: Mapping[str, Collection[str]]) -> None:
        """Checks that a run will have the score that this monitors.

        Args:
            scores: The budgets and means that it will score -> the metrics that each may have.

        Raises:
            ConfigError: there is no such score or metric.
        """
        monitor = self._named(scores)
        if self.metric is not None:
            self._require_metric(monitor, scores[monitor])

    def __call__(self, event: Event) -> None:
        """Stops the run if the last `patience` evaluations brought no improvement.

        Raises:
            ConfigError: the run has no such score or metric.
        """
        if not isinstance(event, Saved) or not event.history:  # the first evaluation may be rounds away
            return
        monitor = self._monitored(event.history)
        values = self._values(event.history, monitor)
        since = self._since_the_best(values)
        if since >= self.patience:
            what = f"{monitor}.{self.metric}" if self.metric else monitor
            event.stop(f"{what} has not improved in {since} evaluations, after round {event.round}")

    def _monitored(self, history: Iterable[EvaluationRecord]) -> str:
        return self._named(dict.fromkeys(record.name for record in history if record.scope in ("summary", "budget")))

    def _named(self, names: Collection[str]) -> str:
        monitor = next((name for name in SCORES if name in names), "") if self.monitor == "auto" else self.monitor
        if monitor not in names:
            raise ConfigError(f"early-stopping: the run has no score '{monitor}' to monitor.", nearest(monitor, names))
        return monitor

    def _values(self, history: Iterable[EvaluationRecord], monitor: str) -> list[float]:
        records = [record for record in history if record.scope in ("summary", "budget") and record.name == monitor]
        if self.metric is None:
            return [record.score for record in records]
        known = {name for record in records for name in record.metrics}
        self._require_metric(monitor, known)
        return [record.metrics[self.metric] for record in records if self.metric in record.metrics]

    def _require_metric(self, monitor: str, known: Collection[str]) -> None:
        if self.metric is not None and self.metric not in known:
            raise ConfigError(
                f"early-stopping: '{monitor}' has no metric '{self.metric}'.", nearest(self.metric, known)
            )

    def _since_the_best(self, values: Iterable[float]) -> int:
        """Returns the number of values after the last that was better than all before it by more than `min_delta`."""
        best: float | None = None
        since = 0
        for value in values:
            gain = 0.0 if best is None else (value - best if self.mode == "max" else best - value)
            if best is None or gain > self.min_delta:
                best, since = value, 0
            else:
                since += 1
        return since


CALLBACK = EarlyStopping
