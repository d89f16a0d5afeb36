"""Metrics of generated answers: one file per metric, and `METRICS`, which finds these and those of other packages.

A metric is a function of the generated text and the reference that returns a number, from 0 (wrong) to 1 (equal to the
reference). A module in this folder defines it as `score`, and the file's name is the metric's name. A metric of another
package is an entry point in the group `fedguild.metrics`. A config may also name a Python function, `module:function`.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from numbers import Real

from fedguild.core.errors import ConfigError, FedGuildError, first_line, nearest
from fedguild.core.plugins import Plugins, is_target, search_working_folder

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


METRICS = Plugins("metric", "fedguild.measuring.scores.metrics", "fedguild.metrics", _accepted, attribute="score")


def load_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Returns the metrics that a config asks for, by name.

    Raises:
        ConfigError: a name is unknown, or its package is broken.
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


def import_metrics(names: Iterable[str]) -> dict[str, Metric]:
    """Returns the Python functions among some metrics, by name, from installed packages or the working folder.

    That runs code: `fedguild.config.trust` says of which configs. Nothing that a server sends to a site comes here.

    Raises:
        ConfigError: there is no such module or function, or importing it fails.
    """
    return {name: _imported(name) for name in names if is_target(name)}


def _imported(name: str) -> Metric:
    module, _, attribute = name.partition(":")
    search_working_folder()
    hint = "A metric is MODULE:FUNCTION, and the function takes two texts, the answer and the reference."
    if not (module and attribute):
        raise ConfigError(f"evaluation.metrics: '{name}' is not MODULE:FUNCTION.", hint)
    try:
        found: object = getattr(import_module(module), attribute)
    except Exception as error:  # code of the user's
        problem = f"importing {module} failed with {type(error).__name__}: {first_line(error)}"
        if isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}."):
            problem = f"there is no module {error.name}"
            hint = f"It has to be installed or in the working folder, {os.getcwd()}."
        elif isinstance(error, AttributeError) and module in sys.modules:
            problem = f"the module {module} has no {attribute}"
        raise ConfigError(f"evaluation.metrics: '{name}': {problem}.", hint) from error
    if not callable(found):
        raise ConfigError(f"evaluation.metrics: '{name}' is a {type(found).__name__}, not a function.", hint)
    return found


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
