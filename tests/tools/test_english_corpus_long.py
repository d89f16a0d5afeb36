"""The text that the English model has read has none of the questions that it is tested on."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

DATA = Path(__file__).parents[2] / "../shared/data"
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(not (DATA / "english").is_dir(), reason="the corpus and the data sets are not here"),
]

WORDS = 13
"""Words in a row that count as taken over, as in the evaluation of GPT-3 (T. Brown et al., 2020, appendix C)."""
FAMILIAR = {
    "alpagasus/claude_t45.test.json": 3,
    "dolly/databricks-dolly-3k.test.jsonl": 7,
    "natural_instructions/tasks/task002_quoref_answer_generation.json": 2,
}
"""Runs of words that anybody may write: the counties of Ireland, the names of two acts of Congress."""


def runs_of(text: str) -> Iterator[tuple[str, ...]]:
    words = re.findall(r"[a-z0-9]+", text.lower())
    return zip(*(words[start:] for start in range(WORDS)), strict=False)


def test_no_test_question_is_in_the_corpus() -> None:
    """But for a few lists of names in instructions' texts, of which no table on this model is made."""
    owners: dict[int, str] = {}
    files = [path for path in DATA.rglob("*") if path.suffix in {".csv", ".json", ".jsonl"}]
    tests = [path for path in files if "test" in f"{path.parent.name} {path.stem}" or path.parent.name == "tasks"]
    assert len(tests) > 10
    for path in tests:
        for run in runs_of(path.read_text("utf-8")):
            owners[hash(run)] = str(path.relative_to(DATA))
    assert len(owners) > 100_000
    found: dict[str, set[tuple[str, ...]]] = {}
    for path in (DATA / "english").glob("*.txt.gz"):
        for run in runs_of(gzip.decompress(path.read_bytes()).decode("utf-8")):
            if (owner := owners.get(hash(run))) is not None:
                found.setdefault(owner, set()).add(run)
    assert found.keys() <= FAMILIAR.keys(), found
    assert all(len(runs) <= FAMILIAR[owner] for owner, runs in found.items()), found
