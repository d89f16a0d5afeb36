"""Results of runs and comparisons as Python objects: scores, pandas frames and figures, also shown in a notebook."""

from __future__ import annotations

import html
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedguild.core.errors import CheckpointError, ConfigError, nearest
from fedguild.core.files import write_json
from fedguild.core.layout import CHECKPOINTS, CONFIG, DIVERGED, STOPPED
from fedguild.core.score_names import HEADLINES, SCOPES, metric_name
from fedguild.measuring.log import folder as run_folder
from fedguild.measuring.log.folder import FrameOf
from fedguild.measuring.log.records import EvaluationRecord, Record

if TYPE_CHECKING:
    import pandas

    from fedguild.data.batches import Cut
    from fedguild.measuring.costs.profile import Profile
    from fedguild.measuring.log.folder import Run
    from fedguild.report.comparison import ComparisonTable
    from fedguild.report.grid import Grid
    from fedguild.report.style import Svg
    from fedguild.report.sweep import SweepTable
    from fedguild.runs.setup import PreparedData


@dataclass(frozen=True)
class Figure:
    """A figure of the report; a notebook shows it if it is the last expression of a cell.

    Attributes:
        name: Its name, for example `scores`.
        svg: The figure as an `<svg>` element.
    """

    name: str
    svg: Svg = field(repr=False)

    def save(self, path: str | Path) -> Path:
        """Writes the figure as SVG, PDF or PNG, by the suffix of the path.

        Raises:
            ConfigError: the path has another suffix.
        """
        from fedguild.report.style import FIGURE_FORMATS

        path = Path(path)
        if path.suffix.lower() not in FIGURE_FORMATS:
            raise ConfigError(f"A figure is written as {', '.join(FIGURE_FORMATS)}, but not as '{path.name}'.")
        self.svg.save(path.with_suffix(path.suffix.lower()))
        return path

    def _repr_html_(self) -> str:
        return self.svg


class Figures(Mapping[str, Figure]):
    """Figures by name; a notebook shows them one below the other."""

    def __init__(self, drawn: Mapping[str, Svg]) -> None:
        self._figures = {name: Figure(name, svg) for name, svg in drawn.items()}

    def __getitem__(self, name: str) -> Figure:
        return self._figures[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._figures)

    def __len__(self) -> int:
        return len(self._figures)

    def __repr__(self) -> str:
        return f"Figures({', '.join(self)})"

    def _repr_html_(self) -> str:
        return "\n".join(f"<figure><figcaption>{name}</figcaption>{one.svg}</figure>" for name, one in self.items())


@dataclass(frozen=True)
class RunResult:
    """A finished run, or the current results of a run in progress.

    Attributes:
        folder: The run's folder.
        rounds: Number of the last round.
        scores: Budget -> score of the global model after that round, from 0 to 1.
        mean: Mean over the budgets, or over the clients if every client has its own model.
        report: The report's page; `evaluate` does not write it, so it may be missing for a run that was interrupted.
        own: Client -> score of its own model on its own data; empty if not evaluated.
        trained: Client -> score of its model right after its training; empty if not evaluated.
        received: Client -> score of the model with which it would begin its next round; empty if not evaluated.
        pooled: Client -> score of the latter on all clients' data; empty if not evaluated.
        summaries: `mean`, `mtal`, `trained`, `received` and `pooled`, those that were evaluated.
        deviations: Summaries over clients -> the sample standard deviation, if there are at least two clients.
        stopped: Why a callback stopped the run; empty if none did.
        metric: What the scores are, in words, for example `accuracy`; `score` where that is not recorded.

    Examples:
        >>> import fedguild
        >>> result = fedguild.load_run("runs/first")
        >>> clients = result.frame("clients")
        >>> clients.groupby("budget").active_experts.max().to_dict()
        {'b1': 8, 'b2': 4, 'b3': 2, 'b4': 1}
    """

    folder: Path
    rounds: int
    scores: Mapping[str, float]
    mean: float
    report: Path
    own: Mapping[str, float] = field(default_factory=dict)
    trained: Mapping[str, float] = field(default_factory=dict)
    received: Mapping[str, float] = field(default_factory=dict)
    pooled: Mapping[str, float] = field(default_factory=dict)
    summaries: Mapping[str, float] = field(default_factory=dict)
    deviations: Mapping[str, float] = field(default_factory=dict)
    stopped: str = ""
    metric: str = "score"

    def frame(self, of: FrameOf = "scores") -> pandas.DataFrame:
        """Returns what the run has recorded in all its rounds.

        Args:
            of: `scores`: a row for each score, with a column for each metric; `tasks`: a row for each score and task;
                `clients`: a row for each client and round with its training, traffic and time; `rounds`: a row for each
                round; `observations`: a row for each value that the method itself reported.

        Raises:
            ConfigError: `of` is none of these.
            CheckpointError: the folder is no longer that of a run.
        """
        return run_folder.load_run(self.folder).frame(of)

    def figures(self) -> Figures:
        """Returns the figures of the run's report by name.

        Raises:
            CheckpointError: the folder is no longer that of a run.
        """
        from fedguild.report.html import run_figures

        return Figures(run_figures(run_folder.load_run(self.folder)))

    def _repr_html_(self) -> str:
        from fedguild.report.html import run_fragment

        return run_fragment(run_folder.load_run(self.folder))


