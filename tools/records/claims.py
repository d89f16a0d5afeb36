"""The papers' claims by recorded cells: paired differences, a word for each, and what the seeds could have shown."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Literal, get_args

from fedguild.config.table import ONLY_COLUMN, Claim, Table
from fedguild.core.score_names import TITLES
from fedguild.measuring.log.folder import MEANS
from fedguild.measuring.scores.statistics import FEWEST_SEEDS, Spread, half_width, paired_difference
from fedguild.report import units
from tools.records.cells import CellRecord, nats_per_token
from tools.records.summary import by_row, cost_ratios

Word = Literal["holds", "does not hold", "undecided at this scale", "not recorded", "no verdict"]
VERDICTS: tuple[Word, ...] = get_args(Word)
Values = Callable[[CellRecord], Mapping[str, float]]
"""What is compared: score -> its value, the score itself or another figure of the same model and examples."""
PERPLEXITY_SAYS: Mapping[Word, str] = {
    "holds": "agrees",
    "does not hold": "disagrees",
    "undecided at this scale": "undecided",
    "not recorded": units.MISSING,
    "no verdict": units.MISSING,
}
"""A verdict by nats per token -> what perplexity says of the claim."""
OLDER = "†"
"""Marks a verdict by nats on clients' scores whose records have their mean perplexity, and not their mean nats."""
ROUNDING = 1e-9
"""A deviation of scores below this is rounding."""


def count_verdicts(table: Table, records: Sequence[CellRecord], unjudged: Collection[str] = ()) -> dict[Word, int]:
    """Returns verdict -> how many claims have it, each column counted."""
    words = [word for claim in table.claims for word in _by_column(table, claim, records, unjudged).values()]
    return {word: words.count(word) for word in VERDICTS}


def claims_in_short(table: Table, records: Sequence[CellRecord], unjudged: Collection[str] = ()) -> list[list[str]]:
    """Returns a line for each claim: claim, verdict by score, verdict by nats per token, costs.

    Behind a verdict stands the difference that decides it: to the row over which the lead is smallest. An entry names
    the table's columns where they differ. Columns without a record are left out, and claims without such a column.
    """
    recorded = {record.column for record in records}
    lines = []
    for claim in table.claims:
        score, judged = claim.score or table.score, _judged(claim, unjudged)
        columns = {
            column: by_row(table, [record for record in records if record.column == column])
            for column in claim.columns or table.columns
            if column in recorded
        }
        by_score, by_nats = dict[str, str](), dict[str, str]()
        for column, cells in columns.items():
            gaps = {row: difference(cells, claim.higher, row, score, claim.over) for row in judged}
            by_score[column] = _decided(gaps)
            saved = {row: _saved(cells, row, claim, score) for row in judged}
            without = not any(one.nats for members in cells.values() for one in members)
            older = without and score in MEANS.values() and any(saved.values())
            by_nats[column] = _decided(saved) + (f" {OLDER}" if older else "")
        if columns:
            costs = cost_ratios([*columns.values()], claim.higher, judged, score) if judged else units.MISSING
            lines.append([claim.says, _of_columns(by_score), _of_columns(by_nats), costs])
    return lines


def _of_columns(said: Mapping[str, str]) -> str:
    """Returns what all columns say, or what each says, on lines of their own."""
    if len(said) > 1 and len(set(said.values())) == 1:
        return next(iter(said.values()))
    return "<br>".join(text if column == ONLY_COLUMN else f"{column}: {text}" for column, text in said.items())


def _decided(differences: Mapping[str, Spread | None]) -> str:
    """Returns a verdict with the difference that decides it: `does not hold, -0.031 ± 0.012 (flexlora)`."""
    word = verdict(differences.values()) if differences else "no verdict"
    said = word.removesuffix(" at this scale")
    known = {row: gap for row, gap in differences.items() if gap is not None}
    if not known or word == "not recorded":
        return word
    enough = {row: gap for row, gap in known.items() if gap.count >= FEWEST_SEEDS}
    few = [row for row in known if row not in enough]
    if few and word != "does not hold":
        return f"{said}, fewer than {FEWEST_SEEDS} seeds in common with {', '.join(few)}"
    end = 1 if word == "does not hold" else -1  # of the interval that decides
    row, gap = min(enough.items(), key=lambda one: one[1].mean + end * half_width(one[1]))
    return f"{said}, {interval(gap)} ({row})"


