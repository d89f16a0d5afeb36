"""Every method on SmolLM2 or on the mixture of experts made from it, which `make smollm2` writes: a small run each."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import fedguild
from fedguild.config import axes, load_config
from fedguild.core.errors import DivergedError, ModelError
from fedguild.core.layout import CHECKPOINTS
from fedguild.measuring.log.records import EvaluationRecord, RoundRecord, RunLog
from fedguild.methods import METHODS
from fedguild.runs import experiment
from fedguild.server import checkpoint
from tests.data.writing import write_csv
from tests.runs.runs import Killed, kill_at
from tests.runs.test_exporting import code_of

MODELS = Path("models")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        not (MODELS / "smollm2-135m").is_dir() or not (MODELS / "smollm2-moe").is_dir(),
        reason="There is no models/smollm2-135m or models/smollm2-moe here: `make smollm2` writes them.",
    ),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]
TOPICS = (
    ("The team won the final in extra time.", "The striker scored twice."),
    ("The bank raised its interest rate.", "Shares of the company fell."),
    ("A telescope found a new planet.", "The chip has a billion transistors."),
    ("The president met the prime minister.", "The parliament voted on the treaty."),
)
SMALL = (
    "federation.clients=2",
    "federation.rounds=2",
    "federation.budgets=[{name: large, active_experts: 8, rank: 4}, {name: small, active_experts: 1, rank: 2}]",
    "training.steps=1",
    "training.epochs=null",
    "training.batch_size=2",
    "training.learning_rate=1e-4",
    "training.gradient_accumulation_steps=1",
    "data.max_samples=null",
    "data.max_length=64",
    "data.partition={scheme: iid, minimum: 4}",
    "data.split={validation: 0.1, test: 0.1, test_source: corpus}",
    "evaluation.answer_mode=likelihood",
    "evaluation.perplexity=true",
    "evaluation.max_examples=2",
    "evaluation.every=2",
    "evaluation.eval_on_start=false",
)
OPTIONS = {
    "fedamole": ["method.experts=8"],
    "fedalign-moe": ["method.statistics_tokens=64"],
    "fedmoe": ["method.stage_one_rounds=1", "method.memory={small: 0.7}"],
    "fedprompt": ["method.tokens=8"],
    "fedptuning": ["method.tokens=8"],
    "pfl-moe": ["method.gate_epochs=0.1", "method.personal_epochs=0.1"],
    "ub-smoe": ["method.gating=native"],  # the published weights are too large for these experts
}
"""Method -> options of a small run; other methods run with their presets' options."""
PROMPT = "The capital of France is"
NO_FORM = {"fedprompt", "fedptuning"}
"""Methods with soft prompts, which no exported form holds."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """AG News' layout: topic, title, text."""
    folder = tmp_path_factory.mktemp("news")
    rows = [[1 + i % 4, f"News {i}", TOPICS[i % 4][i // 4 % 2]] for i in range(48)]
    train, test = write_csv(folder / "train.csv", rows), write_csv(folder / "test.csv", rows[:8])
    return [f"data.train={train}", f"data.test={test}"]


def settings_on(model: str) -> list[str]:
    """A dense model has no active experts."""
    return [setting if model == "smollm2-moe" else re.sub(r"active_experts: \d, ", "", setting) for setting in SMALL]


@pytest.mark.parametrize("name", sorted(METHODS))
def test_a_method_trains_is_scored_saved_resumed_and_exported(
    name: str, data: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = "smollm2-moe" if "moe" in axes().methods[name].needs else "smollm2"
    config = load_config(f"{name}/{model}-ag_news", [*data, *settings_on(model), *OPTIONS.get(name, ())])
    folder = tmp_path / "run"
    with monkeypatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, folder)
    assert checkpoint.latest(folder / CHECKPOINTS) == 1
    experiment.resume(folder)

    records = RunLog(folder).read()
    rounds = [record for record in records if isinstance(record, RoundRecord)]
    assert [(record.round, len(record.participants), record.rejected) for record in rounds] == [(1, 2, []), (2, 2, [])]
    scored = [record for record in records if isinstance(record, EvaluationRecord)]
    assert scored
    for record in scored:
        assert 0 <= record.score <= 1, record
        assert record.scope == "summary" or 1 < record.metrics["perplexity"] < 1e6, record

    personal = not METHODS.load(name).facts.has_global_model
    chosen = {"client": "client-000"} if personal else {"budget": "large"}
    ours = fedguild.load_model(folder, **chosen)
    prompt = ours.tokenizer(PROMPT, return_tensors="pt").input_ids
    options = {"max_new_tokens": 4, "do_sample": False}
    said, logits = ours.generate(prompt, **options), logits_of(ours, prompt)
    assert prompt.shape[1] < said.shape[1] <= prompt.shape[1] + 4
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    if name in NO_FORM:
        with pytest.raises(ModelError, match="no exported form can hold it"):
            fedguild.export_model(folder, tmp_path / "out", **chosen)
        return
    exported = fedguild.export_model(folder, tmp_path / "out", **chosen)
    loaded = {"folder": str(exported.folder)}
    exec(code_of((exported.folder / "README.md").read_text()), loaded)
    theirs: Any = loaded["model"]
    torch.testing.assert_close(logits_of(theirs, prompt), logits, rtol=1e-3, atol=1e-3)


def test_published_gating_that_does_not_fit_the_experts_is_told(data: list[str], tmp_path: Path) -> None:
    one = "federation.budgets=[{name: small, active_experts: 1, rank: 2}]"
    config = load_config("ub-smoe/smollm2-moe-ag_news", [*data, *SMALL, one])
    with pytest.raises(DivergedError, match="bad before any training") as caught:
        experiment.run(config, tmp_path / "run")
    assert "method.gating=native" in str(caught.value)


@torch.no_grad()
def logits_of(model: Any, prompt: Tensor) -> Tensor:
    logits: Tensor = model(prompt).logits[0, -1].float()
    return logits
