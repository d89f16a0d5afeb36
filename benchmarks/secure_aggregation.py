"""Cost of secure aggregation beside a plain round: bytes of the clients, and CPU seconds of a client and the server.

Run: python benchmarks/secure_aggregation.py [--clients 8 64] [--repeats 3] [--methods flame fedit ...]
The uploads are random numbers of the form that each method sends; nothing is trained. One process plays the server and
all clients in turn: a client's CPU seconds are the sum over its eight answers, told as the mean over the clients, and
the server's are all the rest of the round. The aim is at most 1.15 times the plain bytes for methods of equal shapes.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from statistics import median

import torch
from models import SMALL, our_backbone
from timing import add_device, machine

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.config.federation import FederationSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.engines.secure import SecureClients, SecureEngine
from fedguild.methods import build_method
from fedguild.model.info import ModelInfo
from fedguild.privacy.secure_sum.form import Form
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait
from fedguild.server.method import Method, Roster, secure_form
from fedguild.server.round import Outcome, RoundSetup
from fedguild.server.rounds import run_round
from fedguild.server.secure_round import SecureAggregation, whole_form

TARGETS = ["attention", "experts"]
METHODS = {
    "flame": {"rank": 8, "targets": TARGETS},
    "fedit": {"rank": 8, "targets": TARGETS},
    "ffa-lora": {"rank": 8, "targets": TARGETS},
    "ub-smoe": {"rank": 8, "targets": TARGETS},
    "hetlora": {"rank": 8, "targets": TARGETS},
    "fedmoe": {"rank": 8, "memory": {"small": 0.75}},
}
"""Equal shapes for all clients, but for the last two."""
BUDGETS = (Budget("large", 4, 8), Budget("small", 2, 4))
EXAMPLES = 100
TOKENS = 5000


class Answering:
    """An engine whose clients answer at once: what they were sent, moved by noise, and shares of tokens."""

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields every task's delivery."""
        for task in tasks:
            rng = torch_rng(task.client.index, "upload")
            tensors = {}
            for name, field in method.schema(model, task.client, task.download).tensors.items():
                noise, before = torch.rand(field.shape, generator=rng), task.download.tensors.get(name)
                tensors[name] = noise if before is None or before.shape != noise.shape else before + 0.01 * noise
                if field.bound is not None and field.bound.total is not None:  # shares of a token's experts
                    tensors[name] = 0.9 * field.bound.total * noise / noise.sum(-1, keepdim=True)
            report = LocalReport(10, TOKENS, EXAMPLES, 1.5, 2.0)
            shares = torch.rand((len(model.moe), model.moe[0].num_experts), generator=rng)
            frequency = 0.9 * task.client.budget.active_experts * shares / shares.sum(-1, keepdim=True)
            yield Delivery(task, Payload(tensors), method.plan(model, task.client.budget), report, frequency)

    def close(self) -> None:
        """Does nothing."""


class TimedClients(SecureClients):
    """Clients whose answers are timed."""

    seconds = 0.0

    def keep(self, *arguments: object) -> None:  # type: ignore[override]
        """Keeps a client's numbers."""
        started = time.process_time()
        super().keep(*arguments)  # type: ignore[arg-type]
        TimedClients.seconds += time.process_time() - started

    def answer(self, *arguments: object) -> Payload:  # type: ignore[override]
        """Returns a client's answer."""
        started = time.process_time()
        try:
            return super().answer(*arguments)  # type: ignore[arg-type]
        finally:
            TimedClients.seconds += time.process_time() - started


def one_round(name: str, model: ModelInfo, count: int, *, secure: bool, unheld: str = "omit") -> tuple[Outcome, float]:
    """Runs one round; returns its outcome and its seconds."""
    method = build_method(name, METHODS[name])
    clients = [ClientInfo(index, BUDGETS[index % 2], EXAMPLES + index) for index in range(count)]
    state = method.start(model, Roster(BUDGETS, clients), torch_rng(0, "start"))
    engine, filters = Answering(), []
    if secure:
        engine = SecureEngine(engine, BUDGETS, count)
        held = engine.clients
        engine.clients = TimedClients(held.budgets, held.identities, held.registered)
        engine.filters = [engine.clients]
        filters = [SecureAggregation("benchmark", BUDGETS, 2 / 3, 3, unheld)]
    TimedClients.seconds = 0.0
    started = time.process_time()
    outcome = run_round(
        1, state, clients, RoundSetup(method, model, engine, FederationSettings(clients=count), 0, filters)
    )
    return outcome, time.process_time() - started


def total_bytes(outcome: Outcome) -> tuple[float, float]:
    """Returns a client's mean bytes up and down."""
    traffic = outcome.traffic.values()
    up, down = (sum(getattr(each, f"{way}_bytes") for each in traffic) for way in ("upload", "download"))
    return up / len(traffic), down / len(traffic)


def form_of(name: str, model: ModelInfo) -> Form:
    return whole_form(secure_form(build_method(name, METHODS[name]), model, BUDGETS)[0], model)


def measure(name: str, model: ModelInfo, count: int, repeats: int, unheld: str) -> None:
    """Prints a method's line."""
    plain = [one_round(name, model, count, secure=False) for _ in range(repeats)]
    secure, client_seconds = [], []
    for _ in range(repeats):
        secure.append(one_round(name, model, count, secure=True, unheld=unheld))
        client_seconds.append(TimedClients.seconds)
    (plain_up, plain_down), (up, down) = total_bytes(plain[0][0]), total_bytes(secure[0][0])
    ratio = (up + down) / (plain_up + plain_down)
    server = median(whole - own for (_, whole), own in zip(secure, client_seconds, strict=True))
    values = form_of(name, model).value_count
    label = name if unheld == "omit" else f"{name}, zeros"
    sizes = f"{values / 1e6:>7.2f} M {(plain_up + plain_down) / 1e6:>8.2f} {(up + down) / 1e6:>8.2f}"
    seconds = f"{median(s for _, s in plain):>8.2f} {server:>8.2f} {median(client_seconds) / count:>8.3f}"
    print(f"{label:>15} {count:>4} {sizes} {ratio:>6.3f} {up / plain_up:>6.3f} {seconds}", flush=True)


def main() -> None:
    """Measures every method with every number of clients."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    add_device(parser)
    arguments = parser.parse_args()
    print(machine(arguments.device, arguments.dtype))
    model = our_backbone(SMALL, arguments.dtype, arguments.device).info
    print(
        f"{'method':>15} {'n':>4} {'values':>9} {'plain MB':>8} {'secure':>8} {'ratio':>6} {'up':>6} "
        f"{'plain s':>8} {'server s':>8} {'client s':>8}"
    )
    for name in arguments.methods:
        for count in arguments.clients:
            for unheld in ("omit", "zeros") if name in ("hetlora", "fedmoe") else ("omit",):
                measure(name, model, count, arguments.repeats, unheld)


if __name__ == "__main__":
    main()
