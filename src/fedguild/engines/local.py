"""The `local` engine: cohorts of clients, one after the other, in this process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from fedguild.client.cohort import LocalWork
from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import MergeLedger
from fedguild.client.preference import has_pairs
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import CheckpointError
from fedguild.core.progress import Note, unnoted
from fedguild.data.batches import Encoded
from fedguild.engines.cohorts import (
    CohortSize,
    FittingCohorts,
    OnStep,
    Planned,
    Private,
    Trained,
    Trainer,
    delivery,
    free_bytes,
    plan_groups,
    room_of,
    split_by_need,
    taken_before,
)
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, too_late
from fedguild.server.method import Method


class LocalEngine:
    """Trains cohorts on one backbone.

    Args:
        examples: Client index -> its training examples, encoded.
        cohort_size: Clients in one forward and backward pass; `auto` for as many as `auto_cohort_size` allows.
        on_step: Called after each optimizer step with the cohort's (steps done, total steps, mean loss).
        ledger: The changes to the backbone that were received; by default in a folder next to `memory`.
        private: Returns a client's DP-SGD in a round; None to train without.
        note: Receives the clients of each cohort before it is trained.
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
        private: Private | None = None,
        note: Note = unnoted,
    ) -> None:
        self.note = note
        self.backbone = backbone
        self.examples = examples
        self.settings = settings
        self.memory = memory
        self.cohort_size = cohort_size
        self.seed = seed
        self.ledger = ledger or MergeLedger.beside(memory)
        self.trainer = Trainer(backbone, settings, seed, on_step, private)

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order, after saving each client's memory.

        A client whose training diverged keeps its previous memory. The deadline is checked before each cohort; a cohort
        that has started is finished. With `terms.enough`, only that many clients train, drawn at random.

        While they train, the backbone's weights hold the changes that the downloads refer to
        (`fedguild.client.merge_ledger`); if some of those are missing, all clients fail.

        Raises:
            FedGuildError: the device's memory is too small for one client, or a client's memory cannot be written.
            ModelError: the backbone cannot hold the changes.
        """
        planned, left_out = split_by_need(method, model, tasks, terms, self.seed)
        started = time.monotonic()
        try:
            merges = self.ledger.receive(*(task.download for task, _ in planned)) if planned else {}
        except CheckpointError as error:
            left_out |= {task.client.index: Delivery(task, None, plan, failure=error.message) for task, plan in planned}
            planned, merges = [], {}
        with self.backbone.merged(merges):
            for members in plan_groups(planned):
                device = self.backbone.device
                room = room_of(device) if self.cohort_size == "auto" else None
                cohorts = FittingCohorts(members, self._size(members), device, room=room)
                for cohort in cohorts:
                    deadline = terms.deadline_seconds
                    if deadline is not None and time.monotonic() - started > deadline:
                        left_out |= {task.client.index: too_late(task, plan, deadline) for task, plan in cohort}
                        continue
                    trained: list[Trained] = []
                    with cohorts.fitting():
                        work = [self._work(task) for task, _ in cohort]
                        self.note("training", clients=[task.client.index for task, _ in cohort])
                        trained = self.trainer.train(
                            method,
                            [plan for _, plan in cohort],
                            work,
                            cohort[0][0].round,
                            keep_trained=self.memory.trained is not None,
                        )
                    if trained:  # else the memory was too small, and the cohort comes again in parts
                        yield from self._delivered(cohort, trained, left_out)
        yield from taken_before(left_out)

    def close(self) -> None:
        """Does nothing: there is nothing to release."""

    def _delivered(
        self, cohort: Sequence[Planned], trained: Sequence[Trained], left_out: dict[int, Delivery]
    ) -> Iterator[Delivery]:
        for (task, _), result in zip(cohort, trained, strict=True):
            result.remember(self.memory, task.client.name, task.round)
        for (task, plan), result in zip(cohort, trained, strict=True):
            yield from taken_before(left_out, task.client.index)
            yield delivery(task, plan, result)

    def _work(self, task: Task) -> LocalWork:
        kept = self.memory.load(task.client.name, task.round)
        return LocalWork(task.client, self.examples[task.client.index], task.download, kept)

    def _size(self, members: Sequence[Planned]) -> int:
        if self.cohort_size != "auto":
            return self.cohort_size
        (first, _), *_ = members
        plans, free = [plan for _, plan in members], free_bytes(self.backbone.device)
        examples = [self.examples[task.client.index] for task, _ in members]
        lengths = [[len(row.input_ids) for example in own for row in example.rows] for own in examples]
        return self.trainer.cohort_size(
            plans, lengths, free, first.round, rows=2 if any(map(has_pairs, examples)) else 1
        )
