"""Scores of a federation some of whose members attack it, by aggregator: the table of docs/guides/security.md.

Run: python benchmarks/attacks.py attacks.json [--seeds 3] [--rounds 4] [--jobs 1]; with `--table` it prints the table.
FedIT on the embedded model and its tasks, from scratch; every client trains 10 steps of 4 examples a round. Each cell
is written to the file as soon as it is done, and not computed again. Members attack together and know the honest
uploads:

    sign flip   their own change, turned around and 9.9 times the round's median long (10 times would be left out)
    noise       Gaussian noise of that length
    label flip  an honest training on examples with another one's response, or the next choice
    ALIE        mean - 1.5 deviations of the honest changes, value by value: G. Baruch et al., "A Little Is Enough",
                NeurIPS 2019, Algorithm 3, with z = 1.5, as its z is 0 for one or two of eight
    IPM         the mean of the honest changes, turned around: C. Xie et al., "Fall of Empires", UAI 2020

All aggregators but `default` have the bound of 10 medians on a change that federations had before; `default` is what a
real federation has now: trimmed_mean, and changes that count up to 3 medians.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from pathlib import Path
from statistics import mean, stdev

import torch

from fedguild.client.memory import ClientMemory
from fedguild.config import load_config
from fedguild.core.files import write_text
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from fedguild.engines.local import LocalEngine
from fedguild.model.info import ModelInfo
from fedguild.runs.scoring import evaluate_state
from fedguild.runs.setup import Experiment, prepare
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait
from fedguild.server.guard import FAR_BEYOND, NORM_FACTOR, Finite, Held, NormBound, change_norms, medians_of
from fedguild.server.method import Method, Roster, starting_rng
from fedguild.server.robust import RobustMean
from fedguild.server.round import Filter, RoundSetup
from fedguild.server.rounds import run_round

SETTINGS = (
    *(
        "federation.budgets=[{name: all, active_experts: 2, rank: 8}]",
        "method.rank=4",
        "method.targets=[attention,experts]",
    ),
    *("training.steps=10", "training.batch_size=4", "training.loss_limit=null"),
    *("evaluation.max_examples=100", "evaluation.metrics=[]"),
)
AGGREGATORS = ("none", "median", "clipped", "centered_clipping", "default")
ATTACKS = ("sign flip", "noise", "label flip", "ALIE", "IPM")
LENGTH, DEVIATIONS = 0.99 * FAR_BEYOND, 1.5
NOBODY = "honest"


@dataclass(frozen=True)
class Cell:
    """A run: so many of its clients, the last ones, attack."""

    clients: int
    alpha: float
    seed: int
    aggregator: str
    attack: str = NOBODY
    hostile: int = 0

    @property
    def key(self) -> str:
        who = f"{self.hostile} of {self.clients}, alpha {self.alpha:g}"
        return f"{who}, seed {self.seed}, {self.aggregator}, {self.attack}"

    @property
    def federation(self) -> tuple[int, float, int]:
        return self.clients, self.alpha, self.seed


def cells(seeds: int) -> list[Cell]:
    """Returns all cells, those that decide most first; one and three of 8, and 5 of 20, not by all aggregators."""
    few = ("none", "centered_clipping", "default")
    groups = [
        [(8, 0.5, 0, NOBODY, AGGREGATORS), *((8, 0.5, 2, attack, AGGREGATORS) for attack in ATTACKS)],
        [(8, alpha, 0, NOBODY, AGGREGATORS) for alpha in (0.1, 100.0)],
        [(8, 0.5, hostile, attack, few) for hostile in (1, 3) for attack in ATTACKS],
        [(20, 0.5, 0, NOBODY, few), *((20, 0.5, 5, attack, few) for attack in ATTACKS)],
    ]
    return [
        Cell(clients, alpha, seed, aggregator, attack, hostile)
        for group in groups
        for seed in range(seeds)
        for clients, alpha, hostile, attack, aggregators in group
        for aggregator in aggregators
    ]


class Federation:
    """The clients of one federation, whose first round is trained once for all cells."""

    def __init__(self, clients: int, alpha: float, seed: int) -> None:
        overrides = [f"federation.clients={clients}", f"data.partition.alpha={alpha}", f"seed={seed}", *SETTINGS]
        config = load_config("fedit/tiny-tasks", overrides)
        self.folder = Path(tempfile.mkdtemp())
        self.experiment = prepare(config, self.folder, None)
        self.honest, self.flipped = (self._engine(texts) for texts in (self.experiment.encoded, self._flipped()))
        self.first: dict[tuple[bool, int], Delivery] = {}
        self.longest = 0.0

    def _engine(self, texts: Mapping[int, list[Encoded]]) -> LocalEngine:
        config = self.experiment.config
        memory = ClientMemory(self.folder / "memory")
        return LocalEngine(
            self.experiment.backbone, texts, config.local_training, memory, cohort_size="auto", seed=config.seed
        )

    def _flipped(self) -> dict[int, list[Encoded]]:
        tokenizer, longest = self.experiment.backbone.tokenizer, self.experiment.config.data.max_length
        clients = {index: flipped(client.train) for index, client in enumerate(self.experiment.data.clients)}
        return {index: [encode(one, tokenizer, longest) for one in examples] for index, examples in clients.items()}

    def answers(self, method: Method, model: ModelInfo, tasks: Sequence[Task], *, flip: bool) -> list[Delivery]:
        """Trains clients; those of a first round once for all cells."""
        wanted = [task for task in tasks if task.round > 1 or (flip, task.client.index) not in self.first]
        engine = self.flipped if flip else self.honest
        new = (
            {delivery.task.client.index: delivery for delivery in engine.train(method, model, wanted)} if wanted else {}
        )
        self.first |= {(flip, index): delivery for index, delivery in new.items() if delivery.task.round == 1}
        return [new[index] if (index := task.client.index) in new else self.first[flip, index] for task in tasks]


class Attacked:
    """An engine some of whose clients attack."""

    def __init__(self, federation: Federation, cell: Cell) -> None:
        self.federation, self.cell = federation, cell

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        cell, first = self.cell, self.cell.clients - self.cell.hostile
        good = [task for task in tasks if task.client.index < first]
        bad = [task for task in tasks if task.client.index >= first]
        honest = self.federation.answers(method, model, good, flip=False)
        if cell.attack == NOBODY:
            norms = [change_norms(change(one), Payload())[ADAPTER] for one in honest]
            self.federation.longest = max(self.federation.longest, max(norms) / float(torch.tensor(norms).median()))
        own = self.federation.answers(method, model, bad, flip=cell.attack == "label flip")
        changes = {
            name: torch.stack([change(one).tensors[name] for one in honest]) for name in change(honest[0]).tensors
        }
        yield from honest
        length = LENGTH * medians_of([change_norms(change(one), Payload()) for one in honest])[ADAPTER]
        for delivery in own:
            if cell.attack == "label flip":
                yield delivery
                continue
            rng = torch_rng(cell.seed, "noise", delivery.task.round, delivery.task.client.index)
            bent = hostile_change(cell.attack, change(delivery).tensors, changes, length, rng)
            received = delivery.task.download.part(ADAPTER)
            upload = {name: received[name] + value.float() for name, value in bent.items()}
            yield replace(delivery, upload=Payload(with_part(ADAPTER, upload)))

    def close(self) -> None:
        """The federation's engines are closed with the process."""


