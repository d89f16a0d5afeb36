"""Remarks on recorded tables, against values worked out by hand."""

from __future__ import annotations

from typing import Any

import pytest

from fedguild.config.table import Table
from fedguild.core.errors import DataError
from tests.tools.records import cell_record
from tools.records.cells import CellRecord
from tools.records.remarks import render_overview, render_remark

TABLE = {
    "preset": "{row}/tiny-tasks",
    "reference": "ours",
    "rows": {"theirs": {}, "ours": {}, "more": {"score": "trained"}, "unrun": {}},
    "columns": {"short": {}, "long": {}},
}
SEEDS = {
    "theirs": [(0.45, 0.20, 0.30), (0.50, 0.30, 0.35), (0.55, 0.40, 0.40)],
    "ours": [(0.50, 0.40, 0.60), (0.60, 0.40, 0.62), (0.70, 0.40, 0.64)],
    "more": [(0.7, 0.7, 0.9)],
}
"""Row -> mean, b4 and trained of its seeds: ours leads by 0.05, 0.1 and 0.15, at b4 by 0.2, 0.1 and 0."""
PERPLEXITY = {"theirs": {"b1": 2.0, "b4": 8.0}, "ours": {"b1": 1.5, "b4": 1.5}, "more": {"trained": 1.26}}


def record(row: str, seed: int, column: str = "short", **changes: Any) -> CellRecord:
    mean, last, trained = SEEDS[row][seed]
    given: dict[str, Any] = {
        "scores": {"b1": 2 * mean - last, "b4": last, "mean": mean, "trained": trained},
        "perplexity": PERPLEXITY[row],
        "observations": {"drift / layer 1": {1: 0.08 + 0.01 * seed, 4: 0.05}} if row == "ours" else {},
        "training_flops": {} if row == "more" else {"b1": 3e9, "b4": 800e6},
        "upload_bytes": 3e6 if row == "ours" else 2e6,
        "download_bytes": 3e6,
    }
    return cell_record(row, seed, column, **{**given, **changes})


def records() -> list[CellRecord]:
    """Three seeds of short, but one of `more`; of long two of ours, and a third one of theirs."""
    short = [record(row, seed) for row, of_row in SEEDS.items() for seed in range(len(of_row))]
    return [*short, record("ours", 0, "long"), record("ours", 1, "long"), record("theirs", 2, "long")]


def rendered(text: str, given: list[CellRecord] | None = None, **changes: Any) -> str:
    table = Table.model_validate({**TABLE, **changes})
    return render_remark(text, "one/two", {"one/two": (table, records() if given is None else given)})


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("gain('ours', 'theirs', 'short')", "0.100 ± 0.124"),
        ("gain('theirs', 'ours', 'short')", "−0.100 ± 0.124"),
        ("gain('ours', 'theirs', 'short', 'b4')", "0.100 ± 0.248"),
        ("gain('ours', 'theirs', 'short', over='trained')", "0.250 ± 0.124"),
        ("gain('ours', 'ours', 'short', 'trained', over='mean')", "0.020 ± 0.199"),
        ("gain('ours', 'ours', 'short')", "0.000 ± 0.000"),
        ("gain('more', 'ours', 'short')", "0.200"),
        ("mean_gain('ours', 'theirs', 'short')", "0.100"),
        ("mean_gain('theirs', 'ours', 'short', digits=2)", "−0.10"),
        ("mean_gain('ours', 'theirs', 'short', ['mean', 'trained'])", "0.100 to 0.270"),
        ("mean_gain('theirs', ['ours', 'more'], 'short')", "−0.250 to −0.100"),
        ("mean_gain('theirs', 'ours', 'short', digits=0)", "0"),
        ("half_width('ours', 'theirs', 'short')", "0.124"),
        ("half_width('ours', 'theirs', 'short', ['mean', 'b4'])", "0.124 to 0.248"),
        ("half_width('ours', 'theirs', 'short', ['mean', 'b4'], digits=2) | max", "0.25"),
    ],
)
def test_a_gain_is_the_paired_difference_with_its_interval(call: str, written: str) -> None:
    """t(0.975, 2 degrees) = 4.302653: a deviation of 0.05 over three seeds gives 0.1242, of 0.1 0.2484, of 0.08 0.1987.

    No plus, and a true minus, which no zero has; one seed has no interval.
    """
    assert rendered(f"{{{{ {call} }}}}") == written


