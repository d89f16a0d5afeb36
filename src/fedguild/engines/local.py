"""The `local` engine: cohorts of clients, one after the other, in this process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Literal

import psutil
import torch

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.memory import ClientMemory
from fedguild.client.schedule import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.engines.peak_memory import peak_bytes, reset_peak
from fedguild.errors import FedGuildError
from fedguild.evaluation.profile import memory
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, ModelInfo
from fedguild.model.slots import SlotModel
from fedguild.payload import Payload
from fedguild.server.method import Method
from fedguild.server.rounds import Delivery, Task

CohortSize = int | Literal["auto"]
MEMORY_SHARE = 0.6
"""Part of the free memory that `auto` fills with clients."""


class LocalEngine:
    """Trains cohorts on one backbone.

    Args:
        backbone: The frozen model.
        examples: Client index -> its training examples, encoded.
        settings: How clients train.
        memory: What clients keep between rounds.
        cohort_size: Clients in one forward and backward pass; `auto` as many as memory holds.
        seed: The run's seed.
        on_step: Called after each optimizer step with the cohort's (steps done, steps in all, mean
            loss).
    """

    def __init__(
        self,
        backbone: Backbone,
        examples: Mapping[int, Sequence[Encoded]],
        settings: TrainingSettings,
        memory: ClientMemory,
        *,
        cohort_size: CohortSize = "auto",
        seed: int,
        on_step: Callable[[int, int, float], None] | None = None,
    ) -> None:
        self.backbone = backbone
        self.examples = examples
        self.settings = settings
        self.memory = memory
        self.cohort_size = cohort_size
        self.seed = seed
        self.on_step = on_step

    def train(self, method: Method, model: ModelInfo, tasks: Sequence[Task]) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order; each client's memory is kept before.

        A client whose training diverged keeps the memory that it had.

        Raises:
            FedGuildError: the device does not hold one client, or the memory cannot be written.
        """
        planned = [(task, method.plan(model, task.client.budget)) for task in tasks]
        for _, group in groupby(planned, key=lambda pair: pair[1].cohort_key):
            members = list(group)
            size = self._size([plan for _, plan in members], [task for task, _ in members])
            while members:
                cohort, members = members[:size], members[size:]
                try:
                    deliveries = self._train_cohort(method, cohort)
                except torch.OutOfMemoryError as error:
                    if len(cohort) == 1:
                        raise FedGuildError(
                            f"The memory of {self.backbone.device} does not hold one client's training.",
                            "Lower training.batch_size or data.max_tokens, or set model.gradient_checkpointing=true.",
                        ) from error
                    members, size = cohort + members, len(cohort) // 2
                    torch.cuda.empty_cache()
                    continue
                yield from deliveries

    def _train_cohort(self, method: Method, members: Sequence[tuple[Task, AdapterPlan]]) -> list[Delivery]:
        reset_peak(self.backbone.device)
        tasks = [task for task, _ in members]
        with SlotModel(self.backbone, [plan for _, plan in members]) as model:
            cohort = Cohort(
                model,
                [self._work(task) for task in tasks],
                self.settings,
                round_index=tasks[0].round,
                seed=self.seed,
                pad_id=self.backbone.tokenizer.pad_token_id if self.backbone.tokenizer is not None else 0,
                on_step=self.on_step,
            )
            uploads = method.local_update(cohort)
        peak = peak_bytes(self.backbone.device)
        for task, kept in zip(tasks, cohort.kept, strict=True):
            if kept and all(bool(tensor.isfinite().all()) for tensor in kept.values()):
                self.memory.save(task.client.name, task.round, Payload(kept))
        frequency = None
        if model.backbone.info.moe and cohort.routing is not None:
            frequency = cohort.routing.frequency().float().cpu()
        return [
            Delivery(
                task,
                upload,
                plan,
                replace(cohort.reports[slot]),
                None if frequency is None else frequency[:, slot],
                peak,
            )
            for slot, ((task, plan), upload) in enumerate(zip(members, uploads, strict=True))
        ]

    def _work(self, task: Task) -> LocalWork:
        kept = self.memory.load(task.client.name, task.round)
        return LocalWork(task.client, self.examples[task.client.index], task.download, kept)

    def _size(self, plans: Sequence[AdapterPlan], tasks: Sequence[Task]) -> int:
        if self.cohort_size != "auto":
            return self.cohort_size
        longest = max(len(row.input_ids) for task in tasks for row in self.examples[task.client.index])
        largest = max(plans, key=lambda plan: (plan.rank, plan.active_experts or self.backbone.info.top_k))
        return auto_cohort_size(
            self.backbone, largest, self.settings.batch_size * longest, len(plans), free_bytes(self.backbone.device)
        )


def auto_cohort_size(backbone: Backbone, plan: AdapterPlan, tokens: int, clients: int, free: int) -> int:
    """Returns how many clients to train at once: as many as fit `MEMORY_SHARE` of the free bytes.

    Args:
        backbone: The loaded backbone, whose weights are not counted again.
        plan: The largest plan of the clients.
        tokens: Tokens of one client's forward pass, padding included.
        clients: How many there are.
        free: Free bytes of the device's memory.
    """
    need = memory(
        backbone.info,
        plan,
        tokens,
        dtype=backbone.dtype,
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in backbone.model.modules()),
    )
    per_client = need.total_bytes - need.weights_bytes
    return max(1, min(clients, int(MEMORY_SHARE * free / per_client)))


def free_bytes(device: torch.device) -> int:
    """Returns the free bytes of the device's memory."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)