def change(delivery: Delivery) -> Payload:
    """Returns a client's change, by the adapter's names, as a part of its own."""
    assert delivery.upload is not None, delivery.failure
    received = delivery.task.download.part(ADAPTER)
    return Payload({f"{ADAPTER}/{name}": x - received[name] for name, x in delivery.upload.part(ADAPTER).items()})


def hostile_change(
    attack: str,
    own: Mapping[str, torch.Tensor],
    honest: Mapping[str, torch.Tensor],
    length: float,
    rng: torch.Generator,
) -> dict[str, torch.Tensor]:
    """Returns the change of an attacker, by the adapter's names."""
    if attack == "ALIE":
        found = {name: x.mean(dim=0) - DEVIATIONS * x.std(dim=0, correction=0) for name, x in honest.items()}
    elif attack == "IPM":
        found = {name: -x.mean(dim=0) for name, x in honest.items()}
    else:
        drawn = {name: torch.randn(x.shape, generator=rng) if attack == "noise" else -x for name, x in own.items()}
        norm = change_norms(Payload(drawn), Payload())[ADAPTER]
        found = {name: x * (length / norm) for name, x in drawn.items()}
    return {name.partition("/")[2]: value for name, value in found.items()}


def flipped(examples: Sequence[Example]) -> list[Example]:
    """Returns examples with the next choice as their response, or the next example's response."""
    result = []
    for example, following in zip(examples, [*examples[1:], *examples[:1]], strict=True):
        response = following.response
        if example.choices and example.answer is not None:
            response = example.choices[(example.answer + 1) % len(example.choices)]
        result.append(replace(example, response=response))
    return result


