"""Arguments of the API that a config cannot hold, and the settings and files that represent them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, TypeAlias

from fedguild.config import Config, load_config
from fedguild.config.data import GIVEN
from fedguild.config.explaining import Layer
from fedguild.config.loading import Given, Override
from fedguild.core.errors import ConfigError
from fedguild.data.given import GivenData, as_file, rows_of
from fedguild.data.partition import Assignment, PartitionScheme, in_integers
from fedguild.measuring.scores.metrics import METRICS, TAKEN, Metric

if TYPE_CHECKING:
    import datasets
    import pandas

    from fedguild.runs.callbacks import Callback
    from fedguild.runs.experiment import Preparation

    Rows: TypeAlias = datasets.Dataset | pandas.DataFrame | Sequence[Mapping[str, Any]]
    Dataset: TypeAlias = Rows | datasets.DatasetDict | Mapping[str, Rows] | str | Path
    """Rows, rows by split, or a file, folder or hub id."""

Partition = PartitionScheme | Assignment
"""A function of examples, clients and a generator, or what it returns."""


@dataclass(frozen=True)
class Inputs:
    """Data, metrics and callbacks given in Python, and the settings that represent them.

    Attributes:
        layers: Settings that override a config's and are overridden by its overrides.
        data: The data and the partition; None if the config names them.
    """

    layers: tuple[Layer, ...] = ()
    data: GivenData | None = None
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    callbacks: tuple[Callback, ...] = ()

    @property
    def has_functions(self) -> bool:
        """Whether a run needs functions of this process."""
        return bool(self.metrics or self.callbacks)

    def config(self, given: Given, overrides: Sequence[Override], between: Sequence[Layer] = ()) -> Config:
        """Returns a config with the settings of these inputs, which override `between`.

        Raises:
            ConfigError: there is no such config, or a setting is wrong.
        """
        config = load_config(given, overrides, between=[*between, *self.layers])
        missing = [name for name in self.metrics if name not in config.evaluation.metrics]
        if not missing:
            return config
        names = [*config.evaluation.metrics, *missing]
        return load_config(config, [f"evaluation.metrics={json.dumps(names)}"])

    def preparation(self) -> Preparation:
        from fedguild.runs.setup import prepare

        return partial(prepare, data=self.data, metrics=self.metrics)


def gather(
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback | object] = (),
) -> Inputs:
    """Collects what was given in Python.

    Raises:
        DataError: the dataset is of no accepted kind, or has no rows to train on, or the partition has an entry that is
            not an integer.
        ConfigError: the partition is neither a function nor an assignment, a metric's name is taken, or a callback is
            neither a function nor an object with methods.
    """
    from fedguild.runs.callbacks import listed

    data: dict[str, Any] = {}
    files: dict[str, bytes] = {}
    if isinstance(dataset, (str, Path)):
        data |= {"dataset": "instructions", "train": str(dataset), "test": None}
    elif dataset is not None:
        data |= {"dataset": "instructions", "train": None, "test": None}
        for split, rows in rows_of(dataset).items():
            file, content = as_file(rows)
            files[file] = content
            data[split] = GIVEN + file.removesuffix(".jsonl")
    scheme = None
    if partition is not None:
        scheme, name = _scheme(partition)
        data["partition"] = {"scheme": GIVEN + name}
    if not isinstance(metrics, (Mapping, NoneType)):
        raise ConfigError(
            f"metrics takes a mapping of names to functions of two texts, not {metrics!r}.",
            "Metrics that ship are a setting: 'evaluation.metrics=[NAME]'.",
        )
    own = dict(metrics or {})
    for name, metric in own.items():
        if name in TAKEN or name in METRICS:
            raise ConfigError(f"A metric cannot be named '{name}': that is the name of another figure.")
        if not callable(metric):
            raise ConfigError(f"The metric '{name}' is a {type(metric).__name__}, not a function of two texts.")
    layers = (Layer("what was given in Python", {"data": data}),) if data else ()
    return Inputs(layers, GivenData(files, scheme) if files or scheme else None, own, listed(callbacks))


def _scheme(partition: Partition) -> tuple[PartitionScheme, str]:
    """Returns a partition as a function, and its name in the config."""
    if callable(partition):
        named = getattr(partition, "__qualname__", type(partition).__qualname__)
        return partition, f"{getattr(partition, '__module__', '')}.{named}".strip(".")
    assignment: Any = partition
    if isinstance(assignment, str) or not hasattr(assignment, "__len__"):
        raise ConfigError(
            f"A partition cannot be a {type(partition).__name__}.",
            "Accepted: a function of (examples, clients, generator), a client for each example, or for each client the "
            "indices of its examples. One of those that ship is a setting: 'data.partition.scheme=iid'.",
        )
    listed = in_integers(assignment)
    name, _ = as_file([{"assignment": listed}])
    return (lambda examples, clients, rng: listed), name.removesuffix(".jsonl")
