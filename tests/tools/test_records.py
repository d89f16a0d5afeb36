"""Recorded cells: written and read again, and the page that follows from them alone, by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
from pydantic import ValidationError
from scipy import stats

from fedguild.config import Table
from fedguild.core.errors import DataError
from fedguild.measuring.log.folder import load_run
from fedguild.measuring.log.records import ObservationRecord
from fedguild.measuring.scores.statistics import Spread, half_width, spread
from fedguild.report.costs import budget_costs
from fedguild.report.observations import evenly
from tests.report.runs import write_run
from tools.records.cells import (
    CellRecord,
    ChoiceRecord,
    nats_per_token,
    read_records,
    record_of,
)
from tools.records.claims import by_perplexity, claims_markdown, smallest_shown, verdict
from tools.records.pages import table_page
from tools.records.summary import by_row

TABLE = Table.model_validate(
    {
        "preset": "flame/tiny-tasks",
        "reference": "ours",
        "rows": {"theirs": {}, "ours": {}, "unrun": {}},
        "claims": [
            {"says": "ours leads", "higher": "ours", "lower": ["theirs"]},
            {"says": "ours leads at b4", "higher": "ours", "lower": ["theirs"], "score": "b4"},
            {"says": "ours leads what was not run", "higher": "ours", "lower": ["unrun"]},
        ],
    }
)
SCORES = {"ours": [(0.5, 0.6), (0.6, 0.8), (0.7, 0.7)], "theirs": [(0.4, 0.7), (0.5, 0.7), (0.6, 0.7)]}
"""Row -> (mean, b4) of three seeds: means 0.1 apart in every seed, b4 by -0.1, +0.1 and 0."""


def records() -> list[CellRecord]:
    return [
        CellRecord(
            table="one/two",
            column="all",
            row=row,
            seed=seed,
            fingerprint="x",
            overrides=("evaluation.every=4",),
            fedguild="0.3.0",
            round=4,
            split="test",
            scores={"b1": mean, "b4": last, "mean": mean},
            perplexity={"b4": 3.0 + seed},
            training_flops={"b1": 2e9, "b4": 1e9},
            upload_bytes=2000.0,
            download_bytes=3000.0,
        )
        for row, scored in SCORES.items()
        for seed, (mean, last) in enumerate(scored)
    ]


def cells_of(line: str) -> list[str]:
    """The cells of a row of a table, as text."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


NATS = {"ours": [(0.2, 0.4), (0.3, 0.6), (0.2, 0.7)], "theirs": [(0.5, 0.7), (0.5, 0.8), (0.6, 0.8)]}
"""Row -> nats per token (b1, b4) of three seeds: theirs are 0.3, 0.2 and 0.4 higher at b1, 0.3, 0.2 and 0.1 at b4."""


def with_nats(record: CellRecord, nats: dict[str, list[tuple[float, float]]]) -> CellRecord:
    first, last = nats[record.row][record.seed]
    return record.model_copy(update={"perplexity": {"b1": math.exp(first), "b4": math.exp(last)}})


def perplexed() -> list[CellRecord]:
    """The records with those nats per token."""
    return [with_nats(record, NATS) for record in records()]


def over_seeds(nats: list[float]) -> str:
    """The mean of perplexities over the seeds with their sample deviation."""
    perplexity = [math.exp(of_seed) for of_seed in nats]
    return f"{fmean(perplexity):.2f} ± {stdev(perplexity):.2f}"


def student(gaps: list[float]) -> str:
    """A mean difference with its 95 % interval, by SciPy's own test."""
    low, high = stats.ttest_1samp(gaps, 0.0).confidence_interval(0.95)
    return f"{(low + high) / 2:+.3f} ± {(high - low) / 2:.3f}"


