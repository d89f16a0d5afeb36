"""The generator of task families: right answers, determinism, and a test set that no training set touches."""

from __future__ import annotations

import itertools

import pytest

from fedguild.core.errors import DataError
from fedguild.core.seeding import numpy_rng
from fedguild.data.corpora import tasks
from fedguild.data.corpora.tasks.words import CATEGORIES, DICTIONARY, NEGATIVE, POSITIVE
from fedguild.data.example import Example


def drawn(name: str, count: int = 200) -> list[Example]:
    return list(itertools.islice(tasks.draw(name, numpy_rng(3, name)), count))


def shown(example: Example) -> list[str]:
    """The words or digits that the question lists."""
    return example.prompt.split("\n")[1].split(":")[1].split()


def category(word: str) -> str:
    return next(name for name, members in CATEGORIES.items() if word in members)


def answer(name: str, items: list[str]) -> str:
    """The right response, worked out from the question another way than the generator does."""
    match name:
        case "reverse":
            return " ".join(items[::-1])
        case "rotate":
            return " ".join(items[1:] + items[:1])
        case "translate":
            return " ".join(DICTIONARY[word] for word in items)
        case "translate_back":
            back = {lumo: english for english, lumo in DICTIONARY.items()}
            return " ".join(back[word] for word in items)
        case "sum":
            return str(sum(map(int, items)))
        case "above_twenty":
            return "yes" if sum(map(int, items)) > 20 else "no"
        case "topic":
            return category(items[0])
        case "odd_one_out":
            return next(word for word in items if [category(other) for other in items].count(category(word)) == 1)
        case "repeated":
            return next(word for word in items if items.count(word) == 2)
        case "sentiment":
            good = items[-1] in POSITIVE
            assert good or items[-1] in NEGATIVE
            return "positive" if good != ("not" in items) else "negative"
    raise AssertionError(name)


@pytest.mark.parametrize("name", tasks.FAMILIES)
def test_responses_are_right(name: str) -> None:
    for example in drawn(name):
        assert example.response == answer(name, shown(example))


@pytest.mark.parametrize("name", tasks.FAMILIES)
def test_form_follows_the_kind(name: str) -> None:
    kind = tasks.FAMILIES[name].kind
    examples = drawn(name)
    for example in examples:
        assert example.label == example.task == name
        assert example.prompt.startswith(tasks.FAMILIES[name].instruction)
        assert example.prompt.endswith("\nAnswer:")
        if kind == "generated":
            assert (example.choices, example.answer) == ((), None)
        else:
            assert example.answer is not None
            assert example.choices[example.answer] == example.response
            assert len(set(example.choices)) == len(example.choices) >= 2
        if kind == "multiple_choice":
            assert set(example.choices) == set(shown(example))
    if kind == "classified":
        assert len({example.choices for example in examples}) == 1
        assert {example.response for example in examples} == set(examples[0].choices)


def test_half_of_the_families_are_seen_and_each_half_has_every_kind() -> None:
    assert len(tasks.SEEN) == len(tasks.UNSEEN) == 5
    for half in (tasks.SEEN, tasks.UNSEEN):
        assert {tasks.FAMILIES[name].kind for name in half} == {"classified", "generated", "multiple_choice"}


def test_train_and_test_are_distinct_and_disjoint_across_seeds() -> None:
    corpora = [tasks.load(train_examples=1_000, test_examples=500, seed=seed) for seed in (1, 2)]
    trains = [[example.prompt for example in corpus.train] for corpus in corpora]
    tests = [[example.prompt for example in corpus.test] for corpus in corpora]
    for prompts in (*trains, *tests):
        assert len(set(prompts)) == len(prompts)
    assert not set(trains[0] + trains[1]) & set(tests[0] + tests[1])


def test_an_unknown_family_is_named_with_the_nearest() -> None:
    with pytest.raises(DataError, match=r"'reverze'.*\n.*Did you mean 'reverse'"):
        tasks.load(families=("reverze",))


@pytest.mark.parametrize("families", [(), ("sum", "sum")])
def test_no_family_or_one_twice_is_refused(families: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="each task family once"):
        tasks.load(families=families)


def test_a_family_that_runs_out_of_questions_says_how_many_it_has() -> None:
    with pytest.raises(DataError, match=r"'sum' has only \d+ distinct questions, but 7000 are asked for"):
        tasks.load(train_examples=7_000, test_examples=0, families=("sum",))
