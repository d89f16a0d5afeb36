"""Run folders as the round loop leaves them, with numbers of the size that the demo gives."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import yaml

from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    ObservationRecord,
    Rejection,
    RoundRecord,
    RoutingRecord,
    RunLog,
)

BUDGETS = (("b1", 8, 20), ("b2", 4, 12), ("b3", 2, 8), ("b4", 1, 6))
INFERENCE = {"b1": 6.1e6, "b2": 4.5e6, "b3": 3.7e6, "b4": 3.3e6}
FLAME_FINAL = {"b1": 0.742, "b2": 0.725, "b3": 0.688, "b4": 0.611}
RANKS_FINAL = {"b1": 0.751, "b2": 0.662, "b3": 0.541, "b4": 0.407}
START = {"b1": 0.351, "b2": 0.322, "b3": 0.240, "b4": 0.142}
LABELS = ["add", "sort", "reverse", "count", "translate", "first letter", "compare", "choose"]


def write_run(
    folder: Path,
    *,
    name: str = "flame",
    method: str = "flame",
    seed: int = 0,
    final: dict[str, float] | None = None,
    rounds: int = 6,
    clients: int = 8,
    layers: int = 4,
    experts: int = 16,
    rank_budget: bool = False,
    own_scores: bool = False,
    personal: bool = False,
    rejected: Sequence[tuple[int, int, str]] = (),
) -> Path:
    """Writes a run folder.

    `rank_budget` trains every client with all active experts and its budget's rank; `personal` scores no
    global model, but every client's own and the one that it would receive next, and reports figures.
    """
    target = final if final is not None else FLAME_FINAL
    rng = np.random.default_rng([seed, len(name)])
    folder.mkdir(parents=True, exist_ok=True)
    _write_settings(folder, name, method, seed, rounds, clients)
    counts = np.stack([rng.multinomial(160, rng.dirichlet([0.5] * clients)) for _ in LABELS], axis=1)
    split = {"train": [int(0.8 * row.sum()) for row in counts], "test": [int(0.1 * row.sum()) for row in counts]}
    partition = {"labels": LABELS, "counts": counts.tolist(), "split": split}
    (folder / "partition.json").write_text(json.dumps(partition))
    log = RunLog(folder)
    noise = {budget: float(rng.normal(0, 0.012)) for budget in target}
    popularity = rng.dirichlet([0.6] * experts, size=layers)
    for number in range(rounds + 1):
        if number:
            log.append(*[_client(number, i, rank_budget, int(counts[i].sum()), rng) for i in range(clients)])
            log.append(_routing(number, clients, popularity, rank_budget, rng))
        scored = _evaluations(number, {} if personal else target, noise, clients if own_scores or personal else 0)
        log.append(*scored, *(_received(scored) if personal else []))
        if number and personal:
            log.append(*_observations(number, clients, experts, layers))
        if number:
            refused = [Rejection(client=client, reason=why) for at, client, why in rejected if at == number]
            phases = {"train": 3.1, "evaluate": 1.2, "aggregate": 0.06, "checkpoint": 0.04, "download": 0.03}
            everyone = list(range(clients))
            log.append(
                RoundRecord(round=number, seconds=4.6, phase_seconds=phases, participants=everyone, rejected=refused)
            )
    return folder


def _write_settings(folder: Path, name: str, method: str, seed: int, rounds: int, clients: int) -> None:
    budgets = [{"name": b, "active_experts": k, "rank": r, "share": 1.0} for b, k, r in BUDGETS]
    config = {
        "name": name,
        "seed": seed,
        "method": {"name": method, "temperature": 2.0},
        "model": {"path": "embedded"},
        "data": {"dataset": "tasks", "partition": {"scheme": "dirichlet", "alpha": 0.5}},
        "federation": {"clients": clients, "rounds": rounds, "budgets": budgets},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False))
    environment = {"python": "3.11.2", "device": "cpu", "cores": 2, "packages": {"torch": "2.13.0", "numpy": "2.3.0"}}
    (folder / "environment.json").write_text(json.dumps(environment))


def _client(number: int, index: int, rank_budget: bool, examples: int, rng: np.random.Generator) -> ClientRecord:
    budget, active, rank = BUDGETS[index % len(BUDGETS)]
    trained_active, trained_rank = (8, rank) if rank_budget else (active, 20)
    size = 52_000 * trained_rank
    return ClientRecord(
        round=number,
        client=index,
        budget=budget,
        active_experts=trained_active,
        rank=trained_rank,
        examples=examples,
        steps=25,
        tokens=9_600 + 7 * index,
        train_loss=1.9 * math.exp(-0.3 * number) + 0.05 * index + float(rng.normal(0, 0.01)),
        upload_bytes=size + 2_113,
        download_bytes=size + 1_409,
        upload_parts={"adapter": size, "routing": 2_048},
        training_flops=(2.6e6 + 0.45e6 * trained_active) * 9_600 * 2 * 1.1,
        peak_memory_bytes=400_000_000 + 1_000_000 * trained_active - 1_000 * number,
        seconds=3.1 * (0.5 + trained_active / 16),
    )


def _routing(
    number: int, clients: int, popularity: np.ndarray, rank_budget: bool, rng: np.random.Generator
) -> RoutingRecord:
    layers, experts = popularity.shape
    frequency = np.zeros((clients, layers, experts))
    for client in range(clients):
        active = 8 if rank_budget else BUDGETS[client % len(BUDGETS)][1]
        taste = popularity * rng.gamma(2.0, 0.5, size=popularity.shape)
        for layer in range(layers):
            draws = np.argsort(rng.gumbel(size=(200, experts)) + np.log(taste[layer] + 1e-9), axis=1)[:, -active:]
            frequency[client, layer] = np.bincount(draws.ravel(), minlength=experts) / 200
    share = frequency.sum(axis=0) / frequency.sum(axis=(0, 2))[:, None]
    entropy = -(share * np.log(share + 1e-12)).sum(axis=1)
    ordered = np.sort(share, axis=1) * (2 * np.arange(1, experts + 1) - experts - 1)
    return RoutingRecord(
        round=number,
        layers=layers,
        experts=experts,
        clients=list(range(clients)),
        frequency=frequency.tolist(),
        entropy=entropy.tolist(),
        normalised_entropy=(entropy / math.log(experts)).tolist(),
        gini=(ordered.sum(axis=1) / experts).tolist(),
    )


def _received(own: Sequence[EvaluationRecord]) -> list[EvaluationRecord]:
    """The models received next, after training 0.1 worse than the clients' own, and the two means."""
    after = [record.model_copy(update={"scope": "received"}) for record in own]
    after = [record.model_copy(update={"score": record.score - 0.1 * (record.round > 0)}) for record in after]
    return [*after, _mean("mtal", own), _mean("received", after)]