@dataclass(frozen=True)
class Comparison:
    """Several configs over several seeds.

    Attributes:
        folder: Parent folder of the runs.
        tables: Column -> its table; one without a name, if the comparison has no columns.
        runs: Column -> row -> the folders of its runs, in the order of their seeds.
        pages: Column -> its page.
        name: The name of the built-in table; empty for other comparisons.
        scores: Row of the built-in table -> the score that its overview shows.
        overview: The Markdown file with the tables; beside it are `table.tex` and `table.csv`.

    Examples:
        >>> import fedguild
        >>> small = ["federation.clients=4", "federation.rounds=1", "training.steps=1", "evaluation.max_examples=2"]
        >>> comparison = fedguild.compare(
        ...     ["flame/tiny-tasks", "fedit/tiny-tasks-ranks"], *small, seeds=[0], output="runs/compared"
        ... )
        >>> comparison.run("flame-tiny-tasks", seed=0).rounds
        1
        >>> list(comparison.frame())
        ['row', 'score', 'metric', 'seed', 'value', 'difference']
        >>> comparison.pages[""].name
        'comparison.html'
    """

    folder: Path
    tables: Mapping[str, ComparisonTable] = field(repr=False)
    runs: Mapping[str, Mapping[str, Sequence[Path]]] = field(repr=False)
    pages: Mapping[str, Path]
    name: str = ""
    scores: Mapping[str, str] = field(default_factory=dict, repr=False)
    overview: Path | None = None

    def __str__(self) -> str:
        """Returns the tables as Markdown, as `print` shows them."""
        grids = [grid.to_markdown() for table in self.tables.values() for grid in table.grids()]
        return "\n".join([*grids, *(f"Warning: {warning}" for warning in self.warnings)])

    def differing(self, column: str | None = None) -> pandas.DataFrame:
        """Returns settings × rows: every setting, besides the method, that not all rows have with the same value.

        Args:
            column: The column; by default the first.
        """
        import pandas

        from fedguild.report.differing import differing_settings

        runs = self._loaded(next(iter(self.runs)) if column is None else column)
        return pandas.DataFrame.from_dict(differing_settings(runs), orient="index", columns=list(runs), dtype=object)

    def differing_grid(self) -> Grid | None:
        """Returns the same for the first column as a printable table; None if nothing differs."""
        from fedguild.report.differing import differing_grid

        return differing_grid(self._loaded(next(iter(self.runs))))

    @property
    def warnings(self) -> list[str]:
        """The reasons why the comparison may be unfair, one sentence each."""
        return [
            f"{column}: {warning}" if column else warning
            for column, table in self.tables.items()
            for warning in table.warnings
        ]

    def frame(self) -> pandas.DataFrame:
        """Returns a row for each column, row, seed and score (a budget's, or a mean), with the metric that it is of.

        `difference` is relative to the reference, paired by seed; missing if the reference has no such score.
        """
        import pandas

        return pandas.DataFrame(
            [
                {
                    **({"column": column} if column else {}),
                    "row": row.label,
                    "score": name,
                    "metric": table.metric,
                    "seed": seed,
                    "value": value,
                    "difference": None
                    if (against := table.row(table.reference).scores.get(name, {}).get(seed)) is None
                    else value - against,
                }
                for column, table in self.tables.items()
                for row in table.rows
                for name, seeds in row.scores.items()
                for seed, value in seeds.items()
            ]
        )

    def figures(self) -> Figures:
        """Returns the figures of the comparison's pages by name; `column/name` if there are several columns."""
        from fedguild.report.html import comparison_figures_of

        return Figures(
            {
                f"{column}/{name}" if column else name: svg
                for column, table in self.tables.items()
                for name, svg in comparison_figures_of(table, self._loaded(column)).items()
            }
        )

    def run(self, row: str, seed: int | None = None, column: str | None = None) -> RunResult:
        """Returns one of the runs.

        Args:
            row: The config's name.
            seed: Its seed; by default the first.
            column: The column; by default the first.

        Raises:
            ConfigError: there is no such run.
        """
        where = next(iter(self.runs)) if column is None else column
        rows = self.runs.get(where, {})
        if row not in rows:
            raise ConfigError(f"The comparison has no run '{row}'.", nearest(row, rows))
        folders = {run_folder.load_run(folder).seed: folder for folder in rows[row]}
        if seed is not None and seed not in folders:
            raise ConfigError(f"'{row}' has no run with seed {seed}.", f"Known: {', '.join(map(str, folders))}.")
        return load_run(folders[next(iter(folders)) if seed is None else seed])

    def _loaded(self, column: str) -> dict[str, list[Run]]:
        return {row: [run_folder.load_run(folder) for folder in folders] for row, folders in self.runs[column].items()}

    def _repr_html_(self) -> str:
        from fedguild.report.html import comparison_fragment

        return "\n".join(comparison_fragment(table, column) for column, table in self.tables.items())