def test_the_interval_is_students() -> None:
    """t(0.975, 2 degrees) = 4.302653: three seeds with a deviation of 0.1 give 0.248414."""
    assert half_width(Spread(0.0, 0.1, 3)) == pytest.approx(4.302653 * 0.1 / math.sqrt(3), rel=1e-6)
    assert half_width(spread([0.3])) == math.inf


@pytest.mark.parametrize(
    ("gaps", "word"),
    [
        ([[0.1, 0.1, 0.1]], "holds"),
        ([[0.1, 0.2, 0.3]], "undecided at this scale"),
        ([[0.19, 0.2, 0.21]], "holds"),
        ([[0.19, 0.2, 0.21], [0.1, 0.2, 0.3]], "undecided at this scale"),
        ([[0.19, 0.2, 0.21], [-0.19, -0.2, -0.21]], "does not hold"),
        ([[0.0, 0.0, 0.0]], "undecided at this scale"),
        ([[0.5]], "undecided at this scale"),
        ([], "not recorded"),
    ],
)
def test_the_word_for_a_claim(gaps: list[list[float]], word: str) -> None:
    assert verdict([spread(gap) for gap in gaps]) == word


def test_two_seeds_that_agree_decide_nothing() -> None:
    assert verdict([spread([0.1, 0.1001])]) == verdict([spread([-0.1, -0.1001])]) == "undecided at this scale"
    assert verdict([spread([0.1, 0.1001, 0.1])]) == "holds"


def test_a_claim_about_a_row_that_was_not_run_has_no_verdict() -> None:
    assert verdict([spread([0.1, 0.1]), None]) == "not recorded"


def test_the_page_by_hand() -> None:
    page = table_page("one/two", "Two methods.", TABLE, records())
    lines = page.splitlines()
    compare = "`fedguild compare one/two evaluation.every=4 --seeds 0,1,2`"
    assert lines[:3] == ["# Two methods", "", f"`make tables TABLE=one/two`, or {compare}"]
    ours = next(line for line in lines if line.startswith("| ours |"))
    assert cells_of(ours) == [
        "ours",
        "**0.600 ± 0.100**",
        "**0.700 ± 0.100**",
        "**0.600 ± 0.100**",
        "1.00 G",
        "2.00 kB",
        "3.00 kB",
        "3",
    ]
    gaps = next(line for line in lines if line.startswith("| theirs − ours |"))
    assert cells_of(gaps)[1:] == [
        "−0.100 ± 0.000",
        "0.000 ± 0.248",
        "−0.100 ± 0.000",
    ]
    assert "The differences are the same in every seed" in page
    assert "could have shown is" not in page
    assert "unrun |" not in page.partition("| claim |")[0]
    claims = claims_markdown(TABLE, records()).splitlines()[2:]
    holds, undecided = "**holds**, without any spread over the seeds", "**undecided at this scale**"
    assert claims == [
        f"| ours leads |  | {holds} | – | equal | 3 | − theirs: +0.100 ± 0.000 | – |",
        f"| ours leads at b4 |  | {undecided} | undecided | equal | 3 | − theirs: 0.000 ± 0.248 | 0.248 |",
        "| ours leads what was not run |  | **not recorded** | – | – | 0 | − unrun: – | – |",
    ]


def test_nats_are_the_logarithm_of_perplexity_and_their_mean_that_over_all_budgets() -> None:
    record = perplexed()[0]
    assert nats_per_token(record) == pytest.approx({"b1": 0.2, "b4": 0.4, "mean": 0.3})
    some = record.model_copy(update={"perplexity": {"b4": 1.0, "trained": math.e}})
    assert nats_per_token(some) == pytest.approx({"b4": 0.0, "trained": 1.0}), "not all budgets have one"
    assert nats_per_token(record.model_copy(update={"perplexity": {}})) == {}


