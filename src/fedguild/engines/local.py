"""The `local` engine: cohorts of clients, one after the other, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from fedguild.client.cohort import LocalWork
from fedguild.client.memory import ClientMemory
from fedguild.client.merges import MergeLedger
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.engines.cohorts import (
    CohortSize,
    OnStep,
    Planned,
    Trainer,
    delivery,
    free_bytes,
    halving,
    in_task_order,
    plan_groups,
    split_by_need,
)
from fedguild.errors import CheckpointError
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.method import Method
from fedguild.server.rounds import WAIT_FOR_ALL, Delivery, Task, Terms, too_late


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
        ledger: The changes of the backbone that were received; by default in a folder beside `memory`.
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
        on_step: OnStep | None = None,
        ledger: MergeLedger | None = None,
    ) -> None:
        self.backbone = backbone
        self.examples = examples
        self.settings = settings
        self.memory = memory
        self.cohort_size = cohort_size
        self.seed = seed
        self.ledger = ledger or MergeLedger.beside(memory)
        self.trainer = Trainer(backbone, settings, seed, on_step)

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Terms = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order; each client's memory is kept before.

        A client whose training diverged keeps the memory that it had. The deadline is looked at
        before each cohort: one that has begun is waited for. With `terms.enough`, so many clients
        train, drawn at random.

        While they train, the backbone's weights hold the changes that the downloads are about
        (`fedguild.client.merges`); where some of those are missing, all clients fail.

        Raises:
            FedGuildError: the device does not hold one client, or the memory cannot be written.
            ModelError: the backbone cannot hold the changes.
        """
        planned, left_out = split_by_need(method, model, tasks, terms, self.seed)
        yield from in_task_order(tasks, left_out, self._deliveries(method, planned, terms.deadline_seconds))

    def close(self) -> None:
        """Has nothing to let go of."""

    def _deliveries(self, method: Method, planned: Sequence[Planned], deadline: float | None) -> Iterator[Delivery]:
        started = time.monotonic()

        def train(cohort: Sequence[Planned]) -> list[Delivery]:
            if deadline is not None and time.monotonic() - started > deadline:
                return [too_late(task, plan, deadline) for task, plan in cohort]
            return self._train_cohort(method, cohort)

        if not planned:
            return
        try:
            merges = self.ledger.receive(*(task.download for task, _ in planned))
        except CheckpointError as error:
            yield from (Delivery(task, None, plan, failure=error.message) for task, plan in planned)
            return
        with self.backbone.merged(merges):
            for members in plan_groups(planned):
                yield from halving(members, self._size(members), train, self.backbone.device)

    def _train_cohort(self, method: Method, members: Sequence[Planned]) -> list[Delivery]:
        work = [self._work(task) for task, _ in members]
        plans = [plan for _, plan in members]
        trained = self.trainer.train(method, plans, work, members[0][0].round)
        for (task, _), result in zip(members, trained, strict=True):
            if result.kept is not None:
                self.memory.save(task.client.name, task.round, result.kept)
        return [delivery(task, plan, result) for (task, plan), result in zip(members, trained, strict=True)]

    def _work(self, task: Task) -> LocalWork:
        kept = self.memory.load(task.client.name, task.round)
        return LocalWork(task.client, self.examples[task.client.index], task.download, kept)

    def _size(self, members: Sequence[Planned]) -> int:
        if self.cohort_size != "auto":
            return self.cohort_size
        longest = max(len(row.input_ids) for task, _ in members for row in self.examples[task.client.index])
        return self.trainer.cohort_size([plan for _, plan in members], longest, free_bytes(self.backbone.device))
