"""`tools/english/finetune.py`: its baselines, intervals and table, and that a finished cell never runs again."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedguild.data import Example
from fedguild.model.packaged import ENGLISH, PACKAGED
from fedguild.runs import experiment
from tests.data.writing import write_csv
from tools.english.tasks import START, TaskRecord, gain, read_records, with_tasks

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


def records() -> list[TaskRecord]:
    return [
        record("pretrained", 0, answers(600)),
        record("random", 0, answers(560)),
        record("words", None, scores={"accuracy": 0.8}),
        record("majority", None),
    ]


def test_the_packaged_cards_table_is_that_of_the_records() -> None:
    path = PACKAGED[ENGLISH] / "README.md"
    card = path.read_text() if path.exists() else ""
    if START not in card:
        pytest.skip("no weights are packaged, or their card has no table yet")
    weights = finetune.sha256(PACKAGED[ENGLISH] / "model.safetensors")
    assert with_tasks(card, read_records(RECORDS, weights)) == card


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


def test_a_set_is_measured_once(session, monkeypatch, capsys):
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