def _saved(cells: Mapping[str, Sequence[CellRecord]], row: str, claim: Claim, score: str) -> Spread | None:
    """Returns how many nats per token a claim's higher row loses less than another."""
    return difference(cells, row, claim.higher, claim.over or score, score, values=nats_per_token)


def _by_column(table: Table, claim: Claim, records: Sequence[CellRecord], unjudged: Collection[str]) -> dict[str, Word]:
    """Returns column -> the verdict on a claim."""
    words: dict[str, Word] = {}
    score, judged = claim.score or table.score, _judged(claim, unjudged)
    for column in claim.columns or table.columns:
        cells = by_row(table, [record for record in records if record.column == column])
        gaps = [difference(cells, claim.higher, row, score, claim.over) for row in judged]
        words[column] = verdict(gaps) if judged else "no verdict"
    return words


def _judged(claim: Claim, unjudged: Collection[str]) -> list[str]:
    """Returns the rows that a verdict rests on; none where the claim is about a row without a verdict."""
    return [] if claim.higher in unjudged else [row for row in claim.lower if row not in unjudged]


def claims_markdown(table: Table, records: Sequence[CellRecord], unjudged: Collection[str] = ()) -> str:
    """Returns a table of the claims by column: a verdict, what perplexity says, the costs, and what could be shown.

    Args:
        table: The table.
        records: Its records.
        unjudged: Rows whose setting was chosen near chance. A verdict rests on the other rows; where there is none, or
            the claim is about such a row, there is no verdict.
    """
    lines = [
        "| claim | column | verdict | perplexity | costs | seeds | differences, 95 % interval | smallest shown |",
        "| :--- | :--- | :--- | :--- | :--- | ---: | :--- | ---: |",
    ]
    for claim in table.claims:
        for column in claim.columns or table.columns:
            cells = by_row(table, [record for record in records if record.column == column])
            score = claim.score or table.score
            found = {row: difference(cells, claim.higher, row, score, claim.over) for row in claim.lower}
            of = f", {TITLES.get(claim.over, claim.over)}" if claim.over else ""
            shown = "<br>".join(
                f"− {row}{of}: {interval(gap)}{'' if row not in unjudged else ', chosen near chance: no verdict'}"
                for row, gap in found.items()
            )
            where = "" if column == ONLY_COLUMN else column
            judged = _judged(claim, unjudged)
            gaps = [found[row] for row in judged]
            word = f"**{verdict(gaps)}**{_reservation(gaps)}" if judged else "**no verdict**"
            seeds, least = _seeds(found.values()), _could_show(gaps)
            by_judged = claim.model_copy(update={"lower": tuple(judged)})
            says = by_perplexity(cells, by_judged, score, seeds) if judged else units.MISSING
            one_row = set(claim.lower) == {claim.higher}
            costs = cost_ratios([cells], claim.higher, judged, score) if judged and not one_row else units.MISSING
            lines.append(f"| {claim.says} | {where} | {word} | {says} | {costs} | {seeds} | {shown} | {least} |")
    return "\n".join([*lines, ""])


def by_perplexity(cells: Mapping[str, Sequence[CellRecord]], claim: Claim, score: str, seeds: str = "") -> str:
    """Returns what perplexity says of a claim, by the rule of its verdict: the row is to lose fewer nats per token.

    It says by how many seeds where these are not the verdict's.

    Args:
        cells: Row -> its records.
        claim: The claim.
        score: The score of its higher row.
        seeds: How many seeds the verdict rests on; empty: not compared.
    """
    saved = [_saved(cells, row, claim, score) for row in claim.lower]
    says, of = PERPLEXITY_SAYS[verdict(saved)], _seeds(saved)
    return says if says == units.MISSING or of == (seeds or of) else f"{says} ({of} seeds)"


