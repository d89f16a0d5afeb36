"""Cost of the number of clients for a server that asks 20 of them a round; the aim is memory that stays flat.

Run: python benchmarks/scale.py [--rounds 5] [--repeats 3] [--clients 100 1000 10000]
Each federation runs in a process of its own, rounds as in a run: sampled, trained by the local engine on a small
random OLMoE, validated, aggregated, recorded, checkpointed. Every client has a memory on disk from before. Clients'
data are made when they are needed, so that what is measured is the server's own. Told are: the anonymous memory of the
process after the last round, swapped pages included and freed ones given back (the pages of its libraries come and go);
what is held for certain, which knows no allocator: all live tensors and Python's objects, traced in a process of their
own, as that takes time; and the milliseconds that a round spends beside the training, per client of the round.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import subprocess
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import torch
from models import SMALL, our_backbone, rows
from timing import add_device, machine

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config.federation import FederationSettings
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.engines.local import LocalEngine
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.methods import build_method
from fedguild.runs.recording import client_records, routing_record
from fedguild.server import checkpoint
from fedguild.server.method import Roster
from fedguild.server.round import Outcome, RoundSetup
from fedguild.server.rounds import run_round

ASKED = 20
EXAMPLES = 8
MIB = 2**20
METHODS = {"fedit": {"rank": 4, "targets": ["attention"]}, "flame": {"rank": 4, "targets": ["attention", "experts"]}}
"""One whose clients keep nothing, and one whose clients keep a rescaler on disk."""


class MadeWhenNeeded(Mapping[int, Sequence[Encoded]]):
    """Every client's examples, none of which are held."""

    def __init__(self, clients: int) -> None:
        self.clients = clients

    def __getitem__(self, index: int) -> Sequence[Encoded]:
        return rows(SMALL, EXAMPLES, seed=index)

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.clients))

    def __len__(self) -> int:
        return self.clients


def federation(
    method_name: str, clients: int, rounds: int, folder: Path, trace: bool, where: tuple[torch.dtype, torch.device]
) -> dict[str, float]:
    """Runs a federation and returns its figures; the first round warms up."""
    backbone = our_backbone(SMALL, *where)
    if trace:
        tracemalloc.start()
    method = build_method(method_name, METHODS[method_name])
    budget = Budget("all", 8, 4)
    infos = [ClientInfo(index, budget, EXAMPLES) for index in range(clients)]
    settings = TrainingSettings(optimizer="adamw", batch_size=4, steps=2, max_grad_norm=None)
    memory = ClientMemory(folder / "clients")
    remember_everybody(memory, infos)
    engine = LocalEngine(backbone, MadeWhenNeeded(clients), settings, memory, cohort_size=ASKED, seed=0)
    rules = FederationSettings(client_fraction=ASKED / clients)
    state = method.start(backbone.info, Roster([budget]), torch_rng(0, "start"))
    log, seconds, outside, writing = RunLog(folder), 0.0, 0.0, 0.0
    for number in range(1, rounds + 2):
        started = time.perf_counter()
        outcome = run_round(number, state, infos, RoundSetup(method, backbone.info, engine, rules, 0))
        state, over = outcome.state, time.perf_counter()
        log.append(*client_records(outcome, backbone.info), *routing(outcome), round_record(outcome))
        checkpoint.save(folder / "checkpoints", number, state, fingerprint="scale")
        memory.forget(checkpoint.rounds(folder / "checkpoints")[0])
        ended = time.perf_counter()
        if number > 1:
            seconds += ended - started
            outside += ended - started - outcome.phase_seconds["train"]
            writing += ended - over
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    per_client = 1000.0 / (rounds * ASKED)
    return {
        "anonymous": anonymous_bytes() / MIB,
        "python": tracemalloc.get_traced_memory()[0] / MIB,
        "tensors": tensor_bytes() / MIB,
        "round": seconds * per_client,
        "overhead": outside * per_client,
        "writing": writing * per_client,
    }


def anonymous_bytes() -> int:
    """Returns the memory of this process that no file stands for, in memory or swapped out (Linux)."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(lines[name].split()[0]) for name in ("RssAnon", "VmSwap"))


def tensor_bytes() -> int:
    """Returns the bytes of all tensors that are alive, shared ones once."""
    tensors = [thing for thing in gc.get_objects() if isinstance(thing, torch.Tensor) and not thing.is_meta]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def remember_everybody(memory: ClientMemory, clients: Sequence[ClientInfo]) -> None:
    """Lets every client have taken part before, keeping nothing."""
    memory.save(clients[0].name, 0, Payload())
    content = memory._path(clients[0].name, 0).read_bytes()
    for client in clients[1:]:
        path = memory._path(client.name, 0)
        path.parent.mkdir(parents=True)
        path.write_bytes(content)


def routing(outcome: Outcome) -> list[object]:
    return routing_record(outcome.round, outcome.frequencies(), outcome.tokens())


def round_record(outcome: Outcome) -> RoundRecord:
    participants = [client.index for client in outcome.asked]
    return RoundRecord(round=outcome.round, seconds=0.0, participants=participants)


def measured(method_name: str, clients: int, rounds: int, *extra: str) -> dict[str, float]:
    """Returns the figures of a federation in a process of its own."""
    command = [sys.executable, __file__, "--one", method_name, str(clients), "--rounds", str(rounds), *extra]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Measures every federation, and tells how its memory grew."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--repeats", type=int, default=3, help="processes for each figure, which is their median")
    parser.add_argument("--clients", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--one", nargs=2, metavar=("METHOD", "CLIENTS"), help="one federation, in this process")
    parser.add_argument("--trace", action="store_true", help="with --one: trace Python's objects")
    add_device(parser)
    arguments = parser.parse_args()
    where = arguments.dtype, arguments.device
    there = ["--device", str(arguments.device), "--dtype", str(arguments.dtype).removeprefix("torch.")]
    if arguments.one:
        name, clients = arguments.one
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(federation(name, int(clients), arguments.rounds, Path(folder), arguments.trace, where)))
        return
    print(f"{machine(arguments.device, arguments.dtype)}; {ASKED} clients a round, {arguments.rounds} rounds")
    for method_name in METHODS:
        first = None
        for clients in arguments.clients:
            repeats = [measured(method_name, clients, arguments.rounds, *there) for _ in range(arguments.repeats)]
            found = {key: median(figures[key] for figures in repeats) for key in repeats[0]}
            found["held"] = found["tensors"] + measured(method_name, clients, 1, "--trace", *there)["python"]
            first = first or found
            print(
                f"{method_name}, {clients} clients: anonymous {grown(found, first, 'anonymous')}, held "
                f"{grown(found, first, 'held')}; per client and round {found['round']:.1f} ms, of these "
                f"{found['overhead']:.2f} ms beside training ({found['writing']:.2f} ms writing records and "
                "checkpoints, forgetting old memory)",
                flush=True,
            )


def grown(found: Mapping[str, float], first: Mapping[str, float], key: str) -> str:
    return f"{found[key]:.2f} MiB ({100 * (found[key] / first[key] - 1):+.1f} %)"


if __name__ == "__main__":
    main()
