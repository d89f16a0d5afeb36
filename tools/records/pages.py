"""Pages of recorded cells: tables of scores, differences and costs, what was chosen before, and the claims."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from types import MappingProxyType

from fedguild.config.table import ONLY_COLUMN, Table
from fedguild.core.score_names import MEAN, MTAL, POOLED, RECEIVED, SUMMARIES, TITLES, TRAINED
from fedguild.measuring.scores.statistics import spread
from fedguild.report import units
from fedguild.report.grid import Cell, Grid
from fedguild.report.table_figures import Drawing
from tools.records.cells import (
    CellRecord,
    ChoiceRecord,
    best_together,
    mean_over_rows,
    nats_per_token,
    perplexities,
)
from tools.records.claims import (
    ROUNDING,
    Values,
    claims_markdown,
    difference,
    interval,
    scores_of,
    smallest_shown,
)
from tools.records.summary import SPENT, by_row, first_to_last, heading, spent

OF_CLIENTS = (TRAINED, RECEIVED, POOLED, MTAL)
"""Scores of the models that clients train, receive or use."""
ENDS = {"largest": max, "smallest": min}
NOT_CHOSEN = "The table's own runs chose no setting on validation examples."


def table_page(
    name: str,
    description: str,
    table: Table,
    records: Sequence[CellRecord],
    choices: Sequence[ChoiceRecord] = (),
    figures: Mapping[str, Drawing] = MappingProxyType({}),
    remark: str = "",
) -> str:
    """Returns a table as Markdown: what it means, a figure, scores, perplexity, paired differences and claims.

    Args:
        name: The table's name.
        description: What it is.
        table: The table.
        records: Its records.
        choices: What was chosen for its rows.
        figures: Path of a figure from the page -> what it draws.
        remark: What it means, in paragraphs of Markdown; may be empty.
    """
    parts = [f"# {description.rstrip('.')}\n", *([f"{remark.strip()}\n"] if remark.strip() else []), *_drawn(figures)]
    parts.append(f"{_commands(name, records)}\n")
    parts.append(f"{_chosen(choices) if choices else NOT_CHOSEN}\n")
    parts += [f"{sentence}\n" for sentence in _duration(records)]
    for column in table.columns:
        cells = by_row(table, [record for record in records if record.column == column])
        if not cells:
            continue
        parts += [f"## {column}\n"] if column != ONLY_COLUMN else []
        grids = [make(cells, table) for make in (score_grid, perplexity_grid, difference_grid, nats_grid)]
        parts += [grid.leading(TITLES[MEAN]).to_markdown() for grid in grids if grid is not None]
        parts.append(f"{_resolution(cells, table)}\n")
    if table.claims:
        parts.append(claims_markdown(table, records, chosen_near_chance(choices)))
    return "\n".join(parts)


def chosen_near_chance(choices: Sequence[ChoiceRecord]) -> list[str]:
    """Returns the rows whose own choice says nothing, as its best value is near chance."""
    return [choice.row for choice in choices if choice.is_near_chance and not choice.together]


def _drawn(figures: Mapping[str, Drawing]) -> list[str]:
    shown = []
    for path, drawing in figures.items():
        shown.append(f"![{drawing.says}, from the records]({path})\n")
        paired = "" if drawing.are_differences else " Verdicts rest on paired differences."
        shown.append(f"{drawing.caption}{paired}\n")
    return shown


def score_grid(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> Grid:
    """Returns rows × scores, figures and costs: the mean over seeds, with the sample deviation of scores.

    Args:
        cells: Row -> its records.
        table: The table.
    """
    columns, shows = _columns(cells, table), table.shows
    header = [Cell("row"), *(Cell(TITLES.get(name, name)) for name in columns)]
    header += [Cell(heading(name)) for name in shows]
    header += [*SPENT, Cell("seeds")]
    body, costs = [], spent(cells)
    for row, members in cells.items():
        line = [Cell(row)]
        for name in columns:
            scored = [record.scores[name] for record in members if name in record.scores]
            line.append(Cell(units.score_spread(spread(scored) if scored else None), strong=_best(cells, name) == row))
        line += [Cell(first_to_last([record.observations.get(name, {}) for record in members])) for name in shows]
        line += [*costs[row], Cell(str(len(members)))]
        body.append(tuple(line))
    last = next(iter(_all(cells)))
    title = f"{last.split.capitalize()} scores after round {last.round}, mean ± sample deviation over the seeds"
    title += "; figures in the first → the last round" if shows else ""
    return Grid(title, tuple(header), tuple(body))


def perplexity_grid(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> Grid | None:
    """Returns rows × scores: the perplexity's mean and sample deviation over seeds; None where none is recorded.

    That of the mean over budgets is the geometric mean of theirs.
    """
    columns = [name for name in _columns(cells, table) if any(name in nats_per_token(one) for one in _all(cells))]
    if not columns:
        return None
    header = (Cell("row"), *(Cell(TITLES.get(name, name)) for name in columns))
    body = []
    for row, members in cells.items():
        of_seeds = [perplexities(record) for record in members]
        found = [[of_seed[name] for of_seed in of_seeds if name in of_seed] for name in columns]
        body.append((Cell(row), *(Cell(_perplexity(values)) for values in found)))
    title = "Perplexity of the same models, mean ± sample deviation over the seeds; lower is better"
    return Grid(title, header, tuple(body))


def difference_grid(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> Grid | None:
    """Returns rows × scores: the mean difference to the reference, paired by seed, with its 95 % interval.

    None where the reference, or every other row, has no record.
    """
    return _differences(cells, table, "Differences in score, paired by seed, with the 95 % interval", scores_of)


def nats_grid(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> Grid | None:
    """Returns rows × scores: the mean difference of nats per token to the reference, with its 95 % interval.

    None where the reference, or every other row, has no perplexity.
    """
    of_clients = any(name in OF_CLIENTS for name in _columns(cells, table))
    older = of_clients and not all(record.nats for record in _all(cells))
    of = "log perplexity" + (", of clients' models that of the clients' mean" if older else "")
    title = f"Differences in nats per token ({of}), paired by seed, with the 95 % interval; lower is better"
    return _differences(cells, table, title, nats_per_token)


def _differences(cells: Mapping[str, Sequence[CellRecord]], table: Table, title: str, values: Values) -> Grid | None:
    """Returns rows × those of the scores in which some row has a difference to the reference; None without one."""
    reference = table.reference
    gaps = {
        row: {name: difference(cells, row, reference, name, values=values) for name in _columns(cells, table)}
        for row in cells
        if row != reference
    }
    columns = [name for name in _columns(cells, table) if any(of_row[name] is not None for of_row in gaps.values())]
    if not columns:
        return None
    header = (Cell("difference"), *(Cell(TITLES.get(name, name)) for name in columns))
    body = [
        (Cell(f"{row} − {reference}"), *(Cell(interval(of_row[name])) for name in columns))
        for row, of_row in gaps.items()
    ]
    return Grid(title, header, tuple(body))


def _resolution(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> str:
    found = smallest_shown(cells, table.reference, table.score)
    if len(cells) == 1:
        return "With one row there is no difference to show."
    if found is None:
        return "With one seed, or none in common, no difference can be shown."
    if found < ROUNDING:
        return "The differences are the same in every seed, which leaves open what these seeds could show."
    score = TITLES[table.score]
    return f"The smallest difference in the {score} score that these seeds could show of a typical row is {found:.3f}."


def _commands(name: str, records: Sequence[CellRecord]) -> str:
    """Returns the command that runs and records a table, and the one that runs it with what all records have set."""
    every = [record.overrides for record in records]
    shared = [override for override in (every[0] if every else ()) if all(override in each for each in every)]
    seeds = ",".join(str(seed) for seed in sorted({record.seed for record in records}))
    compare = " ".join(["fedguild compare", name, *shared, f"--seeds {seeds}"])
    but = ", without the settings of single rows and columns and so with other figures," if len(set(every)) > 1 else ""
    return f"`make tables TABLE={name}`, or{but} `{compare}`"


def _duration(records: Sequence[CellRecord]) -> list[str]:
    """Returns a sentence on how long the cells took, where that is recorded; two may be read from one run."""
    seconds = [record.seconds for record in records if record.seconds is not None]
    if not seconds:
        return []
    which = f"These {len(seconds)} cells" if len(seconds) == len(records) else f"{len(seconds)} of these cells"
    return [f"{which} took {units.duration(sum(seconds))} in all, each from its first round."]


def _chosen(choices: Sequence[ChoiceRecord]) -> str:
    """Returns sentences for each way of choosing: the values that were tried, the rows' best, and which are ends."""
    ways: dict[tuple[str, ...], list[ChoiceRecord]] = {}
    for choice in choices:
        way = (choice.setting, ", ".join(choice.tried), choice.score, choice.column, str(choice.seed))
        ways.setdefault((*way, *choice.settings), []).append(choice)
    sentences = []
    for (setting, values, score, column, seed, *settings), members in ways.items():
        where = "" if column == ONLY_COLUMN else f", {column}"
        where += f", with {' '.join(f'`{one}`' for one in settings)}" if settings else ""
        validated = f"by the {TITLES.get(score, score)} score on the validation examples"
        if members[0].together:
            means, best = mean_over_rows(members), best_together(members)
            tried = ", ".join(f"{value} ({mean:.3f})" for value, mean in means.items())
            sentences.append(
                f"`{setting}` was chosen for all rows together, among {tried}, {validated} in the mean over the "
                f"rows (seed {seed}{where}): {best}."
            )
            chosen = {}
            sentences += [f"That is the {end} value offered in this table." for end in _ends(members[0], best)]
        else:
            found = "; ".join(f"{choice.row} {choice.chosen}" for choice in members)
            sentences.append(
                f"`{setting}` was chosen for each row before, among {values}, {validated} (seed {seed}{where}): "
                f"{found}."
            )
            chosen = {choice.row: choice.chosen for choice in members}
        for end in ENDS:
            if rows := [row for row, value in chosen.items() if end in _ends(members[0], value)]:
                sentences.append(f"{', '.join(rows)} chose the {end} value offered in this table.")
    return "\n".join(sentences)


