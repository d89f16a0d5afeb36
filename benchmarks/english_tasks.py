"""Fine-tuning of one client with all the data on the English checkpoint, beside what needs no language model.

Run: python benchmarks/english_tasks.py --data DIR --output RUNS
     python benchmarks/english_tasks.py --data DIR --output RUNS --sets ag_news,snli --seeds 0

Every set is trained with FedIT and one client, on the checkpoint and on the same architecture with random weights. The
learning rate and the epochs are chosen for both alike, by the validation examples of seed 0. A cell that is finished
is a JSON file in RUNS/records (or --records DIR) and never runs again; a killed one continues from its last epoch.
`--card README.md` writes the table of all records into a model card, with --sets '' without measuring anything.
The data folder holds the files that `SETS` names.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import english_baselines as baselines
import torch
import transformers
from transformers import AutoConfig, AutoTokenizer

from fedguild import experiment
from fedguild.config import Config, load_config
from fedguild.data import Example, load_corpus
from fedguild.data.batches import encode
from fedguild.data.sampling import sample
from fedguild.evaluation.metrics import METRICS
from fedguild.evaluation.scores import ExampleScore, Summary
from fedguild.evaluation.tasks import evaluate
from fedguild.files import write_text
from fedguild.heap import keep_freed_pages
from fedguild.model.english.architecture import Sizes, new_model
from fedguild.model.english.tasks import PRETRAINED, RANDOM, TaskRecord, read_records, task_section, with_tasks
from fedguild.model.packaged import packaged
from fedguild.model.slots import SlotModel
from fedguild.scoring import evaluated_plan
from fedguild.seeding import numpy_rng
from fedguild.server.run_log import EvaluationRecord, RunLog
from fedguild.setup import prepare_data

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
                f"data.corpus={task.name}",
                f"data.train={self.data / task.train}",
                f"data.test={self.data / task.test}",
                f"data.limit={limit}",
                f"data.max_tokens={task.max_tokens}",
                "data.partition={scheme: iid}",
                f"data.split={{validation: 0.1, test_source: corpus, caps: {{validation: {VALIDATION_CAP}}}}}",
                "federation.clients=1",
                f"federation.rounds={epochs}",
                f"federation.keep_checkpoints={epochs}",
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
    new_model(tokenizer, sizes, seed).to(torch.bfloat16).save_pretrained(folder)


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
    """Returns the best learning rate and epochs, and all that were tried."""
    tried: list[Candidate] = []
    for rate in session.effort.learning_rates:
        folder = run_folder(session, task, model, CHOSEN_WITH, rate)
        trained(session.config(task, model, CHOSEN_WITH, rate, session.effort.epochs, every=1), folder)
        tried += candidates(folder, rate)
    return best(tried), tried


def run_folder(session: Session, task: TaskSet, model: str, seed: int, rate: float) -> Path:
    """Returns the folder of one training."""
    return session.output / "runs" / f"{task.name}-{model}-{rate:g}-seed{seed}"


def test_questions(session: Session, task: TaskSet) -> tuple[Example, ...]:
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
            batch_tokens=settings.batch_tokens,
        )
    return list(scores.examples)


def measured(scores: Sequence[ExampleScore]) -> tuple[dict[str, float], dict[str, list[float]]]:
    """Returns the scores over all questions, and what each question adds to them."""
    summary = Summary.of(scores)
    if summary.accuracy is not None:
        return {"accuracy": summary.accuracy}, {"accuracy": [int(one.correct or 0) for one in scores]}
    assert summary.perplexity is not None
    return (
        {"rouge_l": summary.metrics["rouge_l"], "perplexity": summary.perplexity},
        {
            "rouge_l": [round(one.metrics["rouge_l"], 4) for one in scores],
            "nats": [round(one.response_nll, 3) for one in scores],
            "tokens": [one.response_tokens for one in scores],
        },
    )


def measure_model(session: Session, task: TaskSet, model: str, seed: int) -> None:
    """Writes the record of one model, set and seed, unless it is there."""
    path = session.records / f"{task.name}.{model}.{seed}.json"
    if path.exists():
        return
    started = time.perf_counter()
    choice, tried = chosen(session, task, model)
    folder = run_folder(session, task, model, seed, choice.learning_rate)
    if seed != CHOSEN_WITH:
        config = session.config(task, model, seed, choice.learning_rate, choice.epochs, every=choice.epochs)
        trained(config, folder)
    scores, questions = measured(answers(folder, choice.epochs, task, test_questions(session, task)))
    data = prepare_data(load_config(str(folder / "config.yaml")))
    TaskRecord(
        task.name,
        task.title,
        model,
        seed,
        session.weights,
        scores,
        questions,
        settings={
            "learning_rate": choice.learning_rate,
            "epochs": choice.epochs,
            **session.effort.as_settings(),
            "validation": [asdict(replace(one, score=round(one.score, 5))) for one in tried],
            "train_examples": len(data.clients[0].train),
            "validation_examples": len(data.clients[0].validation),
            "test_examples": len(next(iter(questions.values()))),
        },
        facts=facts(time.perf_counter() - started),
    ).write(path)
    report(path, scores)


def measure_baselines(session: Session, task: TaskSet) -> None:
    """Writes the records of a set's baselines, unless they are there."""
    config = session.config(task, PRETRAINED, CHOSEN_WITH, 1e-3, 1, 1)
    paths = {name: session.records / f"{task.name}.{name}.json" for name in _baselines_of(task)}
    if all(path.exists() for path in paths.values()):
        return
    (client,), test = prepare_data(config).clients, test_questions(session, task)
    for name, path in paths.items():
        if path.exists():
            continue
        started = time.perf_counter()
        settings: dict[str, Any] = {}
        if task.generates:
            scores = _response_scores(session, task, name, client.train, test)
        elif name == "majority":
            scores = {"accuracy": baselines.accuracy(baselines.majority_answers(client.train, test), test)}
        else:
            text = baselines.prompt
            if task.name == "snli":
                text = baselines.hypothesis if name == "hypothesis" else baselines.premise_and_hypothesis
            found, settings["C"] = baselines.words_answers(client.train, client.validation, test, text)
            scores = {"accuracy": baselines.accuracy(found, test)}
        facts_of_run = facts(time.perf_counter() - started)
        TaskRecord(task.name, task.title, name, None, session.weights, scores, {}, settings, facts_of_run).write(path)
        report(path, scores)


