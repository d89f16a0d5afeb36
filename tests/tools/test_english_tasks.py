"""`tools/english/finetune.py`: its baselines, intervals and table, and that a finished cell never runs again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

from fedguild.core.errors import ModelError
from fedguild.data import Example
from fedguild.model.packaged import ENGLISH, PACKAGED
from fedguild.runs import experiment
from tests.data.writing import write_csv
from tools.english.tasks import (
    NOT_MEASURED,
    START,
    Interval,
    TaskRecord,
    gain,
    interval_over_questions,
    interval_over_seeds,
    read_records,
    task_section,
    with_tasks,
)

baselines = pytest.importorskip("tools.english.baselines")
runs = pytest.importorskip("tools.english.runs")
finetune = pytest.importorskip("tools.english.finetune")
RECORDS = Path(__file__).parents[2] / "docs/methods/records/english"
COLOURS, NUMBERS = ("red", "green"), ("one", "two")


def question(prompt: str, answer: int, choices: tuple[str, ...] = COLOURS, task: str = "t") -> Example:
    return Example(prompt, choices[answer], choices[answer], task, choices, answer)


def colours(count: int) -> list[Example]:
    """Questions that one word decides: roses are red and leaves are green."""
    return [question(f"number {i} a {('rose', 'leaf')[i % 2]}", i % 2) for i in range(count)]


# Baselines.


def test_words_decide_what_they_can() -> None:
    answers, strength = baselines.words_answers(colours(40), colours(10), colours(9), baselines.prompt)
    assert answers == [0, 1] * 4 + [0]
    assert strength == min(baselines.STRENGTHS), "Of equal ones the strongest regularisation."


def test_an_answer_is_one_of_the_questions_own_choices() -> None:
    train = [*colours(20), *(question(f"rose {word}", i, NUMBERS) for i, word in enumerate(NUMBERS))]
    other = question("rose two", 1, NUMBERS)
    answers, _ = baselines.words_answers(train, colours(4), [other, colours(1)[0]], baselines.prompt)
    assert answers == [1, 0]
    assert baselines.majority_answers([*colours(3), other], [colours(2)[1], other]) == [0, 1]


def test_choices_of_their_own_are_ranked_by_their_words() -> None:
    def endings(i: int) -> Example:
        wrong, right = f"absurd {i}", f"sensible {i}"
        return question("same for all", 1 - i % 3 % 2, (right, wrong) if i % 3 % 2 else (wrong, right))

    train = [endings(i) for i in range(60)]
    test = [endings(i) for i in range(60, 70)]
    answers, _ = baselines.words_answers(train, train[:10], test, baselines.prompt)
    assert baselines.accuracy(answers, test) == 1.0
    assert baselines.majority_answers(train, test) == [1] * 10, "Two of three times the second is right."
    assert baselines.accuracy([1] * 10, test) == pytest.approx(0.7)


def test_the_hypothesis_is_read_without_the_premise() -> None:
    pair = question('Suppose A "b" sat. Can we infer that "He can "fly"."? Yes, No, or Maybe?\n', 0)
    assert baselines.hypothesis(pair) == 'He can "fly".'
    assert baselines.premise_and_hypothesis(pair).split() == [
        *("premise_Suppose", "premise_A", "premise_b", "premise_sat", "He", "can", '"fly".')
    ]
    with pytest.raises(ValueError, match="SNLI"):
        baselines.hypothesis(question("Is it?", 0))


def test_responses_are_found_or_counted() -> None:
    train = [
        Example("sort the green apples", "green", "a", "a"),
        Example("sort the red pears", "red", "a", "a"),
        Example("sort the red plums", "red", "a", "a"),
        Example("say hello", "hello", "b", "b"),
    ]
    test = [Example("which apples", "", "a", "a"), Example("hello there", "", "b", "b"), Example("x", "", "c", "c")]
    assert baselines.nearest_responses(train, test)[:2] == ["green", "hello"]
    assert baselines.majority_responses(train, test) == ["red", "hello", "red"]


def test_token_frequencies_are_counted_with_one_added() -> None:
    nats = baselines.token_frequency_nats([[0, 0], [1]], [[0], [2, 2]], vocabulary=4)
    assert nats == pytest.approx(-(math.log(3 / 7) + 2 * math.log(1 / 7)) / 3)


# Intervals.


def test_the_interval_over_seeds_is_students() -> None:
    values = [0.02, 0.05, 0.03]
    expected = stats.t.interval(0.95, 2, np.mean(values), stats.sem(values))
    found = interval_over_seeds(values)
    assert (found.low, found.high) == pytest.approx(expected)
    assert found.mean == pytest.approx(np.mean(values))


def test_the_interval_over_questions_is_that_of_a_mean_and_of_a_ratio() -> None:
    rng = np.random.default_rng(0)
    differences = rng.choice([-1.0, 0.0, 1.0], size=400, p=[0.1, 0.6, 0.3])
    found = interval_over_questions(differences.tolist())
    assert (found.low, found.high) == pytest.approx(
        stats.norm.interval(0.95, differences.mean(), stats.sem(differences))
    )
    tokens = rng.integers(1, 30, size=400).astype(float)
    nats = 0.5 * tokens + rng.normal(size=400) * np.sqrt(tokens)
    ratio = interval_over_questions(nats.tolist(), tokens.tolist())
    draws = [rng.integers(0, 400, size=400) for _ in range(4000)]
    bootstrap = [nats[draw].sum() / tokens[draw].sum() for draw in draws]
    assert ratio.mean == pytest.approx(nats.sum() / tokens.sum())
    assert (ratio.low, ratio.high) == pytest.approx(np.quantile(bootstrap, [0.025, 0.975]), abs=0.01)


def record(model: str, seed: int | None, right: list[float] | None = None, **changes: Any) -> TaskRecord:
    settings = {
        "learning_rate": 0.001,
        "epochs": 2,
        "learning_rates": [0.001, 0.003],
        "most_epochs": 3,
        "limit": None,
        "train_examples": 2700,
        "validation_examples": 300,
        "test_examples": 1000,
    }
    right = right or []
    scores = {"accuracy": sum(right) / len(right)} if right else {"accuracy": 0.25}
    questions = {"accuracy": right} if right else {}
    given = TaskRecord("news", "News", model, seed, "abc", scores, questions, settings if seed is not None else {})
    return replace(given, **changes)


def answers(right: int, of: int = 1000) -> list[float]:
    return [1.0] * right + [0.0] * (of - right)


def test_a_gain_is_paired_and_certain_only_with_every_interval_above_zero() -> None:
    one = [record("pretrained", 0, answers(600)), record("random", 0, answers(560)), record("majority", None)]
    found = gain(one, "accuracy")
    assert found is not None
    assert (found.mean, found.seeds, found.over_seeds, found.is_certain) == (pytest.approx(0.04), (0,), None, True)
    assert found.over_questions.low == pytest.approx(0.04 - 1.96 * math.sqrt(0.04 * 0.96 / 1000), abs=1e-4)
    two = [*one, record("pretrained", 1, answers(600)), record("random", 1, answers(590)), record("random", 2, [0, 1])]
    found = gain(two, "accuracy")
    assert found is not None
    assert found.seeds == (0, 1)
    assert found.over_questions.low > 0 > found.over_seeds.low  # type: ignore[union-attr]
    assert not found.is_certain
    assert gain(one[1:], "accuracy") is None
    worse = gain([record("pretrained", 0, answers(500)), record("random", 0, answers(600))], "accuracy")
    assert worse is not None
    assert not worse.is_certain


def test_the_gain_in_perplexity_is_the_fall_in_nats_per_token() -> None:
    def generated(model: str, nats: list[float]) -> TaskRecord:
        questions = {"rouge_l": [0.1, 0.2], "nats": nats, "tokens": [2, 8]}
        return record(model, 0, scores={"rouge_l": 0.15, "perplexity": math.exp(sum(nats) / 10)}, questions=questions)

    found = gain([generated("pretrained", [4.0, 16.0]), generated("random", [6.0, 24.0])], "perplexity")
    assert found is not None
    assert found.mean == pytest.approx(1.0)
    assert found.over_questions.mean == pytest.approx(1.0)


# The table.


def records() -> list[TaskRecord]:
    return [
        record("pretrained", 0, answers(600)),
        record("random", 0, answers(560)),
        record("words", None, scores={"accuracy": 0.8}),
        record("majority", None),
    ]


def test_the_section_says_scores_gain_and_effort() -> None:
    section = task_section(records())
    assert "| News | accuracy | 0.600 | 0.560 | 0.800 | – | 0.250 |" in section
    assert "| News | accuracy | +0.040 | 1 | [+0.028, +0.052] | – | yes |" in section
    assert "- News: 2,700 training examples, 300 for validation, 1,000 test questions.\n  Chosen" in section
    assert "pretrained 0.001 × 2; random 0.001 × 2; from 0.001, 0.003 × 1 to 3." in section
    even = [record("pretrained", 0, answers(560)), *records()[1:]]
    assert "| **no** |" in task_section(even)
    assert "| not measured |" in task_section(records()[2:])
    seeds = [*records(), record("pretrained", 1, answers(640)), record("random", 1, answers(560))]
    assert "| News | accuracy | 0.620 ± 0.028 | 0.560 ± 0.000 | 0.800 | – | 0.250 |" in task_section(seeds)


def test_a_card_gets_the_section_once_and_keeps_the_rest() -> None:
    card = "# Model\n\nIt is small.\n\n## Text and attribution\n\nBooks.\n"
    first = with_tasks(card, [])
    assert first == (
        f"# Model\n\nIt is small.\n\n## What fine-tuning reaches\n\n<!-- tasks -->\n{NOT_MEASURED}<!-- end -->\n\n"
        "## Text and attribution\n\nBooks.\n"
    )
    second = with_tasks(first, records())
    assert task_section(records()) in second
    assert NOT_MEASURED not in second
    assert with_tasks(second, []) == first
    assert with_tasks("# Model\n", []).startswith("# Model\n\n## What fine-tuning reaches\n\n")


def test_records_are_read_back_and_those_of_other_weights_left_out(tmp_path: Path) -> None:
    ours, other = records()[0], replace(records()[1], weights="other")
    ours.write(tmp_path / "a.json")
    other.write(tmp_path / "b.json")
    assert read_records(tmp_path) == [ours, other]
    assert read_records(tmp_path, "abc") == [ours]
    (tmp_path / "c.json").write_text('{"task": "news"}')
    with pytest.raises(ModelError, match=r"c\.json is not a record"):
        read_records(tmp_path)


def test_the_packaged_cards_table_is_that_of_the_records() -> None:
    path = PACKAGED[ENGLISH] / "README.md"
    card = path.read_text() if path.exists() else ""
    if START not in card:
        pytest.skip("no weights are packaged, or their card has no table yet")
    weights = finetune.sha256(PACKAGED[ENGLISH] / "model.safetensors")
    assert with_tasks(card, read_records(RECORDS, weights)) == card


def test_an_interval_shows_both_signs() -> None:
    assert str(Interval(0.0, -0.01, 0.0123)) == "[-0.010, +0.012]"


# The script.


def test_of_equal_settings_the_cheapest_is_chosen() -> None:
    tried = [runs.Candidate(*each) for each in ((1e-3, 3, 0.7), (3e-3, 2, 0.7), (1e-3, 2, 0.7), (1e-3, 1, 0.6))]
    assert runs.best(tried) == tried[2]


@pytest.fixture
def session(english_stand_in: Path, tmp_path: Path) -> Any:
    """A session on a small random OLMoE and forty made-up articles."""
    folder = tmp_path / "data/ag_news/hub_schema"
    folder.mkdir(parents=True)
    rows: list[list[object]] = [[f"{('war', 'goal', 'bank', 'chip')[i % 4]} {i}", i % 4] for i in range(40)]
    write_csv(folder / "train.csv", [["text", "label"], *rows])
    write_csv(folder / "test.csv", [["text", "label"], *rows[:8]])
    effort = finetune.Effort(learning_rates=(1e-2,), epochs=2, limit=None)
    output = tmp_path / "out"
    (output / "records").mkdir(parents=True)
    return finetune.Session(tmp_path / "data", output, output / "records", english_stand_in, "abc", effort)


@pytest.mark.usefixtures("no_report")
def test_a_set_is_measured_once(
    session: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = finetune.SETS["ag_news"]

    def measure_all() -> None:
        finetune.measure_baselines(session, task)
        for model in ("pretrained", "random"):
            finetune.measure_model(session, task, model, 0)

    measure_all()
    found = {one.model: one for one in read_records(session.records)}
    assert found.keys() == {"pretrained", "random", "words", "majority"}
    assert found["majority"].scores == {"accuracy": 0.25}
    assert found["words"].scores["accuracy"] > 0.5
    ours = found["pretrained"]
    assert (ours.settings["train_examples"], ours.settings["validation_examples"]) == (36, 4)
    assert len(ours.questions["accuracy"]) == 8
    folder = session.run(task, "pretrained", 0, 1e-2)
    scored = experiment.evaluate(folder, round=ours.settings["epochs"], split="test")
    assert scored.mean == pytest.approx(ours.scores["accuracy"])
    assert len({(one["learning_rate"], one["epochs"]) for one in ours.settings["validation"]}) == 2
    before = {path: path.read_bytes() for path in session.records.iterdir()}
    for module in (experiment, finetune):
        monkeypatch.setattr(module, "run" if module is experiment else "prepare_data", None)
    measure_all()
    assert {path: path.read_bytes() for path in session.records.iterdir()} == before
    with pytest.raises(SystemExit, match="another effort"):
        finetune.check_effort(replace(session, effort=finetune.Effort((1e-2,), 3, None)), list(found.values()))
    assert "ag_news.pretrained.0: accuracy" in capsys.readouterr().out