def test_perplexity_has_its_deviation_and_its_paired_difference_in_nats() -> None:
    """The mean over the budgets is of nats: e^0.3, e^0.45 and e^0.45 in the seeds of ours."""
    page = table_page("one/two", "Two methods.", TABLE, perplexed())
    title = "Differences in nats per token (log perplexity), paired by seed, with the 95 % interval; lower is better"
    levels, _, gaps = page.partition(f"**{title}**")
    levels = levels.partition(
        "**Perplexity of the same models, mean ± sample deviation over the seeds; lower is better**"
    )[2].partition("**Differences in score")[0]
    assert [cells_of(line) for line in levels.splitlines() if line.startswith(("| row |", "| ours |"))] == [
        ["row", "b1", "b4", "mean"],
        ["ours", *(over_seeds(column) for column in ([0.2, 0.3, 0.2], [0.4, 0.6, 0.7], [0.3, 0.45, 0.45]))],
    ]
    assert [cells_of(line) for line in gaps.partition("| claim |")[0].splitlines() if " − " in line] == [
        ["theirs − ours", student([0.3, 0.2, 0.4]), student([0.3, 0.2, 0.1]), student([0.3, 0.2, 0.25])]
    ]
    assert student([0.3, 0.2, 0.1]) == "+0.200 ± 0.248"
    alone = table_page("one/two", "Two.", TABLE, [record for record in perplexed() if record.seed == 0])
    assert "| ours | 1.22 | 1.49 | 1.35 |" in alone
    assert "| theirs − ours | +0.300 | +0.300 | +0.300 |" in alone
    without = [record.model_copy(update={"perplexity": {}}) for record in records()]
    assert "erplexity of" not in table_page("one/two", "Two.", TABLE, without)
    only_ours = [one for one in perplexed() if one.row == "ours"] + [one for one in without if one.row == "theirs"]
    assert "| theirs | – | – | – |" in table_page("one/two", "Two.", TABLE, only_ours)
    assert title not in table_page("one/two", "Two.", TABLE, only_ours)


@pytest.mark.parametrize(
    ("claim", "says"),
    [
        ({"higher": "ours", "lower": ["theirs"]}, "agrees"),
        ({"higher": "theirs", "lower": ["ours"]}, "disagrees"),
        ({"higher": "ours", "lower": ["theirs"], "score": "b1"}, "agrees"),
        ({"higher": "ours", "lower": ["theirs"], "score": "b4"}, "undecided"),
        ({"higher": "ours", "lower": ["theirs"], "score": "b1", "over": "b4"}, "agrees"),
        ({"higher": "theirs", "lower": ["ours"], "score": "b4", "over": "b1"}, "disagrees"),
        ({"higher": "ours", "lower": ["ours"], "score": "b1", "over": "b4"}, "undecided"),
        ({"higher": "ours", "lower": ["theirs", "unrun"], "score": "b1"}, "agrees"),
        ({"higher": "ours", "lower": ["theirs", "unrun"], "score": "b4"}, "disagrees"),
        ({"higher": "unrun", "lower": ["theirs", "ours"], "score": "b4"}, "agrees"),
        ({"higher": "ours", "lower": ["theirs", "unrun"]}, "undecided"),
        ({"higher": "ours", "lower": ["theirs"], "score": "trained"}, "–"),
    ],
)
def test_what_perplexity_says_of_a_claim(claim: dict[str, Any], says: str) -> None:
    """Nats of unrun are 0.2, 0.3 and 0.4 above ours at b1, 0.11, 0.1 and 0.1 below at b4: 0.098 ± 0.130 in the mean."""
    nats = {**NATS, "unrun": [(0.4, 0.29), (0.6, 0.5), (0.6, 0.6)]}
    more = [*perplexed(), *(one.model_copy(update={"row": "unrun"}) for one in perplexed() if one.row == "ours")]
    cells = by_row(TABLE, [with_nats(record, nats) for record in more])
    claimed = TABLE.claims[0].model_validate({"says": "it leads", **claim})
    assert by_perplexity(cells, claimed, claimed.score or TABLE.score) == says


