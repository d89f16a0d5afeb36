"""Corpora that are found: those that ship, and those of another package."""

import re
from pathlib import Path

import pytest

from fedguild.core.errors import ConfigError, DataError
from fedguild.data import CORPORA, load_corpus
from tests.plugins import install

GUIDE = Path(__file__).parents[2] / "docs/guides/data.md"
POEMS = '''
    """Poems: who wrote a line."""
    from fedguild.data.corpora import CorpusSpec
    from fedguild.data.corpora.table import read_table, text
    from fedguild.data.example import Example
    from fedguild.data.prompts import render


    def read(source, template, *, shout=False):
        for _, row in read_table(source).select({"line": ("line",), "poet": ("poet",)}):
            poet = text(row["poet"])
            answer = poet.upper() if shout else poet
            yield Example(render(template, text(row["line"])), answer, label=poet, task="poems")


    SPEC = CorpusSpec(
        kind="generate",
        layouts=("a table with line and poet",),
        metric="exact_match",
        read=read,
        options={"shout": "capital letters (false)"},
    )
'''
ENTRIES = """
    [fedguild.corpora]
    poems = verses.poems
    prose = verses.prose
    dolly = verses.poems
"""


@pytest.fixture(autouse=True)
def verses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with a corpus that works, one that is none, and one under a name that is taken."""
    sources = {"verses/__init__.py": "", "verses/poems.py": POEMS, "verses/prose.py": "SPEC = {'kind': 'generate'}\n"}
    install(monkeypatch, tmp_path / "verses", "verses", entry_points=ENTRIES, modules=sources)


def test_a_corpus_of_another_package_is_listed_and_loads(tmp_path: Path):
    poems = next(corpus for corpus in CORPORA.found() if corpus.name == "poems")
    assert (poems.title, poems.origin) == ("Poems: who wrote a line", "verses 1.2")
    path = tmp_path / "train.csv"
    path.write_text("line,poet\nI wandered lonely,Wordsworth\nTyger Tyger,Blake\n")
    corpus = load_corpus("poems", train=str(path), shout=True)
    assert [example.response for example in corpus.train] == ["WORDSWORTH", "BLAKE"]
    assert corpus.name == "poems"
    with pytest.raises(DataError, match=r"'poems' has no option 'shoot'\.\nDid you mean 'shout'"):
        load_corpus("poems", train=str(path), shoot=True)
    with pytest.raises(DataError, match=r"'poems' has no dataset of its own on the hub.*\nAccepted: a table with line"):
        load_corpus("poems")


def test_an_unknown_corpus_is_told_the_names_of_other_packages():
    with pytest.raises(DataError, match=r"no corpus 'poem'\.\nDid you mean 'poems'\?.*natural_instructions.*poems"):
        load_corpus("poem")


def test_what_is_no_corpus_is_refused_and_leaves_the_others_alone():
    with pytest.raises(
        ConfigError, match=r"corpus prose \(verses 1.2\) cannot be used: TypeError: a corpus is declared"
    ):
        load_corpus("prose")
    warnings = [corpus.warning for corpus in CORPORA.checked() if corpus.fault]
    assert [warning.split(":")[0] for warning in warnings] == [
        "dolly (verses 1.2) cannot be used",
        "prose (verses 1.2) cannot be used",
    ]
    assert CORPORA.load("dolly").hub is not None


def test_the_guide_has_a_row_for_every_corpus_that_ships():
    scored_by = {"choice": "likelihood", "generate": "generation", "mixed": "both"}
    rows = [re.findall(r"[^|]+", line) for line in GUIDE.read_text().splitlines() if line.startswith("| `")]
    rows = [[cell.strip(" `") for cell in row] for row in rows if len(row) == 5]
    specs = {corpus.name: CORPORA.load(corpus.name) for corpus in CORPORA.found() if corpus.origin == "fedguild"}
    assert sorted(row[0] for row in rows) == list(specs)
    for name, _, scored, _, source in rows:
        spec = specs[name]
        assert scored == scored_by[spec.kind]
        assert source == (str(spec.hub).split(":")[0] if spec.hub else "generated" if spec.generate else "a local file")
