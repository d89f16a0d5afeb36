"""Answers to a few held-out examples before and after training, which the report shows at every budget."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fedguild.measuring.log.samples import Sample, read_samples, write_samples
from fedguild.runs import experiment, scoring
from fedguild.runs.api.generating import open_generator
from tests.runs.runs import small_config

QUICK = ("federation.rounds=1", "training.steps=1", "evaluation.max_examples=4", "evaluation.max_new_tokens=4")


@pytest.fixture(autouse=True)
def _asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experiment, "sampled", scoring.sampled)


def test_a_run_keeps_what_every_budget_answers_before_and_after(olmoe_folder: Path, tmp_path: Path) -> None:
    experiment.run(small_config(olmoe_folder, *QUICK, "evaluation.samples=2"), tmp_path)
    found = read_samples(tmp_path)
    assert [(one.round, one.budget) for one in found] == [
        (number, budget) for number in (0, 1) for budget in ("large", "large", "small", "small")
    ]
    assert {one.prompt for one in found[:2]} == {one.prompt for one in found[6:]}
    said = open_generator(tmp_path, "small").stream(found[-1].prompt, 4, raw=True)
    assert "".join(said).strip() == found[-1].generated


def test_of_choices_the_likeliest_is_kept(olmoe_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"instruction": f"Is {n} even?", "response": ("yes", "no")[n % 2], "choices": ["yes", "no"]} for n in range(40)
    ]
    (tmp_path / "own.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = ("data.dataset=instructions", f"data.train={tmp_path / 'own.jsonl'}", "data.options={}")
    experiment.run(small_config(olmoe_folder, *QUICK, *data, "data.partition.scheme=iid"), tmp_path / "run")
    found = read_samples(tmp_path / "run")
    assert len(found) == 2 * 2 * 3
    assert {one.likeliest for one in found} <= {"yes", "no"}


@pytest.mark.parametrize(
    "override",
    ["evaluation.samples=0", "privacy={unit: example, noise_multiplier: 1.0, public: [sizes]}"],
    ids=["none are wanted", "the texts belong to protected clients"],
)
def test_no_answers_are_kept(olmoe_folder: Path, tmp_path: Path, override: str) -> None:
    settings = (*QUICK, "evaluation.split=validation", "data.split.validation=0.2", override)
    experiment.run(small_config(olmoe_folder, *settings, base="fedit/tiny-tasks"), tmp_path)
    assert not (tmp_path / "samples.json").exists()


def test_answers_of_an_earlier_end_are_replaced(tmp_path: Path) -> None:
    def answer(number: int) -> Sample:
        return Sample(round=number, budget="b1", prompt="p", reference="r", generated=f"after {number}")

    for number in (0, 2, 4):
        write_samples(tmp_path, [answer(number)])
    assert read_samples(tmp_path) == [answer(0), answer(4)]