def _baselines_of(task: TaskSet) -> tuple[str, ...]:
    return ("words", "hypothesis", "majority") if task.name == "snli" else ("words", "majority")


def _response_scores(
    session: Session, task: TaskSet, name: str, train: Sequence[Example], test: Sequence[Example]
) -> dict[str, float]:
    """Returns the ROUGE-L of a generated set's baseline; of `majority` also the perplexity by token frequencies."""
    find = baselines.nearest_responses if name == "words" else baselines.majority_responses
    rouge_l = METRICS.load("rouge_l")
    pairs = zip(find(train, test), test, strict=True)
    scores = {"rouge_l": fmean(rouge_l(response, example.response) for response, example in pairs)}
    if name == "majority":
        tokenizer = AutoTokenizer.from_pretrained(session.model)
        rows = [[_response_ids(example, tokenizer, task.max_tokens) for example in part] for part in (train, test)]
        scores["perplexity"] = math.exp(baselines.token_frequency_nats(*rows, len(tokenizer)))
    return scores


def _response_ids(example: Example, tokenizer: Any, max_tokens: int) -> list[int]:
    encoded = encode(example, tokenizer, max_tokens)
    return list(encoded.input_ids[encoded.prompt_length :])


def facts(seconds: float) -> dict[str, Any]:
    """Returns date, time spent and versions of a cell."""
    return {
        "date": str(datetime.now(UTC).date()),
        "seconds": round(seconds, 1),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }


def report(path: Path, scores: dict[str, float]) -> None:
    """Prints what a cell reached."""
    print(f"{path.stem}: " + ", ".join(f"{name} {value:.3f}" for name, value in scores.items()), flush=True)


@cache
def sha256(path: Path) -> str:
    """Returns the SHA-256 of a file, hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def check_effort(session: Session, records: Sequence[TaskRecord]) -> None:
    """Ends the script if a set was measured with other settings to choose from: both models get the same."""
    effort = session.effort.as_settings()
    for record in records:
        if record.seed is not None and {name: record.settings[name] for name in effort} != effort:
            raise SystemExit(f"{session.records} holds {record.task} with another effort; give another --output.")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs, and of RUNS/records")
    parser.add_argument("--records", type=Path, help="folder of the records, in place of RUNS/records")
    parser.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}; in this order by default")
    parser.add_argument("--seeds", default="0,1,2", help="seeds; 0 is the one that settings are chosen with")
    parser.add_argument("--model", default="english", help="the checkpoint: a packaged model or a folder")
    parser.add_argument("--learning-rates", default="1e-3,3e-3", help="the learning rates to choose from")
    parser.add_argument("--epochs", type=int, default=3, help="the most epochs to choose from")
    parser.add_argument("--limit", type=int, help="most training examples; by default all")
    parser.add_argument("--card", type=Path, help="model card that gets the table of all records")
    return parser.parse_args()


def main() -> None:
    """Measures what is missing, and prints the table."""
    given = arguments()
    keep_freed_pages()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", torch.get_num_threads())))
    model = packaged(given.model) or Path(given.model)
    rates = tuple(float(rate) for rate in given.learning_rates.split(","))
    session = Session(
        data=given.data.resolve(),
        output=given.output,
        records=given.records or given.output / "records",
        model=model.resolve(),
        weights=sha256(model / "model.safetensors"),
        effort=Effort(rates, given.epochs, given.limit),
    )
    session.records.mkdir(parents=True, exist_ok=True)
    if others := [one.weights for one in read_records(session.records) if one.weights != session.weights]:
        raise SystemExit(f"{session.records} holds records of other weights ({others[0]:.12}…); move them away.")
    tasks = [SETS[name] for name in given.sets.split(",") if name]
    check_effort(session, [record for record in read_records(session.records) if SETS[record.task] in tasks])
    for task in tasks:
        measure_baselines(session, task)
        for seed in map(int, given.seeds.split(",")):
            for which in (PRETRAINED, RANDOM):
                measure_model(session, task, which, seed)
    records = read_records(session.records)
    print(task_section(records))
    if given.card:
        write_text(given.card, with_tasks(given.card.read_text("utf-8"), records))


if __name__ == "__main__":
    main()
