"""Metrics of generated answers: one file per metric, and `METRICS`, which finds these and those of other packages.

A metric is a function of the generated text and the reference that returns a number, from 0 (wrong) to 1 (equal to the
reference). A module in this folder defines it as `score`, and the file's name is the metric's name. A metric of another
package is an entry point in the group `fedguild.metrics`. On one machine a config may also name a Python function,
`module:function`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from numbers import Real

from fedguild.core.errors import ConfigError, FedGuildError, first_line, nearest
from fedguild.core.plugins import Plugins, is_target

Metric = Callable[[str, str], float]
"""(generated text, reference) -> score."""
TAKEN = ("accuracy", "macro_f1", "deviation", "nats", "perplexity", "preference_accuracy", "reward_margin")
"""Names under which other figures of an evaluation are recorded."""


def _accepted(name: str, loaded: object) -> Metric:
    if name in TAKEN:
        raise ValueError(f"{name} is recorded as another figure")
    if not callable(loaded):
        raise TypeError(f"a metric is a function of two texts, not a {type(loaded).__name__}")
    return loaded


METRICS = Plugins("metric", __name__, "fedguild.metrics", _accepted, attribute="score", unregistered=True)


def load_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Returns the registered metrics that a config asks for, by name.

    Raises:
        ConfigError: a name is unknown or `module:function`, or its package is broken.
    """
    wanted = list(names)
    for name in wanted:
        if is_target(name):
            raise ConfigError(
                f"evaluation.metrics: '{name}' is a Python function, which only runs on one machine import.",
                "In a federation, install it as a plug-in at the server and at every site (docs/guides/plug-ins.md).",
            )
        if name not in METRICS:
            raise ConfigError(
                f"evaluation.metrics: there is no metric '{name}'.",
                f"{nearest(name, METRICS)} One that was given to fedguild.run in Python must be given again to resume "
                "or score the run.",
            )
    return {name: METRICS.load(name) for name in wanted}


def measure(metrics: Mapping[str, Metric], prediction: str, reference: str) -> dict[str, float]:
    """Returns the value of every metric by its name.

    Raises:
        FedGuildError: a metric fails, or returns something other than a finite number.
    """
    values: dict[str, float] = {}
    for name, metric in metrics.items():
        try:
            value: object = metric(prediction, reference)
        except Exception as error:  # a function of the user's
            raise FedGuildError(
                f"The metric '{name}' failed with {type(error).__name__}: {first_line(error)}",
                "A metric is called with two texts, the answer and the reference, and returns a number.",
            ) from error
        if not isinstance(value, Real) or not math.isfinite(value):
            raise FedGuildError(
                f"The metric '{name}' returned {value!r:.50} for the answer {prediction!r:.200}.",
                "A metric must return a finite number.",
            )
        values[name] = float(value)
    return values