def _could_show(differences: Iterable[Spread | None]) -> str:
    """Returns the lead that would have been shown over every row: the largest half width of the intervals.

    It is `–` where a difference is missing, has one seed, or does not vary.
    """
    every = list(differences)
    widths = [half_width(gap) for gap in every if gap is not None and gap.count > 1 and not _is_constant(gap)]
    return f"{max(widths):.3f}" if widths and len(widths) == len(every) else units.MISSING


def _reservation(differences: Iterable[Spread | None]) -> str:
    """Returns what a verdict is to be read with: too few seeds, or differences that do not vary."""
    every = list(differences)
    known = [gap for gap in every if gap is not None]
    enough = [gap for gap in known if gap.count >= FEWEST_SEEDS]
    if verdict(every) != "does not hold":
        if len(known) < len(every):
            return ""  # not recorded
        if len(enough) < len(known):
            return f", with fewer than {FEWEST_SEEDS} seeds"
    return ", without any spread over the seeds" if any(_is_constant(gap) for gap in enough) else ""


def _is_constant(gap: Spread) -> bool:
    """Whether several seeds gave one and the same difference, which leaves the interval without a width."""
    return gap.count > 1 and gap.std < ROUNDING


def _seeds(differences: Iterable[Spread | None]) -> str:
    """Returns how many seeds a verdict rests on: 5, or 3 to 5 where the differences have unequally many."""
    counts = sorted({0 if gap is None else gap.count for gap in differences})
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def verdict(differences: Iterable[Spread | None]) -> Word:
    """Returns what the paired differences of a row to those that it should be above say.

    It does not hold where some difference's 95 % interval lies below 0, of `FEWEST_SEEDS` seeds or more, whatever the
    others are; and it holds where all intervals lie above 0. With fewer seeds it is undecided.
    """
    every = list(differences)
    enough = [gap for gap in every if gap is not None and gap.count >= FEWEST_SEEDS]
    if any(gap.mean + half_width(gap) < 0 for gap in enough):
        return "does not hold"
    if not every or any(gap is None for gap in every):
        return "not recorded"
    holds = len(enough) == len(every) and all(gap.mean - half_width(gap) > 0 for gap in enough)
    return "holds" if holds else "undecided at this scale"


def scores_of(record: CellRecord) -> Mapping[str, float]:
    """Returns the scores of a record."""
    return record.scores


def difference(
    cells: Mapping[str, Sequence[CellRecord]],
    row: str,
    other: str,
    score: str,
    over: str | None = None,
    values: Values = scores_of,
) -> Spread | None:
    """Returns the spread of the seedwise differences of two rows in a score; None without a seed that both have.

    Args:
        cells: Row -> its records.
        row: The row.
        other: The row that it is compared with.
        score: The score.
        over: The other row's score; None: the same.
        values: What is compared of the scores' models; by default the scores.
    """
    first, second = (
        {record.seed: found[of] for record in cells.get(name, ()) if of in (found := values(record))}
        for name, of in ((row, score), (other, over or score))
    )
    return paired_difference(first, second)


def smallest_shown(cells: Mapping[str, Sequence[CellRecord]], reference: str, score: str) -> float | None:
    """Returns the smallest mean difference to the reference that the seeds could have shown.

    It is the half width of the 95 % interval at the typical spread: the root mean square over the rows of the deviation
    of their paired differences. None with fewer than two seeds.
    """
    gaps = [difference(cells, row, reference, score) for row in cells if row != reference]
    known = [gap for gap in gaps if gap is not None and gap.count > 1]
    if not known:
        return None
    typical = math.sqrt(fmean(gap.std**2 for gap in known))
    return half_width(Spread(0.0, typical, min(gap.count for gap in known)))


def interval(gap: Spread | None) -> str:
    """Returns a difference with its 95 % interval: `+0.062 ± 0.077`; alone with one seed, `–` where it is None."""
    if gap is None:
        return units.MISSING
    return f"{units.signed(gap.mean)} ± {half_width(gap):.3f}" if gap.count > 1 else units.signed(gap.mean)