def test_perplexity_says_nothing_with_too_few_seeds_or_none() -> None:
    cells = by_row(TABLE, perplexed())
    assert by_perplexity(cells, TABLE.claims[0], "mean") == "agrees"
    fewer = {**cells, "theirs": cells["theirs"][:2]}
    assert by_perplexity(fewer, TABLE.claims[0], "mean") == "undecided"
    assert by_perplexity(fewer, TABLE.claims[0], "mean", seeds="3") == "undecided (2 seeds)"
    assert by_perplexity({"ours": cells["ours"]}, TABLE.claims[0], "mean") == "–"


def test_a_claim_has_what_perplexity_says_beside_its_verdict() -> None:
    lines = claims_markdown(TABLE, perplexed()).splitlines()
    assert cells_of(lines[0])[2:5] == ["verdict", "perplexity", "costs"]
    assert [cells_of(line)[3] for line in lines[2:]] == ["agrees", "undecided", "–"]


def test_a_verdict_has_the_number_of_its_seeds() -> None:
    """Both rows share seeds 0 and 1 only, then seed 0 only: so few decide nothing, however alike they are."""
    for seeds in ((0, 1), (0,)):
        told = f"**undecided at this scale**, with fewer than 3 seeds | undecided | equal | {len(seeds)} |"
        some = [record for record in records() if record.row == "ours" or record.seed in seeds]
        assert told in claims_markdown(TABLE, some).splitlines()[3]
    both = {**TABLE.model_dump(), "claims": [{"says": "it leads", "higher": "ours", "lower": ["theirs", "unrun"]}]}
    two = [record for record in records() if record.row == "theirs" and record.seed < 2]
    more = [*records(), *(record.model_copy(update={"row": "unrun"}) for record in two)]
    assert "| 2 to 3 |" in claims_markdown(Table.model_validate(both), more)


def test_a_claim_over_several_rows_has_what_the_least_certain_difference_could_show() -> None:
    """b4's differences to theirs deviate by 0.1 over three seeds, to unrun by 0.05: half widths 0.248 and 0.124."""
    unrun = [record for record in records() if record.row == "ours"]
    shifted = [
        record.model_copy(update={"row": "unrun", "scores": {"b4": record.scores["b4"] + gap}})
        for record, gap in zip(unrun, (-0.05, 0.0, 0.05), strict=True)
    ]
    claim = {"says": "it leads", "higher": "ours", "lower": ["theirs", "unrun"], "score": "b4"}
    table = Table.model_validate({**TABLE.model_dump(), "claims": [claim]})
    (line,) = claims_markdown(table, [*records(), *shifted]).splitlines()[2:]
    assert line.endswith("| − theirs: 0.000 ± 0.248<br>− unrun: 0.000 ± 0.124 | 0.248 |")
    (line,) = claims_markdown(table, [*records(), *shifted[:1]]).splitlines()[2:]
    assert line.endswith("| – |")


def test_what_the_seeds_could_have_shown() -> None:
    """b4's differences deviate by 0.1 over three seeds: 0.248."""
    cells = by_row(TABLE, records())
    assert smallest_shown(cells, "ours", "b4") == pytest.approx(0.248414, abs=1e-6)
    alone = {row: members[:1] for row, members in cells.items()}
    assert smallest_shown(alone, "ours", "b4") is None
    assert "cannot show any difference" in table_page(
        "one/two", "Two.", TABLE, [m for ms in alone.values() for m in ms]
    )
    one_row = [record for record in records() if record.row == "ours"]
    assert "\nWith one row there is no difference to show.\n" in table_page("one/two", "Two.", TABLE, one_row)


def test_records_are_read_as_they_were_written(tmp_path: Path) -> None:
    for record in records():
        assert record.write(tmp_path) == tmp_path / "one" / "two" / "all" / record.row / f"seed-{record.seed}.json"
    found = read_records(tmp_path)
    assert sorted(found, key=lambda record: (record.row, record.seed)) == sorted(
        records(), key=lambda record: (record.row, record.seed)
    )
    assert table_page("one/two", "Two.", TABLE, found) == table_page("one/two", "Two.", TABLE, records()[::-1])


