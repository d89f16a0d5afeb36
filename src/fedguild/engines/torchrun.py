"""The `local` engine in several processes that `torchrun` started, which share one backbone's layers.

Rank 0 runs the rounds and has the run's folder. It tells the others what to call on their actors
(`fedguild.engines.ray_actor`), which work like those of a sharded Ray actor; it calls its own as well.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import MergeLedger, without_merges
from fedguild.config.training import TrainingSettings
from fedguild.core.codec import encode
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.payload import Payload
from fedguild.core.torchrun import torchrun_place
from fedguild.data.batches import Encoded
from fedguild.engines.cohorts import (
    CohortSize,
    OnStep,
    Planned,
    Private,
    Trained,
    delivery,
    in_order,
    plan_groups,
    split_by_need,
)
from fedguild.engines.ray_actor import CohortActor, Plain, decode_result, idle_job, job_of, merge_digest, pack_examples
from fedguild.engines.worker_slots import WorkerSlots, opened, raised
from fedguild.model.backbone import pick_device
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.model.ranks import TIMEOUT_SECONDS, Ranks
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, too_late
from fedguild.server.method import Method

BEGIN, END = "begin", "end"
"""What rank 0 tells the others beside the methods of an actor: to build one, and to stop."""


def follow(device: str = "auto") -> None:
    """Serves rank 0 until its run ends; for all other ranks.

    Args:
        device: The kind of device to compute on, as `model.device`.

    Raises:
        FedGuildError: a rank did not arrive in time, or this one failed; torchrun then ends all others.
    """
    ranks = _meet(device, TIMEOUT_SECONDS)
    workers = RankWorkers(ranks)
    try:
        while workers.answer():
            pass
    finally:
        ranks.close()


class RankWorkers:
    """The actors of all ranks, called by rank 0; see `fedguild.engines.worker_slots.Workers`."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.actor: CohortActor | None = None
        self.has_failed = False

    @property
    def count(self) -> int:
        return self.ranks.size

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every rank's actor, each with its own arguments; returns the results in order.

        Raises:
            FedGuildError: a rank did not arrive in time, or this one failed.
        """
        try:
            with self.ranks.naming_who_hangs():
                results = self._exchange([(name, own) for own in arguments])
        except BaseException:
            self.has_failed = True  # the others may be in the middle of a pass
            raise
        assert results is not None
        return results

    def answer(self) -> bool:
        """Executes rank 0's next request; returns whether there are more to come.

        Raises:
            FedGuildError: as `call`.
        """
        with self.ranks.naming_who_hangs():
            self._exchange(None)
        return self.actor is not None

    def _exchange(self, commands: list[tuple[str, tuple[Any, ...]]] | None) -> list[Any] | None:
        """Gives every rank its command, runs this one's, and returns all results on rank 0."""
        own: list[Any] = [None]
        dist.scatter_object_list(own, commands, src=0)
        name, arguments = own[0]
        result = self._run(name, arguments)
        results: list[Any] | None = [None] * self.count if commands is not None else None
        dist.gather_object(result, results, dst=0)
        return results

    def _run(self, name: str, arguments: tuple[Any, ...]) -> Any:
        """Runs a command; an error is raised here, as the other ranks may wait for this one in a pass."""
        if name == END:
            self.actor = None
            return None
        if name == BEGIN:
            place = (self.ranks.rank, self.count, self.ranks.timeout_seconds)
            backbone, settings, seed, threads, gpu_fraction, examples = arguments
            self.actor = CohortActor(backbone, settings, seed, threads, gpu_fraction, examples, place)
            self.actor.join(self.ranks)
            return None
        result = getattr(self.actor, name)(*arguments)
        raised([result[0] if isinstance(result, tuple) else result])
        return result


