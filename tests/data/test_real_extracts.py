"""The loaders on extracts of the real datasets, in their original files, where these are at hand."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedguild.data import load_corpus

DATA = Path(__file__).parents[2] / "../shared/data"
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="the extracts are not part of the repository")


def load(name: str, train: str, test: str | None = None, **options: Any):
    return load_corpus(name, train=str(DATA / train), test=None if test is None else str(DATA / test), **options)


def test_ag_news_is_the_same_in_both_layouts():
    original, hub = load("ag_news", "ag_news/ag_news_csv"), load("ag_news", "ag_news/hub_schema")
    assert (len(original.train), len(original.test), len(hub.train)) == (3000, 1000, 3000)
    assert set(Counter(example.label for example in original.train).values()) == {750}
    assert original.test == hub.test


def test_snli_is_the_same_in_both_layouts():
    tsv = load("snli", "snli/snli_cad_original_train.tsv", "snli/snli_1.0_test.jsonl")
    minimal = load("snli", "snli/snli_train_minimal.jsonl")
    pairs = zip(tsv.train, minimal.train, strict=True)
    assert sum(a == b for a, b in pairs) >= 1640  # the others kept the TSV's quotes when they were converted
    assert (len(tsv.train), len(tsv.test)) == (1666, 1000 - 17)
    assert len(load("snli", "snli/snli_1.0_dev.jsonl").train) == 1289 - 16


def test_dolly_has_eight_categories():
    corpus = load("dolly", "dolly", "dolly/alpagasus_dolly_3k_schema_sample.json")
    assert (len(corpus.train), len(corpus.test)) == (2495, 50)
    assert len({example.label for example in corpus.train}) == 8
    assert {example.label for example in corpus.test} <= {example.label for example in corpus.train}


def test_alpagasus():
    corpus = load("alpaca", "alpagasus", top_labels=5)
    assert (len(corpus.train), len(corpus.test)) == (2997, 500)  # three have an empty output
    counts = Counter(example.label for example in corpus.train)
    assert len(counts) == 6
    assert counts["generate"] > 100


def test_natural_instructions():
    corpus = load("natural_instructions", "natural_instructions/tasks", "natural_instructions/tasks_test")
    assert (len(corpus.train), len(corpus.test)) == (2668, 834)
    assert len({example.task for example in corpus.train}) == 10
    largest = load("natural_instructions", "natural_instructions/tasks", "natural_instructions/tasks_test", max_tasks=8)
    assert Counter(example.task for example in largest.train).most_common()[-1][1] == 300
    assert {example.task for example in largest.test} == {example.task for example in largest.train}


def test_commonsense_task_from_the_instruction_agrees_with_the_source(tmp_path: Path):
    mix = DATA / "commonsense_train/commonsense_mix_3k.json"
    named = load("commonsense", str(mix.relative_to(DATA)), "commonsense_test")
    assert (len(named.train), len(named.test)) == (3000, 7500)
    assert Counter(example.task for example in named.test)["openbookqa"] == 500
    assert all(example.response == example.choices[example.answer or 0] for example in named.train + named.test)
    (tmp_path / "alone.json").symlink_to(mix.resolve())
    guessed = load_corpus("commonsense", train=str(tmp_path / "alone.json")).train
    pooled = {"ARC-Easy": "arc_openbookqa", "ARC-Challenge": "arc_openbookqa", "openbookqa": "arc_openbookqa"}
    pairs = zip(named.train, guessed, strict=True)
    agreement = [pooled.get(name.task, name.task) == guess.task for name, guess in pairs]
    assert sum(agreement) >= 2990  # a few ARC questions have three answers, like Social IQa


def test_hellaswag():
    corpus = load("hellaswag", "hellaswag", top_labels=3)
    assert (len(corpus.train), len(corpus.test)) == (2700, 1000)
    assert {example.label for example in corpus.train} == {
        "Personal Care and Style",
        "Family Life",
        "Food and Entertaining",
        "other",
    }
    assert all(len(example.choices) == 4 for example in corpus.test)