def test_a_file_that_is_no_record_is_named(tmp_path: Path) -> None:
    path = records()[0].write(tmp_path)
    moved = path.with_name("seed-9.json")
    path.rename(moved)
    with pytest.raises(DataError, match="is the record of one/two, all, ours, 0"):
        read_records(tmp_path)
    moved.write_text(json.dumps({"table": "one/two"}))
    with pytest.raises(DataError, match=r"seed-9\.json is not a record"):
        read_records(tmp_path)


def test_the_record_of_a_run(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "flame"))
    personal_run = load_run(write_run(tmp_path / "fedamole", name="fedamole", personal=True))
    found = record_of(run, "flame/one", "all", "flame", "abc", ["evaluation.every=2"])
    assert (found.seed, found.round, found.split, found.fingerprint) == (run.seed, run.last_round, "test", "abc")
    last = run.scored("budget", run.last_round)
    assert {name: found.scores[name] for name in last} == {name: record.score for name, record in last.items()}
    assert found.scores["mean"] == pytest.approx(sum(record.score for record in last.values()) / len(last))
    assert found.training_flops.keys() == last.keys()
    own = record_of(personal_run, "fedamole/one", "all", "fedamole", "abc")
    assert own.scores.keys() == {"mtal", "received"}
    use = {record.round: fmean(record.gini) for record in run.routing}
    assert found.observations["use of experts / Gini"] == pytest.approx(use, rel=1e-4) != {}
    assert found.observations["use of experts / entropy"].keys() == use.keys()
    assert own.upload_bytes
    assert own.training_flops == {name: cost.training_flops for name, cost in budget_costs(personal_run).items()} != {}


def test_the_record_of_a_run_without_a_global_model_has_its_clients_perplexity_and_the_figures(tmp_path: Path) -> None:
    """Perplexities 2, 4, 6, … of the clients in their order, of which the one without examples does not count."""
    run = load_run(write_run(tmp_path / "fedamole", name="fedamole", personal=True))
    own = run.scored("received", run.last_round)
    perplexity = {name: 2.0 + 2.0 * place for place, name in enumerate(own)}
    lone = next(iter(own))
    changed = [
        record.model_copy(
            update={
                "metrics": {"perplexity": perplexity[record.name]},
                "examples": 0 if record.name == lone else record.examples or 1,
            }
        )
        if record.scope == "received"
        else record
        for record in run.evaluations
    ]
    found = record_of(replace(run, evaluations=changed), "fedamole/one", "all", "fedamole", "abc")
    assert found.perplexity == {"received": pytest.approx(sum(range(4, 2 * len(own) + 1, 2)) / (len(own) - 1))}
    reported = {name.partition(" / ")[0] for name in found.observations} - {"use of experts"}
    assert reported == {one.name for one in run.observations} != set()
    assert found.seconds == pytest.approx(sum(record.seconds for record in run.rounds), abs=0.05) != 0
    found.write(tmp_path)
    assert read_records(tmp_path) == [found]


def observation(round: int, values: list[list[float]], columns: list[str]) -> ObservationRecord:
    rows = [f"layer {place}" for place in range(len(values))]
    return ObservationRecord(round=round, name="use", rows=rows, columns=columns, values=values)


