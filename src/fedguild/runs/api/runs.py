"""Running, resuming, and scoring again."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedguild.core.progress import Progress
from fedguild.runs.api.inputs import gather
from fedguild.runs.api.models import folder_of
from fedguild.runs.results import RunResult
from fedguild.runs.terminal import shown

if TYPE_CHECKING:
    from fedguild.config.loading import Given, Override
    from fedguild.measuring.scores.metrics import Metric
    from fedguild.runs.api.inputs import Dataset, Partition
    from fedguild.runs.callbacks import Callback


def run(
    config: Given,
    *overrides: Override,
    output: str | Path | None = None,
    dataset: Dataset | None = None,
    partition: Partition | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback | object] = (),
    progress: Progress | bool | None = None,
    **settings: Any,
) -> RunResult:
    """Runs a config: trains, evaluates every budget, and writes the report.

    Data, a partition and metrics given here are part of the run. The data and the partition are kept in its folder, so
    that it can be resumed, scored and exported without them. Metrics must be given to `resume` again.

    Args:
        config: A preset (`fedguild presets` lists them), a YAML file, a mapping of settings (which may have `extends`),
            or a `fedguild.config.Config`.
        overrides: `key.sub=value`, as on the command line, or mappings of settings, nested or with dotted keys.
        output: The folder of the run, new; by default `runs/<name>`.
        dataset: The rows to train on, with the columns of the corpus `instructions` (instruction, response, and maybe
            input, label, task, document, choices): a `datasets.Dataset`, a pandas frame or a list of mappings; with
            test rows a `DatasetDict` or a mapping with `train` and `test`; or a file, a folder or a hub id.
            `data.options` names other columns.
        partition: A client for each example, the indices of its examples for each client, or a function of (examples,
            clients, generator) that returns one of these.
        metrics: Name -> function of (prediction, reference), for generated answers. They are recorded in addition to
            the corpus's own metric.
        callbacks: Functions that receive the run's events (`fedguild.runs.callbacks`) and may stop it, for example
            `EarlyStopping`; or objects with methods such as `on_round_end`.
        progress: True for a bar and a line for each evaluation, or a receiver of progress reports; by default none.
        settings: Settings of the config by name, after the overrides: `seed=1`, `training={"steps": 5}`.

    Raises:
        FedGuildError: the folder holds a run, or something in the config, the data or the model is wrong.

    Examples:
        >>> import tempfile, fedguild
        >>> rows = [{"instruction": f"Say {n}.", "response": str(n % 2), "label": str(n % 2)} for n in range(40)]
        >>> small = ["federation.clients=2", "federation.rounds=1", "training.steps=1", "evaluation.max_new_tokens=1"]
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     result = fedguild.run(
        ...         "flame/tiny-tasks", *small, output=f"{folder}/run", dataset=rows, training={"batch_size": 2},
        ...         partition=[n % 2 for n in range(40)], metrics={"length": lambda said, wanted: len(said)},
        ...     )
        ...     scores = result.frame()
        >>> result.rounds, sorted(result.scores)
        (1, ['b1', 'b2', 'b3', 'b4'])
        >>> scores["round"].tolist()[-1], "length" in scores.columns
        (1, True)
    """
    from fedguild.runs import experiment

    given = gather(dataset, partition, metrics, callbacks)
    whole = given.config(config, [*overrides, settings] if settings else overrides)
    folder = whole.run_folder if output is None else Path(output)
    with shown(progress) as receiver:
        return experiment.run(
            whole, folder, progress=receiver, preparation=given.preparation(), callbacks=given.callbacks
        )


def resume(
    folder: str | Path,
    *,
    round: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    callbacks: Iterable[Callback | object] = (),
    progress: Progress | bool | None = None,
) -> RunResult:
    """Continues a run from its last complete round, with the results of an uninterrupted run.

    A run that a callback had stopped continues.

    Args:
        folder: The run's folder.
        round: Goes back to this round, whose checkpoint must still exist; later rounds are removed.
        metrics: The metrics that were given to `run`.
        callbacks: As in `run`.
        progress: As in `run`.

    Raises:
        CheckpointError: the folder holds no run, another process is working on it, or there is no such round.
        ConfigError: the run needs a metric that is not given.

    Examples:
        >>> import fedguild
        >>> result = fedguild.resume("runs/first", round=0)
        >>> result.rounds, result.stopped
        (1, '')
    """
    from fedguild.runs import experiment

    given = gather(metrics=metrics, callbacks=callbacks)
    with shown(progress) as receiver:
        return experiment.resume(
            Path(folder), progress=receiver, preparation=given.preparation(), round=round, callbacks=given.callbacks
        )


def evaluate(
    run: str | Path | RunResult,
    *,
    round: int | None = None,
    split: Literal["test", "validation"] = "test",
    metrics: Mapping[str, Metric] | None = None,
) -> RunResult:
    """Scores a run's models again: the global one at every budget, and the others that its config asks for.

    Nothing is written.

    Args:
        run: The run's folder, or its result.
        round: The round to score; the last by default.
        split: The held-out examples to score.
        metrics: The metrics that were given to `run`.

    Raises:
        CheckpointError: there is no such run, or no checkpoint of that round.
        ConfigError: the run needs a metric that is not given, or the split has no example.

    Examples:
        >>> import fedguild
        >>> again = fedguild.evaluate("runs/first")
        >>> again.scores == fedguild.load_run("runs/first").scores
        True
    """
    from fedguild.runs import experiment

    given = gather(metrics=metrics)
    return experiment.evaluate(folder_of(run), round=round, split=split, metrics=given.metrics)
