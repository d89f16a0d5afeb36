"""Every preset that ships runs a step: tiny ones as they are, others on a tiny model of the same architecture."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild import experiment
from fedguild.config import load_config, presets
from fedguild.config.loading import PRESETS_FOLDER
from fedguild.experiment import CHECKPOINTS
from fedguild.methods import METHODS
from fedguild.model.backbone import EMBEDDED
from fedguild.server import checkpoint
from fedguild.server.record import ClientRecord, EvaluationRecord, RoundRecord, RunLog
from tests.data.writing import write_csv, write_jsonl
from tests.experiment.runs import save_model

NAMES = [preset.name for preset in presets()]
ONE_STEP = [
    "federation.rounds=1",
    "training.steps=1",
    "training.epochs=null",
    "training.batch_size=2",
    "evaluation.max_examples=3",
    "evaluation.max_new_tokens=2",
]
GENERATED = "data.options={train_examples: 400, test_examples: 20}"
ROWS = 900
CATEGORIES = ("open_qa", "closed_qa", "brainstorming", "summarization")
VERBS = ("Write", "Name", "Sort", "Count", "Explain")
STAND_INS = {"allenai/OLMoE-1B-7B-0924": "olmoe", "huggyllama/llama-7b": "llama"}
"""Hub id -> architecture."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Corpus -> overrides that name small local files in its layout."""
    folder = tmp_path_factory.mktemp("data")
    dolly = [
        {"instruction": f"Add {i}.", "context": "", "response": str(i), "category": CATEGORIES[i % len(CATEGORIES)]}
        for i in range(ROWS)
    ]
    alpaca = [
        {"instruction": f"{VERBS[i % len(VERBS)]} {i}.", "input": "x" * (i % 3), "output": str(i)} for i in range(ROWS)
    ]
    news = [[1 + i % 4, f"Title {i}", f"Text {i}"] for i in range(ROWS)]
    return {
        "tasks": [GENERATED],
        "dolly": [f"data.train={write_jsonl(folder / 'dolly.jsonl', dolly)}"],
        "alpaca": [f"data.train={write_jsonl(folder / 'alpaca.jsonl', alpaca)}"],
        "ag_news": [
            f"data.train={write_csv(folder / 'train.csv', news)}",
            f"data.test={write_csv(folder / 'test.csv', news[:40])}",
        ],
    }


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> folder of a random model with as many active experts as the real one."""
    folder = tmp_path_factory.mktemp("models")
    return {
        "olmoe": save_model(folder / "olmoe", num_experts=16, num_experts_per_tok=8, num_hidden_layers=1),
        "llama": save_model(folder / "llama", "llama", num_hidden_layers=1),
    }


def test_every_file_of_the_folder_is_a_preset() -> None:
    assert len(NAMES) >= 16
    assert {PRESETS_FOLDER / f"{name}.yaml" for name in NAMES} == set(PRESETS_FOLDER.rglob("*.y*ml"))
    assert {name.split("/")[0] for name in NAMES} == set(METHODS)


@pytest.mark.parametrize("preset", NAMES)
def test_a_preset_runs_a_step(preset: str, data: dict[str, list[str]], models: dict[str, Path], tmp_path: Path) -> None:
    shipped = load_config(preset)
    assert preset.split("/")[0] == shipped.method.name
    model = shipped.model.path
    stand_in = [] if model == EMBEDDED else [f"model.path={models[STAND_INS[model]]}", "model.device=cpu"]
    config = load_config(preset, [*data[shipped.data.corpus], *stand_in, *ONE_STEP])
    result = experiment.run(config, tmp_path)
    assert result.scores.keys() == {budget.name for budget in config.federation.budgets}
    assert checkpoint.latest(tmp_path / CHECKPOINTS) == 1
    records = RunLog(tmp_path).read()
    (whole,) = [record for record in records if isinstance(record, RoundRecord)]
    trained = [record for record in records if isinstance(record, ClientRecord)]
    asked = config.federation.participation * config.federation.clients
    assert len(whole.participants) == asked
    assert whole.rejected == []
    assert [record.client for record in trained] == whole.participants
    assert {record.steps for record in trained} == {1}
    assert all(record.train_loss > 0 for record in trained)
    scores = [record for record in records if isinstance(record, EvaluationRecord) and record.scope == "budget"]
    assert {record.examples for record in scores} == {3}
    own = {budget.name: budget.active_experts for budget in config.federation.budgets}
    assert {record.name: record.active_experts or 0 for record in scores} == own