@dataclass(frozen=True)
class Sweep:
    """One config with every combination of some settings, over several seeds.

    Attributes:
        folder: Parent folder of the runs.
        table: The settings with their scores, the best, and the score that chose it.
        runs: Name of a setting -> the folders of its runs, in the order of their seeds.
        page: Its page.

    Examples:
        >>> import fedguild
        >>> small = ["federation.clients=2", "federation.rounds=1", "training.steps=1", "evaluation.max_examples=2"]
        >>> found = fedguild.sweep("fedit/tiny-tasks", *small, "method.rank=1,2", seeds=[0], output="runs/ranks")
        >>> list(found.best), found.page.name
        (['method.rank'], 'sweep.html')
        >>> found.frame()["method.rank"].tolist()
        ['1', '2']
    """

    folder: Path
    table: SweepTable = field(repr=False)
    runs: Mapping[str, Sequence[Path]] = field(repr=False)
    page: Path

    @property
    def best(self) -> Mapping[str, str]:
        """Key -> value of the best setting, as overrides have them."""
        return self.table.best.values

    def frame(self) -> pandas.DataFrame:
        """Returns a row for each setting and seed: values by key, the seed, the score, its metric and the folder."""
        import pandas

        return pandas.DataFrame(
            [
                {**one.values, "seed": seed, "score": value, "metric": self.table.metric, "folder": str(folder)}
                for one in self.table.settings
                for (seed, value), folder in zip(
                    one.scores(self.table.score).items(), self.runs[one.label], strict=False
                )
            ]
        )

    def figures(self) -> Figures:
        """Returns a line over the values of one swept key, or a heat map over two; none for more."""
        return Figures({"sweep": self.table.figure()} if len(self.table.keys) <= 2 else {})

    def _repr_html_(self) -> str:
        said = "".join(f"<p>{html.escape(sentence)}</p>" for sentence in self.table.sentences())
        return said + str(self.frame().to_html()) + self.figures()._repr_html_()


@dataclass(frozen=True)
class Costs:
    """The costs of a config, from the model's config and the number of a client's examples.

    Attributes:
        profile: The figures of each tier of clients, and of the server.
        assumed_examples: Whether the number of a client's examples is an assumption.
    """

    profile: Profile
    assumed_examples: bool = False

    def frame(self) -> pandas.DataFrame:
        """Returns a row for each tier: parameters, FLOPs, bytes and memory of a client, and the server's; in bytes."""
        import pandas

        from fedguild.measuring.costs.rows import as_rows

        return pandas.json_normalize(as_rows(self.profile)).set_index("tier")

    def _repr_html_(self) -> str:
        shown = ("clients", "active_experts", "rank", "trainable_total", "flops_round", "upload_bytes")
        return str(self.frame()[[*shown, "download_bytes", "peak_memory_bytes"]].to_html())


