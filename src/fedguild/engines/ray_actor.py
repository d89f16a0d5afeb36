"""What runs in an actor of the `ray` engine, and the bytes that go to it and come back.

Nothing here imports Ray. An actor is built from plain values and gets its work as plain values and
payloads' bytes; a method is built anew from its name and options. None of our classes is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport, LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.engines.cohorts import Trained, Trainer, free_bytes, halving
from fedguild.errors import FedGuildError
from fedguild.methods import build_method
from fedguild.model.backbone import load_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.packing import pack, unpack
from fedguild.wire.codec import decode, encode

FREQUENCY = "frequency"
Plain = dict[str, Any]
"""Numbers, texts, and lists and dicts of them."""


class CohortActor:
    """One backbone, and the cohorts that train on it.

    Args:
        backbone: The arguments of `load_backbone`.
        settings: `TrainingSettings` as a plain dict.
        seed: The run's seed.
        threads: CPU threads to compute with.
        gpu_fraction: Part of the GPU's memory that is this actor's.
        examples: All clients' training examples, as `pack_examples` wrote them.
    """

    def __init__(
        self, backbone: Plain, settings: Plain, seed: int, threads: int, gpu_fraction: float, examples: bytes
    ) -> None:
        torch.set_num_threads(threads)
        self.gpu_fraction = gpu_fraction
        if torch.cuda.is_available() and gpu_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(gpu_fraction)
        self.loads = 0
        self.trainer = Trainer(self._load(backbone), TrainingSettings(**settings), seed)
        self.examples, _ = unpack(examples)
        self._merged = ExitStack()
        self._merged_digest = ""

    def describe(self) -> Plain:
        """Returns its process, how often it loaded the backbone, its threads and its device."""
        return {
            "pid": os.getpid(),
            "loads": self.loads,
            "threads": torch.get_num_threads(),
            "device": str(self.trainer.backbone.device),
        }

    def cohort_size(self, job: Plain) -> int:
        """Returns how many of the job's clients this actor's memory holds at once."""
        method = build_method(job["method"], job["options"])
        plans = [method.plan(self.trainer.backbone.info, budget_of(client)) for client in job["clients"]]
        longest = max(int(self.examples[f"{client['index']}/lengths"].max()) for client in job["clients"])
        return self.trainer.cohort_size(plans, longest, self._free_bytes())

    def train(self, job: Plain, *payloads: bytes) -> tuple[Plain, list[bytes]]:
        """Trains a cohort, in parts where the memory does not hold it at once.

        Args:
            job: `method`, `options`, `round`, `clients`, and `merge_digest` (see `job_of`).
            payloads: Each client's download, then each client's memory, then the changes of the
                backbone.

        Returns:
            Each client's report (or an error as `error` and `hint`), and each client's upload, what
            it keeps (empty for nothing new) and its activation frequency.
        """
        method, clients = build_method(job["method"], job["options"]), job["clients"]
        downloads, memories = payloads[: len(clients)], payloads[len(clients) : 2 * len(clients)]
        members = []
        for client, download, memory in zip(clients, downloads, memories, strict=True):
            info = client_of(client)
            work = LocalWork(info, self._rows(info.index), decode(download), decode(memory))
            members.append((method.plan(self.trainer.backbone.info, info.budget), work))

        def train(cohort: Sequence[tuple[AdapterPlan, LocalWork]]) -> list[Trained]:
            plans, work = zip(*cohort, strict=True)
            return self.trainer.train(method, plans, work, job["round"])

        try:
            self._merge(job["merge_digest"], payloads[-1])
            trained = list(halving(members, len(members), train, self.trainer.backbone.device))
        except FedGuildError as error:
            return {"error": error.message, "hint": error.hint}, []
        return {"reports": [as_plain(result) for result in trained]}, [b for r in trained for b in as_bytes(r)]

    def _load(self, options: Plain) -> Any:
        self.loads += 1
        return load_backbone(**options)

    def _rows(self, index: int) -> list[Encoded]:
        return list(unpack_rows(self.examples, index))

    def _merge(self, digest: str, merges: bytes) -> None:
        """Brings the backbone to the changes that the cohort is to train on, unless it is there already."""
        if digest != self._merged_digest:
            self._merged.close()
            self._merged_digest = ""
            self._merged.enter_context(self.trainer.backbone.merged(decode(merges).tensors))
            self._merged_digest = digest

    def _free_bytes(self) -> int:
        device = self.trainer.backbone.device
        free = free_bytes(device)
        if device.type != "cuda":
            return free
        share = int(self.gpu_fraction * torch.cuda.get_device_properties(device).total_memory)
        return min(free, share - torch.cuda.memory_allocated(device))


def as_plain(result: Trained) -> Plain:
    """Returns a client's report as plain values."""
    report = result.report
    return {
        "steps": report.steps,
        "tokens": report.tokens,
        "examples": report.examples,
        "loss": report.loss,
        "seconds": report.seconds,
        "peak_memory_bytes": result.peak_memory_bytes,
    }


def as_bytes(result: Trained) -> tuple[bytes, bytes, bytes]:
    """Returns a client's upload, what it keeps and its activation frequency; empty where there is none."""
    kept = b"" if result.kept is None else encode(result.kept)
    frequency = b"" if result.frequency is None else pack({FREQUENCY: result.frequency}, {})
    return encode(result.upload), kept, frequency


def trained_of(report: Plain, upload: bytes, kept: bytes, frequency: bytes) -> Trained:
    """Returns what `as_plain` and `as_bytes` were given."""
    values = dict(report)
    peak = values.pop("peak_memory_bytes")
    return Trained(
        decode(upload),
        decode(kept) if kept else None,
        LocalReport(**values),
        unpack(frequency)[0][FREQUENCY] if frequency else None,
        peak,
    )


def job_of(method: str, options: Plain, round_index: int, clients: Sequence[ClientInfo], merge_digest: str) -> Plain:
    """Returns what an actor is asked to do, but for the payloads.

    Args:
        method: Its name.
        options: Its options.
        round_index: The round.
        clients: Who trains.
        merge_digest: Which changes the backbone is to hold; empty for none.
    """
    plain = [asdict(client) for client in clients]
    return {
        "method": method,
        "options": options,
        "round": round_index,
        "clients": plain,
        "merge_digest": merge_digest,
    }


def client_of(plain: Plain) -> ClientInfo:
    """Returns the client that `asdict` was given."""
    return ClientInfo(plain["index"], budget_of(plain), plain["examples"])


def budget_of(client: Plain) -> Budget:
    """Returns the budget of a plain client."""
    return Budget(**client["budget"])


def pack_examples(examples: Mapping[int, Sequence[Encoded]]) -> bytes:
    """Returns all clients' examples as the bytes of `{client}/ids`, `/lengths` and `/prompts`."""
    tensors = {}
    for index, rows in examples.items():
        ids = [token for row in rows for token in row.input_ids]
        tensors[f"{index}/ids"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{index}/lengths"] = torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int32)
        tensors[f"{index}/prompts"] = torch.tensor([row.prompt_length for row in rows], dtype=torch.int32)
    return pack(tensors, {})


def unpack_rows(examples: Mapping[str, torch.Tensor], index: int) -> Iterator[Encoded]:
    """Yields one client's examples from the tensors of `pack_examples`."""
    lengths = examples[f"{index}/lengths"].tolist()
    rows = examples[f"{index}/ids"].split(lengths)
    for row, prompt in zip(rows, examples[f"{index}/prompts"].tolist(), strict=True):
        yield Encoded(tuple(row.tolist()), prompt)
