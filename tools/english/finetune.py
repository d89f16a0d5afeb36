"""Fine-tuning of one client with all the data on the English checkpoint, beside what needs no language model.

Run: python -m tools.english.finetune --data DIR --output RUNS
     python -m tools.english.finetune --data DIR --output RUNS --sets ag_news,snli --seeds 0

Every set is trained with FedIT and one client, on the checkpoint and on the same architecture with random weights. The
learning rate and the epochs are chosen for both alike, by the validation examples of seed 0. A cell that is finished
is a JSON file in RUNS/records (or --records DIR) and never runs again; a killed one continues from its last epoch.
`--card README.md` writes the table of all records into a model card, with --sets '' without measuring anything.
The data folder holds the files that `SETS` in `runs.py` names.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer

from fedguild.config import load_config
from fedguild.core.files import write_text
from fedguild.data import Example
from fedguild.data.rendering import encode
from fedguild.measuring.scores.metrics import METRICS
from fedguild.measuring.scores.scores import ExampleScore, Summary
from fedguild.model.heap import keep_freed_pages
from fedguild.model.packaged import packaged
from fedguild.runs.setup import prepare_data
from tools.english import baselines
from tools.english.runs import CHOSEN_WITH, SETS, Effort, Session, TaskSet, answers, chosen, questions_of, trained
from tools.english.tasks import PRETRAINED, RANDOM, TaskRecord, read_records, task_section, with_tasks


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
    path = session.record(task, model, seed)
    if path.exists():
        return
    started = time.perf_counter()
    choice, tried = chosen(session, task, model)
    folder = session.run(task, model, seed, choice.learning_rate)
    if seed != CHOSEN_WITH:
        config = session.config(task, model, seed, choice.learning_rate, choice.epochs, every=choice.epochs)
        trained(config, folder)
    scores, questions = measured(answers(folder, choice.epochs, task, questions_of(session, task)))
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
            "validation": [asdict(one) for one in tried],
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
    paths = {name: session.record(task, name) for name in _baselines_of(task)}
    if all(path.exists() for path in paths.values()):
        return
    (client,), test = prepare_data(config).clients, questions_of(session, task)
    for name, path in paths.items():
        if path.exists():
            continue
        started = time.perf_counter()
        settings: dict[str, Any] = {
            "train_examples": len(client.train),
            "validation_examples": len(client.validation),
            "test_examples": len(test),
        }
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
        seen, asked = ([_response_ids(one, tokenizer, task.max_tokens) for one in part] for part in (train, test))
        scores["perplexity"] = math.exp(baselines.token_frequency_nats(seen, asked, len(tokenizer)))
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
    """Returns the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs, and of RUNS/records")
    parser.add_argument("--records", type=Path, help="folder of the records, in place of RUNS/records")
    parser.add_argument("--sets", default=",".join(SETS), help=f"of {', '.join(SETS)}; in this order by default")
    parser.add_argument(
        "--seeds", default="0,1,2", help="seeds, '' for the baselines alone; settings are chosen with 0"
    )
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
        for seed in [int(seed) for seed in given.seeds.split(",") if seed]:
            for which in (PRETRAINED, RANDOM):
                measure_model(session, task, which, seed)
    records = read_records(session.records)
    print(task_section(records))
    if given.card:
        write_text(given.card, with_tasks(given.card.read_text("utf-8"), records))


if __name__ == "__main__":
    main()