def test_a_record_keeps_the_mean_of_each_column_of_a_figure_by_round(tmp_path: Path) -> None:
    """Columns that mean unlike things are never averaged; NaN and infinity count nowhere."""
    run = load_run(write_run(tmp_path / "flame"))
    seen = [
        observation(2, [[5.0, math.nan], [7.0, math.inf]], ["entropy", "Gini"]),
        observation(1, [[1.0, 0.25], [2.0, 0.5]], ["entropy", "Gini"]),
    ]
    found = record_of(replace(run, routing=[], observations=seen), "flame/one", "all", "flame", "abc").observations
    assert found == {"use / entropy": {1: 1.5, 2: 6.0}, "use / Gini": {1: 0.375}}
    plain = [observation(1, [[1.0], [2.0]], [])]
    rows = {"use / layer 0": {1: 1.0}, "use / layer 1": {1: 2.0}}
    assert record_of(replace(run, routing=[], observations=plain), "t", "all", "r", "f").observations == {
        "use": {1: 1.5},
        **rows,
    }


def test_a_figure_with_a_column_for_each_client_is_kept_as_its_mean_in_six_rounds(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "flame"))
    clients = [f"client {number}" for number in range(9)]
    seen = [observation(round, [[float(round + 9 * place) for place in range(9)]], clients) for round in range(1, 41)]
    found = record_of(replace(run, routing=[], observations=seen), "t", "all", "r", "f").observations
    assert found == {"use": {round: round + 36.0 for round in (1, 9, 17, 24, 32, 40)}}
    digits = [observation(1, [[1 / 3]], [])]
    assert (
        record_of(replace(run, routing=[], observations=digits), "t", "all", "r", "f").observations["use"][1]
        == 0.333333
    )


@pytest.mark.parametrize("count", [1, 2, 6, 7, 40])
def test_the_rounds_that_are_kept_are_evenly_spread_and_have_both_ends(count: int) -> None:
    kept = evenly(range(count), 6)
    assert kept == sorted(set(kept))
    assert (kept[0], kept[-1], len(kept)) == (0, count - 1, min(count, 6))
    gaps = [later - earlier for earlier, later in pairwise(kept)]
    assert max(gaps, default=0) - min(gaps, default=0) <= 1


@pytest.mark.parametrize("perplexity", [math.inf, math.nan])
def test_a_perplexity_that_is_not_finite_is_left_out(perplexity: float, tmp_path: Path) -> None:
    """What is written can be read again."""
    run = load_run(write_run(tmp_path / "flame"))
    known = record_of(run, "t", "all", "r", "f").perplexity
    budget = next(record for record in run.evaluations if record.scope == "budget" and record.round == run.last_round)
    broken = [
        one.model_copy(update={"metrics": {**one.metrics, "perplexity": perplexity}}) if one == budget else one
        for one in run.evaluations
    ]
    found = record_of(replace(run, evaluations=broken), "t", "all", "r", "f")
    assert found.perplexity == {name: value for name, value in known.items() if name != budget.name} != known
    found.write(tmp_path / "records")
    assert read_records(tmp_path / "records") == [found]


def test_a_record_has_the_version_that_ran_it(tmp_path: Path) -> None:
    run = load_run(write_run(tmp_path / "flame"))
    older = replace(run, environment={**run.environment, "fedguild": "0.1.0"})
    assert record_of(older, "t", "all", "r", "f").fedguild == "0.1.0"


def test_figures_of_the_method_stand_beside_the_score() -> None:
    """Over the seeds, kept goes from (0.2 + 0.3 + 0.4) / 3 to (0.6 + 0.7 + 0.8) / 3; Gini has one round."""
    seen = [
        record.model_copy(
            update={
                "observations": {
                    "kept": {1: 0.2 + 0.1 * record.seed, 6: 0.6 + 0.1 * record.seed},
                    "use / Gini": {6: 0.25},
                }
            }
        )
        if record.row == "ours"
        else record
        for record in records()
    ]
    table = TABLE.model_copy(update={"shows": ("kept", "use / Gini")})
    lines = [line.split(" | ") for line in table_page("one/two", "Two.", table, seen).splitlines() if "|" in line]
    header, ours, theirs = lines[0], *(next(line for line in lines if line[0] == f"| {row}") for row in SCORES)
    places = [header.index(name) for name in table.shows]
    assert places == [header.index("mean") + 1, header.index("mean") + 2]
    assert [ours[place] for place in places] == ["0.3 → 0.7", "0.25"]
    assert [theirs[place] for place in places] == ["–", "–"]