def _ends(choice: ChoiceRecord, value: str) -> list[str]:
    """Returns of which end a value is among those tried, where they are several numbers."""
    numbers = [one for one in choice.tried if _is_number(one)]
    if len(numbers) < 2:
        return []
    return [name for name, end in ENDS.items() if value == end(numbers, key=float)]


def _is_number(value: str) -> bool:
    try:
        float(value)
    except ValueError:
        return False
    return True


def _columns(cells: Mapping[str, Sequence[CellRecord]], table: Table) -> list[str]:
    """Returns the budgets in the order of the records, then the summaries that some record has.

    A column holds one protocol. So scores of the global model are left out of a table about the clients' models, since
    the mean of personal adapters is no model of anybody's; and MTAL is left out beside the scores as trained and as
    received, since it is one of them, which one depends on the method. What a claim or the table's own score is about
    stays.
    """
    names = {name: None for record in _all(cells) for name in record.scores}
    claimed = {*table.scores.values(), *(one for claim in table.claims for one in (claim.score, claim.over) if one)}
    budgets = [name for name in names if name not in SUMMARIES]
    columns = budgets + [name for name in SUMMARIES if name in names and (name != MEAN or len(budgets) != 1)]
    left_out = {MTAL} if {TRAINED, RECEIVED} <= names.keys() else set()
    if table.score in OF_CLIENTS:
        left_out |= {MEAN, *budgets}
    return [name for name in columns if name in claimed or name not in left_out]


def _all(cells: Mapping[str, Sequence[CellRecord]]) -> list[CellRecord]:
    return [record for members in cells.values() for record in members]


def _best(cells: Mapping[str, Sequence[CellRecord]], score: str) -> str | None:
    """Returns the row with the highest mean of a score, of those with the most seeds; None with a single such row."""
    scored = {
        row: of_row
        for row, members in cells.items()
        if (of_row := [record.scores[score] for record in members if score in record.scores])
    }
    most = max(map(len, scored.values()), default=0)
    means = {row: fmean(of_row) for row, of_row in scored.items() if len(of_row) == most}
    return max(means, key=lambda row: means[row]) if len(means) > 1 else None


def _perplexity(values: Sequence[float]) -> str:
    if not values:
        return units.MISSING
    over_seeds = spread(values)
    return f"{over_seeds.mean:.2f}" + (f" ± {over_seeds.std:.2f}" if over_seeds.count > 1 else "")