@dataclass(frozen=True)
class Partition:
    """The clients' shares of the data, before anything is trained.

    Attributes:
        data: The corpus, and each client's training, validation and test examples.
        budgets: Each client's budget.
        dropped: Why examples of the source were left out -> how many.
        cut: How many training texts are longer than `data.max_length`; None if the tokenizer is not on this machine.
    """

    data: PreparedData = field(repr=False)
    budgets: Sequence[str]
    dropped: Mapping[str, int] = field(default_factory=dict)
    cut: Cut | None = None

    def frame(self) -> pandas.DataFrame:
        """Returns clients × labels, the number of examples; the client's budget and its split lead the columns."""
        import pandas

        table, sizes = self.data.partition_table, self.data.sizes()
        facts = pandas.DataFrame({"budget": list(self.budgets), **sizes})
        counts = pandas.DataFrame([list(row) for row in table.counts], columns=list(table.labels))
        return pandas.concat([facts, counts], axis=1).rename_axis("client")

    def figures(self) -> Figures:
        """Returns a figure of the examples by client and label."""
        import numpy

        from fedguild.report.figures import partition_bubbles

        table = self.data.partition_table
        names = [str(index) for index in range(len(table.counts))]
        return Figures({"partition": partition_bubbles(table.labels, numpy.array(table.counts), names)})

    def _repr_html_(self) -> str:
        return self.figures()._repr_html_() + str(self.frame().to_html())


def load_run(folder: str | Path) -> RunResult:
    """Returns the result of a run from its folder, without loading a model.

    Args:
        folder: The folder that `run` or `fedguild run` wrote; the run may be in progress.

    Raises:
        CheckpointError: the folder is not that of a run, a file of it is damaged, or it has no score yet.

    Examples:
        >>> import fedguild
        >>> result = fedguild.load_run("runs/first")
        >>> result.rounds, sorted(result.scores)
        (1, ['b1', 'b2', 'b3', 'b4'])
    """
    from fedguild.measuring.log.index import REPORT_FILE

    found = run_folder.load_run(Path(folder))
    last = [record for record in found.evaluations if (record.round, record.split) == (found.last_round, found.split)]
    return result_of(Path(folder), found.last_round, last, Path(folder) / REPORT_FILE)


def result_of(folder: Path, number: int, records: Sequence[Record], report: Path) -> RunResult:
    """Returns the result of a run after a round, from the records of that round."""
    scored = [record for record in records if isinstance(record, EvaluationRecord)]
    scores, own_scores, trained_scores, received_scores, pooled_scores, summaries = (
        {record.name: record.score for record in scored if record.scope == scope} for scope in SCOPES
    )
    deviations = {
        record.name: record.metrics["deviation"]
        for record in scored
        if record.scope == "summary" and "deviation" in record.metrics
    }
    mean = next((summaries[name] for name in HEADLINES if name in summaries), 0.0)
    return RunResult(
        folder,
        number,
        scores,
        mean,
        report,
        own=own_scores,
        trained=trained_scores,
        received=received_scores,
        pooled=pooled_scores,
        summaries=summaries,
        deviations=deviations,
        stopped=stopping_reason(folder),
        metric=metric_name(record.metric for record in scored),
    )


def stopping_reason(folder: Path) -> str:
    """Returns why a callback stopped a run; empty if none did.

    Raises:
        CheckpointError: the file that holds it is damaged.
    """
    path = folder / STOPPED
    if not path.is_file():
        return ""
    try:
        return str(json.loads(path.read_text("utf-8"))["reason"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} is damaged.", "Remove it to let the run go on.") from error


def divergence(folder: Path) -> str:
    """Returns how the training of a run diverged; empty if it did not, or has been resumed since."""
    path = folder / DIVERGED
    return str(json.loads(path.read_text("utf-8"))["reason"]) if path.is_file() else ""


def has_begun(folder: Path) -> bool:
    """Whether the run in a folder has reached its first checkpoint.

    A folder without one, and without a record of a round, is left over from a start that failed or was killed; a new
    start may use it.
    """
    from fedguild.measuring.log.records import RunLog
    from fedguild.server import checkpoint

    if not (folder / CONFIG).is_file():
        return False
    if checkpoint.latest(folder / CHECKPOINTS) is not None:
        return True
    return any(record.round > 0 for record in RunLog(folder).read())


def write_stopping_reason(folder: Path, number: int, reason: str) -> None:
    write_json(folder / STOPPED, {"round": number, "reason": reason})