@pytest.mark.parametrize(
    ("score", "claimed", "columns"),
    [
        ("mean", None, ["b1", "b4", "mean", "as trained", "as received", "pooled"]),
        ("mean", "mtal", ["b1", "b4", "mean", "as trained", "as received", "pooled", "MTAL"]),
        ("trained", None, ["as trained", "as received", "pooled"]),
        ("pooled", "b4", ["b4", "as trained", "as received", "pooled"]),
        ("mtal", None, ["as trained", "as received", "pooled", "MTAL"]),
    ],
)
def test_a_column_has_one_protocol(score: Any, claimed: str | None, columns: list[str]) -> None:
    """A table about clients' models has no global model's scores, and no MTAL beside the two that it may be."""
    extra = dict.fromkeys(("trained", "received", "pooled", "mtal"), 0.5)
    scored = [
        record.model_copy(update={"scores": {**record.scores, **extra}, "perplexity": {"mtal": 2.0, "b4": 3.0}})
        for record in records()
    ]
    claims = () if claimed is None else (TABLE.claims[0].model_copy(update={"score": claimed}),)
    table = TABLE.model_copy(update={"score": score, "claims": claims})
    page = table_page("one/two", "Two.", table, scored).splitlines()
    scores, *of_perplexity = [cells_of(line)[1:] for line in page if line.startswith("| row |")]
    assert scores[: scores.index("training FLOPs (b4)")] == columns
    differences = [cells_of(line)[1:] for line in page if line.startswith("| difference |")]
    perplexed = [name for name in columns if name in ("b4", "MTAL")]
    assert of_perplexity == ([perplexed] if perplexed else [])
    assert differences == [columns, *of_perplexity]


def test_a_page_says_how_long_its_runs_took() -> None:
    timed = [record.model_copy(update={"seconds": 600.0}) for record in records()]
    assert "These 6 cells took 1 h 00 min in all" in table_page("one/two", "Two.", TABLE, timed)
    some = [timed[0], *records()[1:]]
    assert "1 of these cells took 10 min 00 s in all" in table_page("one/two", "Two.", TABLE, some)
    assert " took " not in table_page("one/two", "Two.", TABLE, records())


def test_the_command_of_rows_with_rates_of_their_own_says_that_it_lacks_them() -> None:
    first, *others = records()
    faster = first.model_copy(update={"overrides": (*first.overrides, "training.learning_rate=1e-2")})
    page = table_page("one/two", "Two.", TABLE, [faster, *others])
    assert (
        "or, but for what is set for single rows or columns, `fedguild compare one/two evaluation.every=4 --s" in page
    )


def test_a_page_says_which_rows_chose_an_end_of_what_was_offered() -> None:
    tried = {
        "theirs": {"1e-3": 0.2, "3e-3": 0.4, "1e-2": 0.3},
        "ours": {"1e-3": 0.2, "3e-3": 0.4, "1e-2": 0.5},
        "unrun": {"1e-3": 0.6, "3e-3": 0.4, "1e-2": 0.5},
    }
    choices = [
        ChoiceRecord(
            table="one/two",
            row=row,
            setting="training.learning_rate",
            column="all",
            seed=100,
            score="mean",
            tried=scores,
            fingerprints={},
        )
        for row, scores in tried.items()
    ]
    page = table_page("one/two", "Two.", TABLE, records(), choices)
    assert "theirs 3e-3; ours 1e-2; unrun 1e-3." in page
    assert "\nours chose the largest value offered in this table.\n" in page
    assert "\nunrun chose the smallest value offered in this table.\n" in page
    assert "chose the" not in table_page("one/two", "Two.", TABLE, records(), choices[:1])
    one = choices[1].model_copy(update={"tried": {"1e-2": 0.5}})
    assert "chose the" not in table_page("one/two", "Two.", TABLE, records(), [one])
    together = [choice.model_copy(update={"together": True}) for choice in choices]
    page = table_page("one/two", "Two.", TABLE, records(), together)
    told = "was chosen for all rows together, among 1e-3 (0.333), 3e-3 (0.400), 1e-2 (0.433), by the mean score on"
    assert told in page
    assert "in the mean over the rows (seed 100): 1e-2.\nThat is the largest value offered in this table.\n" in page
    page = table_page("one/two", "Two.", TABLE, records(), together[:1])
    assert "value offered" not in page
    assert "No setting was chosen" not in page
    assert "\nNo setting was chosen for this table on validation examples.\n" in table_page(
        "one/two", "Two.", TABLE, records()
    )
    words = choices[1].model_copy(update={"setting": "method.scale", "tried": {"own": 0.5, "common": 0.4}})
    assert "chose the" not in table_page("one/two", "Two.", TABLE, records(), [words])


