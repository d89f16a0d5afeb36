"""The sets of `finetune.py`, and the fine-tuning of one client on one of them."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoTokenizer

from fedguild.config import Config, load_config
from fedguild.core.seeding import numpy_rng
from fedguild.data import Example, load_corpus
from fedguild.data.sampling import sample
from fedguild.measuring.log.records import EvaluationRecord, RunLog
from fedguild.measuring.scores.scores import ExampleScore
from fedguild.measuring.scores.tasks import evaluate
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from fedguild.runs.scoring import CPU_BATCH_TOKENS, evaluated_plan
from tools.english.architecture import Sizes, new_model
from tools.english.tasks import PRETRAINED

PRESET = "fedit/english-ag_news"
"""The LoRA and the optimizer are this preset's."""
CHOSEN_WITH = 0
"""The seed that the settings are chosen with."""
VALIDATION_CAP = 300


@dataclass(frozen=True)
class TaskSet:
    """A set, and where its files are in the data folder.

    Attributes:
        name: Name of the set, as in `--sets`.
        title: Its name in the table.
        train: Training file or folder.
        test: Test file or folder.
        generates: Whether responses are generated.
        max_tokens: Longest text.
        most_questions: Test questions, drawn once for all seeds.
    """

    name: str
    title: str
    train: str
    test: str
    generates: bool = False
    max_tokens: int = 256
    most_questions: int = 1000


SETS = {
    one.name: one
    for one in (
        TaskSet("ag_news", "AG News", "ag_news/hub_schema/train.csv", "ag_news/hub_schema/test.csv"),
        TaskSet("snli", "SNLI", "snli/snli_train_minimal.jsonl", "snli/snli_1.0_test.jsonl"),
        TaskSet(
            "natural_instructions",
            "Natural Instructions",
            "natural_instructions/tasks",
            "natural_instructions/tasks_test",
            generates=True,
            max_tokens=384,
            most_questions=300,
        ),
        TaskSet(
            "dolly",
            "Dolly",
            "dolly/databricks-dolly-3k.train.jsonl",
            "dolly/databricks-dolly-3k.test.jsonl",
            generates=True,
            most_questions=300,
        ),
        TaskSet("commonsense", "commonsense sets", "commonsense_train/commonsense_mix_3k.json", "commonsense_test"),
        TaskSet("hellaswag", "HellaSwag", "hellaswag/train.jsonl", "hellaswag/test.jsonl"),
    )
}


@dataclass(frozen=True)
class Effort:
    """The settings that are tried, and the data that they are tried on.

    Attributes:
        learning_rates: Learning rates, each a training of its own.
        epochs: Most epochs; a round is an epoch, and every number of epochs up to this is a candidate.
        limit: Most training and validation examples together; None for all.
    """

    learning_rates: tuple[float, ...]
    epochs: int
    limit: int | None

    def as_settings(self) -> dict[str, Any]:
        """Returns the effort as the records hold it."""
        return {"learning_rates": list(self.learning_rates), "most_epochs": self.epochs, "limit": self.limit}


@dataclass(frozen=True)
class Candidate:
    """A learning rate and a number of epochs, with what they reach on the validation examples.

    Attributes:
        learning_rate: The learning rate.
        epochs: The number of epochs.
        score: Higher is better: the accuracy, or minus the nats per token.
    """

    learning_rate: float
    epochs: int
    score: float


def best(candidates: Sequence[Candidate]) -> Candidate:
    """Returns the best candidate; of equal ones that with fewer epochs, then with the smaller learning rate."""
    return max(candidates, key=lambda one: (one.score, -one.epochs, -one.learning_rate))


@dataclass(frozen=True)
class Session:
    """What all cells share.

    Attributes:
        data: Folder of the sets.
        output: Folder of the runs.
        records: Folder of the records.
        model: Folder of the checkpoint.
        weights: SHA-256 of its weights.
        effort: What is tried.
    """

    data: Path
    output: Path
    records: Path
    model: Path
    weights: str
    effort: Effort

    def record(self, task: TaskSet, model: str, seed: int | None = None) -> Path:
        """Returns the file of one record; a baseline has no seed."""
        return self.records / ".".join([task.name, model, *([] if seed is None else [str(seed)]), "json"])

    def run(self, task: TaskSet, model: str, seed: int, learning_rate: float) -> Path:
        """Returns the folder of one training."""
        return self.output / "runs" / f"{task.name}-{model}-{learning_rate:g}-seed{seed}"

    def folder(self, model: str, seed: int) -> Path:
        """Returns the folder of the checkpoint, or of the same architecture with the random weights of a seed."""
        if model == PRETRAINED:
            return self.model
        folder = self.output / "random" / str(seed)
        if not (folder / "model.safetensors").exists():
            write_random_twin(self.model, folder, seed)
        return folder

    def config(self, task: TaskSet, model: str, seed: int, learning_rate: float, epochs: int, every: int) -> Config:
        """Returns the config of one training."""
        limit = "null" if self.effort.limit is None else self.effort.limit
        return load_config(
            PRESET,
            [
                f"seed={seed}",
                f"model.path={self.folder(model, seed)}",
                f"data.dataset={task.name}",
                f"data.train={self.data / task.train}",
                f"data.test={self.data / task.test}",
                f"data.max_samples={limit}",
                f"data.max_length={task.max_tokens}",
                "data.partition={scheme: iid}",
                f"data.split={{validation: 0.1, test_source: corpus, max_validation_samples: {VALIDATION_CAP}}}",
                "federation.clients=1",
                f"federation.rounds={epochs}",
                f"federation.save_total_limit={epochs}",
                "federation.budgets=[{name: all, active_experts: 8, rank: 20}]",
                "training.steps=null",
                "training.epochs=1",
                f"training.learning_rate={learning_rate}",
                "evaluation.split=validation",
                f"evaluation.every={every}",
                "evaluation.max_examples=null",
                "evaluation.perplexity=true",
                f"evaluation.max_new_tokens={1 if task.generates else 16}",
            ],
        )


