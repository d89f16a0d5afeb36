"""Training in an actor of the `ray` engine, and the bytes that go to it and come back.

Nothing here imports Ray. An actor is built from plain values and receives its work as plain values and payloads'
bytes; a method is rebuilt from its name and options. None of our classes is pickled.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.engines.client_report import ClientReport
from fedguild.engines.cohorts import FittingCohorts, Trained, Trainer, free_bytes, further_plan
from fedguild.errors import FedGuildError
from fedguild.methods import build_method
from fedguild.model.backbone import load_backbone
from fedguild.packing import pack, unpack
from fedguild.privacy.dp_sgd import DpSgd
from fedguild.wire.codec import decode, encode

Plain = dict[str, Any]
"""Numbers, strings, and lists and dicts of them."""


@dataclass(frozen=True)
class CohortJob:
    """The training of a cohort, without its payloads.

    Attributes:
        method: Name of the method.
        options: Its options, as JSON values.
        round: The round, from 1.
        clients: The cohort's clients.
        merge_digest: Digest of the changes that the backbone must hold; empty for none.
        keep_trained: Whether to return the models that the training leaves.
        private: Each client's DP-SGD (`DpSgd.to_plain`); empty to train without.
    """

    method: str
    options: Plain
    round: int
    clients: tuple[ClientInfo, ...]
    merge_digest: str = ""
    keep_trained: bool = False
    private: tuple[Plain, ...] = ()

    def to_plain(self) -> Plain:
        """Returns the job as plain values."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Plain) -> CohortJob:
        """Returns the job that `to_plain` wrote."""
        clients = [ClientInfo(one["index"], Budget(**one["budget"]), one["examples"]) for one in plain["clients"]]
        return cls(**{**plain, "clients": tuple(clients), "private": tuple(plain["private"])})


class CohortActor:
    """A backbone, and the training of cohorts on it.

    Args:
        backbone: The arguments of `load_backbone`.
        settings: `TrainingSettings` as a plain dict.
        seed: The run's seed.
        threads: CPU threads to compute with.
        gpu_fraction: Part of the GPU's memory that this actor may use.
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
        """Returns the actor's process, how often it loaded the backbone, its threads and its device."""
        return {
            "pid": os.getpid(),
            "loads": self.loads,
            "threads": torch.get_num_threads(),
            "device": str(self.trainer.backbone.device),
        }

    def cohort_size(self, job: Plain) -> int:
        """Returns how many of a job's clients this actor's memory holds at once."""
        request = CohortJob.from_plain(job)
        method = build_method(request.method, request.options)
        plans = [method.plan(self.trainer.backbone.info, client.budget) for client in request.clients]
        lengths = [self.examples[f"{client.index}/lengths"].tolist() for client in request.clients]
        beside = further_plan(method, self.trainer.backbone.info, request.clients, request.round)
        return self.trainer.cohort_size(plans, lengths, self._free_bytes(), beside)

    def train(self, job: Plain, *payloads: bytes) -> tuple[Plain, list[bytes]]:
        """Trains a cohort, in parts where the memory does not hold it at once.

        Args:
            job: A `CohortJob` as plain values.
            payloads: Each client's download, then each client's memory, then the changes to the backbone.

        Returns:
            `reports`, each client's (or an error as `error` and `hint`); and each client's upload, new memory, and
            model as trained (each empty for none).
        """
        request = CohortJob.from_plain(job)
        method, clients = build_method(request.method, request.options), request.clients
        downloads, memories = payloads[: len(clients)], payloads[len(clients) : 2 * len(clients)]
        members = [
            LocalWork(client, unpack_rows(self.examples, client.index), decode(download), decode(memory))
            for client, download, memory in zip(clients, downloads, memories, strict=True)
        ]
        cohorts = FittingCohorts(members, len(members), self.trainer.backbone.device)
        trainer = self.trainer
        if request.private:
            by_client = dict(zip(clients, map(DpSgd.from_plain, request.private), strict=True))
            trainer = replace(trainer, private=lambda client, _: by_client[client])
        trained: list[Trained] = []
        try:
            self._merge(request.merge_digest, payloads[-1])
            for cohort in cohorts:
                plans = [method.plan(self.trainer.backbone.info, work.client.budget) for work in cohort]
                with cohorts.fitting():
                    trained += trainer.train(method, plans, cohort, request.round, keep_trained=request.keep_trained)
        except FedGuildError as error:
            return {"error": error.message, "hint": error.hint}, []
        reports = [result.report.to_json() for result in trained]
        return {"reports": reports}, [payload for result in trained for payload in encode_payloads(result)]

    def _load(self, options: Plain) -> Any:
        self.loads += 1
        return load_backbone(**options)

    def _merge(self, digest: str, merges: bytes) -> None:
        """Merges the changes that the cohort trains on into the backbone, unless it holds them already."""
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


def encode_payloads(result: Trained) -> tuple[bytes, bytes, bytes]:
    """Returns the bytes of a client's upload, of its new memory and of its model as trained; empty for none."""
    kept = (result.memory, result.left)
    memory, left = (b"" if payload is None else encode(payload) for payload in kept)
    return encode(result.upload), memory, left


def decode_result(report: Plain, upload: bytes, memory: bytes, left: bytes) -> Trained:
    """Returns the result that a client's report and `encode_payloads` came from."""
    kept, trained = (decode(content) if content else None for content in (memory, left))
    return Trained(decode(upload), kept, ClientReport.from_json(report), trained)


def pack_examples(examples: Mapping[int, Sequence[Encoded]]) -> bytes:
    """Returns all clients' examples as the bytes of `{client}/ids`, `/lengths` and `/prompts`."""
    tensors = {}
    for index, rows in examples.items():
        ids = [token for row in rows for token in row.input_ids]
        tensors[f"{index}/ids"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{index}/lengths"] = torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int32)
        tensors[f"{index}/prompts"] = torch.tensor([row.prompt_length for row in rows], dtype=torch.int32)
    return pack(tensors, {})


def unpack_rows(examples: Mapping[str, torch.Tensor], index: int) -> list[Encoded]:
    """Returns one client's examples from the tensors of `pack_examples`."""
    rows = examples[f"{index}/ids"].split(examples[f"{index}/lengths"].tolist())
    prompts = examples[f"{index}/prompts"].tolist()
    return [Encoded(tuple(row.tolist()), prompt) for row, prompt in zip(rows, prompts, strict=True)]