def choice(tried: dict[str, list[float]], **more: Any) -> ChoiceRecord:
    """A choice of `theirs` by one seed or several."""
    first = {value: scores[0] for value, scores in tried.items()}
    repeats = {
        value: {f"{value} {place}": score for place, score in enumerate(scores[1:])} for value, scores in tried.items()
    }
    settings = {"setting": "training.learning_rate", "column": "all", "seed": 100, "score": "mean", "fingerprints": {}}
    return ChoiceRecord(table="one/two", row="theirs", tried=first, repeats=repeats, **{**settings, **more})


def test_the_best_value_is_the_best_in_the_mean_over_the_seeds() -> None:
    assert choice({"1e-3": [0.5], "3e-3": [0.4]}).chosen == "1e-3"
    assert choice({"1e-3": [0.5, 0.2, 0.2], "3e-3": [0.4, 0.4, 0.4]}).chosen == "3e-3"


@pytest.mark.parametrize(
    ("scores", "near"),
    [
        ([0.35, 0.25, 0.30], True),  # 0.05 above chance, with a deviation of 0.05
        ([0.36, 0.26, 0.31], False),
        ([0.25, 0.25, 0.25], True),
        ([0.9], True),
    ],
)
def test_a_choice_near_chance_is_one_whose_best_value_is_within_its_spread_of_it(
    scores: list[float], near: bool
) -> None:
    tried = {"1e-3": [score - 0.1 for score in scores], "3e-3": scores}
    assert choice(tried, chance=0.25).is_near_chance == near
    assert not choice(tried).is_near_chance


def test_a_row_chosen_near_chance_carries_no_verdict() -> None:
    """It holds over `theirs` with three seeds; where their rate was chosen near chance there is no verdict."""
    near = choice({"1e-3": [0.26, 0.24]}, chance=0.25)
    far = choice({"1e-3": [0.46, 0.44]}, chance=0.25)
    for made in (far, near):
        page = table_page("one/two", "Two.", TABLE, records(), [made])
        claims = [line for line in page.splitlines() if line.startswith("| ours leads |")]
        assert len(claims) == 1
        cells = cells_of(claims[0])
        assert cells[2].startswith("**no verdict**" if made is near else "**holds**")
        assert cells[-2].endswith(", chosen near chance: no verdict") == (made is near)
    other = TABLE.model_copy(update={"claims": (TABLE.claims[0].model_copy(update={"lower": ("theirs", "unrun")}),)})
    assert "**not recorded**" in claims_markdown(other, records(), ["theirs"]), "the rows that are left decide"
    assert "**no verdict**" in claims_markdown(TABLE, records(), ["ours"])


def test_a_claim_about_an_unknown_row_is_refused() -> None:
    values = {**TABLE.model_dump(), "claims": [{"says": "this", "higher": "ours", "lower": ["nobody"]}]}
    with pytest.raises(ValidationError, match="'this' names nobody"):
        Table.model_validate(values)