@pytest.mark.parametrize(
    ("call", "said", "hint"),
    [
        (
            "score('our', 'short')",
            "the table has no row 'our'",
            "Did you mean 'ours'? Known: more, ours, theirs, unrun.",
        ),
        ("score('unrun', 'short')", "row 'unrun' has no records in short", "Recorded there: theirs, ours, more."),
        ("score('ours', 'shor')", "the table has no column 'shor'", "Did you mean 'short'? Known: long, short."),
        ("score('ours')", "the table has several columns, and none is named", "Known: short, long."),
        ("score('ours', 'short', 'b9')", "ours has no score 'b9'", "Known: b1, b4, mean, trained."),
        ("perplexity('ours', 'short', 'mtal')", "ours has no perplexity of the score 'mtal'", "Known: b1, b4, mean."),
        ("gain('ours', 'their', 'short')", "the table has no row 'their'", "Did you mean 'theirs'?"),
        ("gain('ours', 'unrun', 'short')", "row 'unrun' has no records in short", "Recorded there"),
        ("gain('ours', 'theirs', 'short', over='mtal')", "theirs has no score 'mtal'", "Known: b1, b4"),
        ("gain('ours', 'theirs', 'long')", "ours and theirs have no seed in common in long", ""),
        ("gain('ours', ['theirs', 'more'], 'short')", "gain is of one row over one other", ""),
        ("nats('ours', ['theirs', 'theirs'], 'short', 'b1')", "nats is of one row over one other", ""),
        ("nats('ours', 'theirs', 'short', 'mtal')", "ours has no perplexity of the score 'mtal'", "Known: b1, b4"),
        ("half_width('more', 'ours', 'short')", "more and ours have one seed in common, which has no interval", ""),
        ("cost('down', 'ours', 'short', budget='b1')", "down is of all budgets", ""),
        ("cost('upload', 'ours', 'short')", "the table has no cost 'upload'", "Known: FLOPs, down, up."),
        ("cost('FLOPs', 'more', 'short')", "more has no FLOPs on record", ""),
        ("cost('FLOPs', 'ours', 'short', budget='b2')", "ours has no budget with FLOPs 'b2'", "Known: b1, b4."),
        ("cost_ratio('FLOPs', 'ours', 'more', 'short')", "ours and more have FLOPs on record of no seed in common", ""),
        ("observation('drift', 'ours', 'short')", "ours has no observation 'drift'", "Known: drift / layer 1."),
        ("observation('drift / layer 1', 'ours', 'short', 'end')", "an observation has no end 'end'", "first, last."),
        ("lead('ours', 'theirs')", "'lead' is undefined", "It may call score, perplexity, gain, mean_gain,"),
        ("score('ours', colum='short')", "unexpected keyword argument 'colum'", "It may call score"),
        ("score('ours', 'short'", "unexpected '}'", "It may call score"),
    ],
)
def test_what_a_remark_names_wrongly_is_told_with_what_is_known(call: str, said: str, hint: str) -> None:
    with pytest.raises(DataError) as caught:
        rendered(f"{{{{ {call} }}}}")
    assert caught.value.message.startswith("The remark of one/two: ")
    assert said in caught.value.message
    assert hint in caught.value.hint


def test_an_overview_calls_several_tables_and_keeps_the_rows_of_a_table() -> None:
    recorded = {
        "one/two": (Table.model_validate(TABLE), records()),
        "one/three": (Table.model_validate(TABLE), [record("ours", 0), record("theirs", 2)]),
    }
    text = """
        Ours gains {{ of('one/two').gain('ours', 'theirs', 'short') }},
        and {{ of('one/three').score('ours', 'short') }} is its score.

        | table | score |
        | --- | --- |
        {% set two = of('one/two') %}
        | two | {{ two.score('theirs', 'short') }} |
    """
    assert render_overview(text, "one", recorded) == (
        "Ours gains 0.100 ± 0.124, and 0.500 is its score.\n\n| table | score |\n| --- | --- |\n| two | 0.500 |"
    )
    with pytest.raises(DataError, match="The overview of one: there are no records of 'one/twoo'") as error:
        render_overview("{{ of('one/twoo').score('ours', 'short') }}", "one", recorded)
    assert "one/two" in error.value.hint
    with pytest.raises(DataError, match=r"The overview of one, of\('one/two'\): the table has no row 'our'"):
        render_overview("{{ of('one/two').score('our', 'short') }}", "one", recorded)
    with pytest.raises(DataError, match="The overview of one: 'score' is undefined") as error:
        render_overview("{{ score('ours', 'short') }}", "one", recorded)
    assert error.value.hint == "It may call of."