class TorchrunEngine:
    """Trains cohorts on the ranks, one on each at a time.

    Args:
        backbone: The arguments of `load_backbone`.
        examples: Client index -> its training examples, encoded.
        memory: What clients keep between rounds; stays with rank 0.
        cohort_size: Clients in one forward and backward pass; `auto` for as many as a rank's memory holds, and no more
            than every rank's share.
        timeout_seconds: Time that the ranks wait for each other.
        on_step: Called after each cohort with (cohorts done, total cohorts, its clients' mean loss).
        private: Returns a client's DP-SGD in a round; None to train without.

    Raises:
        FedGuildError: the ranks did not meet, or the backbone cannot be loaded.
    """

    def __init__(
        self,
        backbone: Plain,
        examples: Mapping[int, Sequence[Encoded]],
        settings: TrainingSettings,
        memory: ClientMemory,
        *,
        cohort_size: CohortSize = "auto",
        seed: int,
        timeout_seconds: float = TIMEOUT_SECONDS,
        on_step: OnStep | None = None,
        private: Private | None = None,
    ) -> None:
        self.memory, self.ledger = memory, MergeLedger.beside(memory)
        self.cohort_size, self.seed, self.on_step, self.private = cohort_size, seed, on_step, private
        self.workers = RankWorkers(_meet(str(backbone["device"]), timeout_seconds))
        self.device = self.workers.ranks.device
        arguments = (backbone, settings.model_dump(), seed, torch.get_num_threads(), 1.0, pack_examples(examples))
        self.workers.call(BEGIN, [arguments] * self.workers.count)

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order, after saving each client's memory.

        The deadline is checked before each cohort of every rank; those that have started are finished. With
        `terms.enough`, that many clients train, drawn at random as in a single process.

        Raises:
            FedGuildError: a rank did not arrive in time, its device's memory is too small, or a client's memory cannot
                be written.
        """
        planned, left_out = split_by_need(method, model, tasks, terms, self.seed)
        yield from in_order(left_out, self._deliveries(method, planned, terms.deadline_seconds))

    def slots(
        self,
        plans: Sequence[AdapterPlan],
        tensors: Sequence[Mapping[str, Tensor]],
        merged: Mapping[str, Tensor],
        model: ModelInfo,
    ) -> AbstractContextManager[WorkerSlots]:
        return opened(self.workers, plans, tensors, merged, model)

    def free_bytes(self) -> int:
        return int(min(self.workers.call("free_bytes", [()] * self.workers.count)))

    def close(self) -> None:
        """Ends the other ranks, unless one of them has failed: then torchrun ends them."""
        if not self.workers.has_failed:
            self.workers.call(END, [()] * self.workers.count)
            self.workers.ranks.close()

    def _deliveries(self, method: Method, planned: Sequence[Planned], deadline: float | None) -> Iterator[Delivery]:
        if not planned:
            return
        try:
            merges = encode(Payload(self.ledger.receive(*(task.download for task, _ in planned))))
        except CheckpointError as error:
            yield from (Delivery(task, None, plan, failure=error.message) for task, plan in planned)
            return
        started, done = time.monotonic(), 0
        cohorts = [cohort for members in plan_groups(planned) for cohort in self._cohorts(method, members)]
        for first in range(0, len(cohorts), self.workers.count):
            volley = cohorts[first : first + self.workers.count]
            if deadline is not None and time.monotonic() - started > deadline:
                yield from (too_late(task, plan, deadline) for cohort in volley for task, plan in cohort)
                continue
            trained = self._trained(method, volley, merges)
            merges = b""  # the ranks hold these changes until others are asked for
            for cohort, results in zip(volley, trained, strict=True):
                done += 1
                for (task, _), result in zip(cohort, results, strict=True):
                    result.remember(self.memory, task.client.name, task.round)
                if self.on_step is not None:
                    losses = [result.report.training.loss for result in results]
                    self.on_step(done, len(cohorts), sum(losses) / len(losses))
                yield from (delivery(task, plan, result) for (task, plan), result in zip(cohort, results, strict=True))

    def _trained(self, method: Method, volley: Sequence[Sequence[Planned]], merges: bytes) -> list[list[Trained]]:
        """Trains one cohort on each rank; `merges` is empty if they hold its changes already."""
        arguments: list[tuple[Any, ...]] = []
        for cohort in volley:
            tasks = [task for task, _ in cohort]
            downloads = [encode(without_merges(task.download)) for task in tasks]
            memories = [encode(self.memory.load(task.client.name, task.round)) for task in tasks]
            keep_trained = self.memory.trained is not None
            job = job_of(method, cohort, keep_trained=keep_trained, private=self.private)
            arguments.append((job, *downloads, *memories, merges))
        nothing = (idle_job(method, merge_digest(volley[0])), merges)
        arguments += [nothing] * (self.workers.count - len(volley))
        found = self.workers.call("train", arguments)[: len(volley)]
        return [
            [
                decode_result(report, *payloads[3 * slot : 3 * slot + 3])
                for slot, report in enumerate(summary["reports"])
            ]
            for summary, payloads in found
        ]

    def _cohorts(self, method: Method, members: Sequence[Planned]) -> list[list[Planned]]:
        """Splits clients that can train together into cohorts, enough of them that every rank gets one."""
        if self.cohort_size == "auto":
            job = job_of(method, members, private=self.private)
            fitting = int(min(self.workers.call("cohort_size", [(job,)] * self.workers.count)))
            size = max(1, min(fitting, -(-len(members) // self.workers.count)))
        else:
            size = self.cohort_size
        return [list(members[start : start + size]) for start in range(0, len(members), size)]


def _meet(device: str, timeout_seconds: float) -> Ranks:
    """Meets the other ranks; each uses the GPU of its local rank if there are GPUs."""
    place = torchrun_place()
    if place is None:
        raise FedGuildError("This process was not started by torchrun.")
    kind = pick_device(device)
    if kind.type == "cuda":
        kind = torch.device("cuda", place.local_rank)
        torch.cuda.set_device(kind)
    # torchrun's own store is on its port; ours takes the next one
    return Ranks.join(place.rank, place.size, kind, place.address, place.port + 1, timeout_seconds)