def _mean(name: str, records: Sequence[EvaluationRecord]) -> EvaluationRecord:
    score = sum(record.score for record in records) / len(records)
    return EvaluationRecord(round=records[0].round, scope="summary", name=name, split="test", score=score)


def _observations(number: int, clients: int, experts: int, layers: int) -> list[ObservationRecord]:
    """Two figures over the rounds, few rows and many, and one of experts × clients."""
    relevance = [[((3 * e + c + number) % 7) / 7 for c in range(clients)] for e in range(experts)]
    names = [f"expert {expert}" for expert in range(experts)]
    return [
        ObservationRecord(
            round=number,
            name="utilisation entropy",
            rows=[f"layer {layer}" for layer in range(layers)],
            values=[[2.0 - 0.1 * layer + 0.02 * number] for layer in range(layers)],
            unit="nats",
        ),
        ObservationRecord(round=number, name="load", rows=names, values=[[0.5 * e + number] for e in range(experts)]),
        ObservationRecord(
            round=number,
            name="relevance",
            rows=names,
            columns=[f"client {client}" for client in range(clients)],
            values=relevance,
        ),
    ]


def _evaluations(number: int, final: dict[str, float], noise: dict[str, float], clients: int) -> list[EvaluationRecord]:
    active = {name: k for name, k, _ in BUDGETS}
    records = []
    for name, goal in final.items():
        gained = (1 - math.exp(-0.7 * number)) / (1 - math.exp(-4.2))
        score = START[name] + (goal + noise[name] - START[name]) * gained if number else START[name]
        tasks = {label: min(1.0, score * (0.7 + 0.08 * place)) for place, label in enumerate(LABELS)}
        records.append(
            EvaluationRecord(
                round=number,
                scope="budget",
                name=name,
                split="test",
                score=score,
                metric="exact_match",
                metrics={"exact_match": score, "rouge_l": min(1.0, score + 0.05), "perplexity": 3.0 - score},
                by_task=tasks,
                examples=512,
                active_experts=active[name],
                inference_flops_per_token=INFERENCE[name],
            )
        )
    for client in range(clients):
        name = f"client-{client:03d}"
        score = 0.5 + 0.01 * client + 0.02 * number
        records.append(EvaluationRecord(round=number, scope="client", name=name, split="test", score=score))
    return records
