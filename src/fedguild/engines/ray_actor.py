"""Training and scoring in an actor of the `ray` engine, and the bytes sent to it and back.

With a sharded backbone, an actor is one of several, each of which trains different clients. It then takes part in the
passes of the others until all have finished.

Nothing here imports Ray. An actor is built from plain values and receives its work as plain values and payloads' bytes.
A method is rebuilt from its name and options, a plan from its fields. No class of FedGuild is pickled.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalWork
from fedguild.client.merge_ledger import DIGEST
from fedguild.config.training import TrainingSettings
from fedguild.core.codec import decode, encode
from fedguild.core.errors import FedGuildError
from fedguild.core.packing import pack, unpack
from fedguild.data.batches import Encoded, SlotBatch
from fedguild.engines.client_report import ClientReport
from fedguild.engines.cohorts import FittingCohorts, Planned, Private, Trained, Trainer, free_bytes
from fedguild.engines.plain_plans import plan_from_plain
from fedguild.methods import build_method
from fedguild.model.backbone import Backbone, load_backbone, pick_device
from fedguild.model.ranks import Ranks
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.server.method import Method

Plain = dict[str, Any]
"""Numbers, strings, and lists and dicts of them."""
GATHERED_LAYERS = 2
"""Layers of a sharded backbone that are whole at a time: the one that runs and the one that is fetched."""


@dataclass(frozen=True)
class CohortJob:
    """The training of a cohort, without its payloads.

    Attributes:
        options: The method's options, as JSON values.
        round: The round, from 1.
        merge_digest: Digest of the changes that the backbone must hold; empty for none.
        keep_trained: Whether to return the trained models for scoring.
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
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Plain) -> CohortJob:
        """Returns the job that `to_plain` wrote."""
        clients = [ClientInfo(one["index"], Budget(**one["budget"]), one["examples"]) for one in plain["clients"]]
        return cls(**{**plain, "clients": tuple(clients), "private": tuple(plain["private"])})


def job_of(method: Method, members: Sequence[Planned], *, keep_trained: bool = False, private: Private | None) -> Plain:
    first, *_ = tasks = [task for task, _ in members]
    clients = tuple(task.client for task in tasks)
    noisy = () if private is None else tuple(private(client, first.round).to_plain() for client in clients)
    options = method.settings.model_dump(mode="json")
    job = CohortJob(method.name, options, first.round, clients, merge_digest(members), keep_trained, noisy)
    return job.to_plain()


def idle_job(method: Method, digest: str) -> Plain:
    """Returns the job of a process that only takes part in the passes of the others, on the same backbone."""
    return CohortJob(method.name, method.settings.model_dump(mode="json"), 0, (), digest).to_plain()


def merge_digest(members: Sequence[Planned]) -> str:
    return str(members[0][0].download.scalars.get(DIGEST, ""))