@cache
def federation_of(clients: int, alpha: float, seed: int) -> Federation:
    return Federation(clients, alpha, seed)


def filters_of(aggregator: str, folder: Path) -> list[Filter]:
    """Returns the filters of a real federation with an aggregator."""
    bound = NormBound(NORM_FACTOR if aggregator == "default" else FAR_BEYOND)
    name = "trimmed_mean" if aggregator == "default" else aggregator
    robust: list[Filter] = [] if name == "none" else [RobustMean(name)]  # type: ignore[arg-type]
    return [Held(folder / "spool"), bound, Finite(), *robust]


def score_of(cell: Cell, rounds: int) -> dict[str, float]:
    """Runs a cell; returns the score, the uploads left out, and the longest honest change in medians."""
    federation = federation_of(*cell.federation)
    experiment: Experiment = federation.experiment
    config, model, federation.longest = experiment.config, experiment.backbone.info, 0.0
    filters = filters_of(cell.aggregator, federation.folder)
    setup = RoundSetup(experiment.method, model, Attacked(federation, cell), config.federation, config.seed, filters)
    state = experiment.method.start(
        model, Roster(experiment.budgets, experiment.clients), starting_rng(experiment.method, config.seed)
    )
    left_out = 0
    for number in range(1, rounds + 1):
        outcome = run_round(number, state, experiment.clients, setup)
        state, left_out = outcome.state, left_out + len(outcome.rejected)
    records = evaluate_state(experiment, state, rounds)
    score = next(record.score for record in records if record.kind == "evaluation" and record.scope == "budget")
    return {"score": score, "left_out": left_out, "longest": federation.longest}


def table(results: Mapping[str, Mapping[str, float]], seeds: int) -> str:
    """Returns a table of Markdown: mean and standard deviation over the seeds, and how many these are if not all."""
    lines = [f"| attack | {' | '.join(AGGREGATORS)} |", "| --- |" + " --- |" * len(AGGREGATORS)]
    rows = groupby(
        sorted(
            cells(seeds), key=lambda cell: (cell.attack != NOBODY, cell.clients, cell.alpha, cell.hostile, cell.attack)
        ),
        key=lambda cell: (cell.attack, cell.hostile, cell.clients, cell.alpha),
    )
    for (attack, hostile, clients, alpha), group in rows:
        among = list(group)
        shown = []
        for aggregator in AGGREGATORS:
            keys = [cell.key for cell in among if cell.aggregator == aggregator]
            scores = [results[key]["score"] for key in keys if key in results]
            deviation = f" ± {stdev(scores):.2f}" if len(scores) > 1 else ""
            fewer = f" ({len(scores)})" if len(scores) < seeds else ""
            shown.append(f"{mean(scores):.2f}{deviation}{fewer}" if scores else "")
        who = f"{hostile} of {clients}" if hostile else f"{clients} clients, Dirichlet {alpha:g}"
        if any(shown):
            lines.append(f"| {attack}, {who} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", action="store_true", help="print the table of what is there, and compute nothing")
    options = parser.parse_args()
    results: dict[str, dict[str, float]] = json.loads(options.file.read_text()) if options.file.exists() else {}
    if not options.table:
        missing = [cell for cell in cells(options.seeds) if cell.key not in results]
        with ProcessPoolExecutor(options.jobs) as workers:
            futures = [workers.submit(score_of, cell, options.rounds) for cell in missing]
            for cell, future in zip(missing, futures, strict=True):
                results[cell.key] = future.result()
                write_text(options.file, json.dumps(results, indent=1))
                print(f"{cell.key}: {results[cell.key]}", flush=True)
    print(table(results, options.seeds))


if __name__ == "__main__":
    main()