def write_random_twin(checkpoint: Path, folder: Path, seed: int) -> None:
    """Writes a model of a checkpoint's architecture with random weights, as before pre-training, and its tokenizer."""
    config = AutoConfig.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    sizes = Sizes(
        vocabulary=config.vocab_size,
        layers=config.num_hidden_layers,
        hidden=config.hidden_size,
        heads=config.num_attention_heads,
        experts=config.num_experts,
        active=config.num_experts_per_tok,
        expert_width=config.intermediate_size,
    )
    tokenizer.save_pretrained(folder)
    new_model(tokenizer, sizes, seed).bfloat16().save_pretrained(folder)


def trained(config: Config, folder: Path) -> None:
    """Runs a config in a folder, or continues what is there.

    Raises:
        SystemExit: the folder holds a run of another config.
    """
    if (folder / "config.yaml").exists():
        if load_config(str(folder / "config.yaml")).fingerprint() != config.fingerprint():
            raise SystemExit(f"{folder} holds a run with other settings; give another --output.")
        experiment.resume(folder)
    else:
        shutil.rmtree(folder, ignore_errors=True)
        experiment.run(config, folder)


def candidates(folder: Path, learning_rate: float) -> list[Candidate]:
    """Returns the validation scores of a training after every epoch."""
    found = []
    for record in RunLog(folder).read():
        if isinstance(record, EvaluationRecord) and record.scope == "budget" and record.round > 0:
            accuracy = record.metrics.get("accuracy")
            score = -math.log(record.metrics["perplexity"]) if accuracy is None else accuracy
            found.append(Candidate(learning_rate, record.round, score))
    return found


def chosen(session: Session, task: TaskSet, model: str) -> tuple[Candidate, list[Candidate]]:
    """Returns the best learning rate and epochs, and all that were tried; the record has them once it is there."""
    path = session.record(task, model, CHOSEN_WITH)
    if path.exists():
        settings = json.loads(path.read_text("utf-8"))["settings"]
        tried = [Candidate(**each) for each in settings["validation"]]
        return best(tried), tried
    tried = []
    for rate in session.effort.learning_rates:
        folder = session.run(task, model, CHOSEN_WITH, rate)
        trained(session.config(task, model, CHOSEN_WITH, rate, session.effort.epochs, every=1), folder)
        tried += candidates(folder, rate)
    return best(tried), tried


def questions_of(session: Session, task: TaskSet) -> tuple[Example, ...]:
    """Returns the test questions, the same for every model and seed."""
    train, test = (str(session.data / path) for path in (task.train, task.test))
    corpus = load_corpus(task.name, train=train, test=test)
    return sample(corpus.test, task.most_questions, numpy_rng(0, "test questions"))


def answers(folder: Path, epochs: int, task: TaskSet, questions: Sequence[Example]) -> list[ExampleScore]:
    """Returns the score of every test question after a number of epochs."""
    run, state, _ = experiment.restore(folder, epochs)
    (budget,) = run.budgets
    deployment = run.method.deploy(state, run.backbone.info, budget)
    assert deployment is not None
    settings = run.config.evaluation
    with (
        run.backbone.merged(deployment.merged),
        SlotModel(run.backbone, [evaluated_plan(run, budget, deployment)]) as model,
        torch.inference_mode(),
    ):
        model.load(0, deployment.tensors)
        (scores,) = evaluate(
            model,
            [questions],
            run.backbone.tokenizer,
            max_tokens=task.max_tokens,
            max_new_tokens=48 if task.generates else settings.max_new_tokens,
            batch_tokens=CPU_BATCH_TOKENS,
        )
    return list(scores.examples)