class CohortActor:
    """A backbone, and the training of cohorts and the scoring of models on it.

    With a place among several ranks the backbone is loaded in `meet`.

    Args:
        backbone: The arguments of `load_backbone`.
        settings: `TrainingSettings` as a plain dict.
        gpu_fraction: Part of the GPU's memory that this actor may use.
        examples: All clients' training examples, as `pack_examples` wrote them.
        place: Its rank, the number of ranks, and the seconds that they wait for each other; None to hold a whole
            backbone.
    """

    def __init__(
        self,
        backbone: Plain,
        settings: Plain,
        seed: int,
        threads: int,
        gpu_fraction: float,
        examples: bytes,
        place: tuple[int, int, float] | None = None,
    ) -> None:
        torch.set_num_threads(threads)
        self.gpu_fraction = gpu_fraction
        if torch.cuda.is_available() and gpu_fraction < 1:
            torch.cuda.set_per_process_memory_fraction(gpu_fraction)
        self.loads = 0
        self.place = place
        self.ranks: Ranks | None = None
        self._backbone, self._settings, self._seed = backbone, TrainingSettings(**settings), seed
        self.examples, _ = unpack(examples)
        self._merged = ExitStack()
        self._merged_digest = ""
        self._slots: SlotModel | None = None
        if place is None:
            self.trainer = self._trainer()

    def address(self) -> tuple[str, int]:
        """Returns this machine's address and a free port where ranks can meet."""
        with socket.socket() as free:
            free.bind(("", 0))
            return _own_address(), int(free.getsockname()[1])

    def meet(self, *places: tuple[str, int]) -> Plain | None:
        """Meets the other ranks and loads the backbone with them.

        Args:
            places: Each rank's `address`.

        Returns:
            An error as `error` and `hint`, or None.
        """
        assert self.place is not None
        rank, size, seconds = self.place
        address, port = places[0]
        if len({own for own, _ in places}) == 1:
            address = "127.0.0.1"
        device = pick_device(str(self._backbone["device"]))
        if device.type == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        try:
            self.ranks = Ranks.join(rank, size, device, address, port, seconds)
            self.join(self.ranks)
        except FedGuildError as error:
            return {"error": error.message, "hint": error.hint}
        return None

    def join(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.trainer = self._trainer()

    def _trainer(self) -> Trainer:
        return Trainer(self._load(self._backbone), self._settings, self._seed)

    def _trainer_of(self, request: CohortJob) -> Trainer:
        """Returns the trainer with the DP-SGD of a job's clients, if they train with it."""
        if not request.private:
            return self.trainer
        by_client = dict(zip(request.clients, map(DpSgd.from_plain, request.private), strict=True))
        return replace(self.trainer, private=lambda client, _: by_client[client])

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
        pairs = any(self.examples[f"{client.index}/pairs"] for client in request.clients)
        trainer = self._trainer_of(request)
        return trainer.cohort_size(plans, lengths, self._free_bytes(), request.round, rows=2 if pairs else 1)

    def train(self, job: Plain, *payloads: bytes) -> tuple[Plain, list[bytes]]:
        """Trains a cohort, in parts if the memory does not hold it at once.

        Args:
            job: A `CohortJob` as plain values; without clients to take part in the passes of other ranks only.
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
        cohorts = FittingCohorts(members, max(1, len(members)), self.trainer.backbone.device, splits=self.ranks is None)
        trainer = self._trainer_of(request)
        trained: list[Trained] = []
        try:
            with self._together():
                self._merge(request.merge_digest, payloads[-1])
                for cohort in cohorts:
                    plans = [method.plan(self.trainer.backbone.info, work.client.budget) for work in cohort]
                    with cohorts.fitting():
                        trained += trainer.train(
                            method, plans, cohort, request.round, keep_trained=request.keep_trained
                        )
        except FedGuildError as error:
            return {"error": error.message, "hint": error.hint}, []
        reports = [result.report.to_json() for result in trained]
        return {"reports": reports}, [payload for result in trained for payload in encode_payloads(result)]

    def open_slots(self, plans: Sequence[Plain], merge_digest: str, *payloads: bytes) -> None:
        """Loads models to be scored, until `close_slots`.

        Args:
            plans: Each model's plan, as `plain_plan` wrote it.
            merge_digest: Names the changes to the backbone; empty for none.
            payloads: Each model's tensors, then the changes to the backbone.
        """
        self.close_slots()
        self._merge(merge_digest, payloads[-1])
        self._slots = SlotModel(self.trainer.backbone, [plan_from_plain(plan) for plan in plans])
        for slot, payload in enumerate(payloads[:-1]):
            self._slots.load(slot, decode(payload).tensors)

    def close_slots(self) -> None:
        if self._slots is not None:
            self._slots.close()
            self._slots = None

    def free_bytes(self) -> int:
        """Returns the bytes of its device's memory that it can still use."""
        return self._free_bytes()

    def compute(self, name: str, *inputs: tuple[Any, ...]) -> list[Any] | Plain:
        """Returns the results of the loaded models' method of this name for several inputs.

        Args:
            name: `token_losses`, whose input is a batch as `plain_batch` wrote it, or `generate`.
            inputs: The arguments of each call; none to take part in the passes of other ranks only.

        Returns:
            The results, or an error as `error` and `hint`.
        """
        assert self._slots is not None
        results: list[Any] = []
        try:
            with self._together(), self.trainer.backbone.without_gradients():
                for arguments in inputs:
                    if name == "token_losses":
                        results.append(self._slots.token_losses(SlotBatch(**arguments[0])).cpu().numpy())
                    else:
                        results.append(self._slots.generate(*arguments))
        except FedGuildError as error:
            return {"error": error.message, "hint": error.hint}
        return results

    @contextmanager
    def _together(self) -> Iterator[None]:
        """With a sharded backbone, takes part in the passes of the other ranks after this one's own."""
        if self.ranks is None:
            yield
            return
        with self.ranks.naming_who_hangs():
            yield
            self.ranks.wait_for_others()

    def _load(self, options: Plain) -> Any:
        self.loads += 1
        return load_backbone(**options, ranks=self.ranks)

    def _merge(self, digest: str, merges: bytes | Sequence[Any]) -> None:
        """Merges the changes that the cohort trains on into the backbone, unless it holds them already.

        Args:
            merges: The changes, encoded, or Ray's reference of each version; not read if the backbone holds them.
        """
        if digest != self._merged_digest:
            self._merged.close()
            self._merged_digest = ""
            parts = [merges] if isinstance(merges, bytes) else _fetched(merges)
            tensors = {name: tensor for part in parts for name, tensor in decode(part).tensors.items()}
            self._merged.enter_context(self.trainer.backbone.merged(tensors))
            self._merged_digest = digest

    def _free_bytes(self) -> int:
        device = self.trainer.backbone.device
        free = free_bytes(device)
        if device.type != "cuda":
            return free
        share = int(self.gpu_fraction * torch.cuda.get_device_properties(device).total_memory)
        gathered = 0 if self.ranks is None else GATHERED_LAYERS * largest_layer_bytes(self.trainer.backbone)
        return max(0, min(free, share - torch.cuda.memory_allocated(device)) - gathered)


def largest_layer_bytes(backbone: Backbone) -> int:
    """Returns the bytes of the weights of a model's largest layer, over all ranks."""
    layers: dict[str, int] = {}
    for name, weight in backbone.model.named_parameters():
        parts = name.split(".")
        at = next((index for index, part in enumerate(parts) if part.isdecimal()), None)
        if at is not None:
            layer = ".".join(parts[: at + 1])
            layers[layer] = layers.get(layer, 0) + weight.numel() * weight.element_size()
    return max(layers.values(), default=0)


def _own_address() -> str:
    """Returns the address at which other machines reach this one; 127.0.0.1 if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("10.255.255.255", 1))  # sends nothing
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"


def encode_payloads(result: Trained) -> tuple[bytes, bytes, bytes]:
    """Returns the bytes of a client's upload, of its new memory and of its model as trained; empty for none."""
    kept = (result.memory, result.left)
    memory, left = (b"" if payload is None else encode(payload) for payload in kept)
    return encode(result.upload), memory, left


def decode_result(report: Plain, upload: bytes, memory: bytes, left: bytes) -> Trained:
    kept, trained = (decode(content) if content else None for content in (memory, left))
    return Trained(decode(upload), kept, ClientReport.from_json(report), trained)


def pack_examples(examples: Mapping[int, Sequence[Encoded]]) -> bytes:
    """Returns all clients' examples as the bytes of `{client}/ids`, `/lengths`, `/prompts`, `/skipped` and `/pairs`."""
    tensors = {}
    for index, own in examples.items():
        rows = [row for example in own for row in example.rows]
        ids = [token for row in rows for token in row.input_ids]
        tensors[f"{index}/ids"] = torch.tensor(ids, dtype=torch.int32)
        tensors[f"{index}/lengths"] = torch.tensor([len(row.input_ids) for row in rows], dtype=torch.int32)
        tensors[f"{index}/prompts"] = torch.tensor([row.prompt_length for row in rows], dtype=torch.int32)
        skipped = [(number, *one) for number, row in enumerate(rows) for one in row.skipped]
        tensors[f"{index}/skipped"] = torch.tensor(skipped, dtype=torch.int32).reshape(-1, 3)
        tensors[f"{index}/pairs"] = torch.tensor(len(rows) > len(own))
    return pack(tensors, {})


def unpack_rows(examples: Mapping[str, torch.Tensor], index: int) -> list[Encoded]:
    """Returns one client's examples from the tensors of `pack_examples`."""
    rows = examples[f"{index}/ids"].split(examples[f"{index}/lengths"].tolist())
    prompts = examples[f"{index}/prompts"].tolist()
    skipped: list[list[tuple[int, int]]] = [[] for _ in rows]
    for number, start, end in examples[f"{index}/skipped"].tolist():
        skipped[number].append((start, end))
    found = [
        Encoded(tuple(row.tolist()), prompt, tuple(ranges))
        for row, prompt, ranges in zip(rows, prompts, skipped, strict=True)
    ]
    if not examples[f"{index}/pairs"]:
        return found
    return [replace(one, rejected=other) for one, other in zip(found[::2], found[1::2], strict=True)]


def _fetched(references: Sequence[Any]) -> list[bytes]:
    import ray  # an actor that torchrun started has none

    found: list[bytes] = ray.get(list(references))
    return found
