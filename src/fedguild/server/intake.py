"""Intake of a round's uploads: asking, checking, counting, and handing the valid ones to the aggregate.

All failures of clients and of the network are handled here: a missing upload is requested again or skipped, an invalid
or unexpected one is left out and recorded, and too few valid uploads are an error.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import replace
from math import isfinite

from fedguild.core.accounting import count_traffic, size_bytes
from fedguild.core.codec import shrunk_shapes
from fedguild.core.errors import FedGuildError, NotFiniteError, UploadError
from fedguild.core.payload import Payload
from fedguild.core.text import printable
from fedguild.server.diagnosis import Diagnosis
from fedguild.server.divergence import require_finite_uploads
from fedguild.server.engine import Delivery, Task, Wait
from fedguild.server.guard import LARGEST_TRAINED, LARGEST_VALUE, largest_value
from fedguild.server.optimizer import own_state
from fedguild.server.round import Onward, Outcome, Passage, RoundSetup, Stray, filtered
from fedguild.server.sampling import require_quorum
from fedguild.server.terms import Upload
from fedguild.server.validation import check_size, check_upload, unusable

NOTHING = "nothing was delivered"


class Intake:
    """Asks the clients of one round and sorts their deliveries into an outcome."""

    def __init__(
        self,
        setup: RoundSetup,
        outcome: Outcome,
        tasks: Sequence[Task],
        wanted: int,
        accepted_before: Collection[int],
    ) -> None:
        self.setup, self.outcome, self.wanted = setup, outcome, wanted
        self.method, self.model, self.rules, self.note = setup.method, setup.model, setup.rules, setup.note
        self.accepted_before = frozenset(accepted_before)
        self.tasks = {task.client.index: task for task in tasks}
        self.accepted: set[int] = set()
        self.unneeded: set[int] = set()
        self.retried: set[int] = set()
        self.arrived: dict[int, Delivery] = {}
        self.late: dict[int, Delivery] = {}
        self.diagnosis = Diagnosis(own_state(outcome.state), setup.model) if setup.diagnose else None

    def uploads(self) -> Generator[Upload, None, None]:
        """Trains the clients, with the retries that the rules allow; yields the uploads to aggregate, records all."""
        for attempt in range(1 + self.rules.retries):
            tasks = [task for index, task in self.tasks.items() if index not in self.accepted]
            missing = self.wanted - len(self.accepted)
            if missing == 0:
                break
            if attempt and self.setup.again is not None:
                may = {client.index for client in self.setup.again(self.outcome.round, [task.client for task in tasks])}
                tasks = [task for task in tasks if task.client.index in may]
            if not tasks:
                break
            if attempt:
                self.retried.update(task.client.index for task in tasks)
            needed = self.setup.quorum(self.wanted) - len(self.accepted)
            terms = Wait(self.rules.deadline_seconds, missing if missing < len(tasks) else None, max(0, needed))
            asked = [task.client.index for task in tasks]
            self.note("asked", round=self.outcome.round, attempt=attempt, clients=asked)
            arriving = self.setup.engine.train(self.method, self.model, tasks, terms)
            while True:
                with self.outcome.clock.phase("train"):
                    delivery = next(arriving, None)
                if delivery is None:
                    break
                with self.outcome.clock.phase("validate"):
                    upload = self._sorted_in(delivery)
                self._tell_of(delivery)
                if upload is not None:
                    yield self._seen(upload)
        self.note("phase", phase="aggregate")
        yield from self._late_uploads()

    def _seen(self, upload: Upload) -> Upload:
        """Returns an upload that is to be aggregated, after the diagnosis has looked at it."""
        if self.diagnosis is not None:
            self.diagnosis.look_at(upload)
        return upload

    def withdraw(self, upload: Upload, reason: str) -> None:
        """Records that an upload, accepted as it arrived, is not aggregated after all."""
        index, reason = upload.client.index, printable(reason)
        if upload.round == self.outcome.round:
            self.accepted.discard(index)
            self.outcome.rejected[index] = reason
            self.note("withdrawn", client=index, reason=reason)
        strays = self.outcome.strays
        for position, stray in enumerate(strays):
            if (stray.round, stray.client, stray.dropped) == (upload.round, index, ""):
                strays[position] = replace(stray, dropped=reason)
        if self.diagnosis is not None:
            self.diagnosis.forget(upload)

    def onward(self, state: Payload) -> Onward:
        """Returns the uploads' way through the filters to the method's next state."""
        schemas = [
            self.method.schema(self.model, task.client, task.download, task.round)
            for task in self.tasks.values()
            if self.setup.filters
        ]
        bounded = {name for schema in schemas for name, tensor in schema.tensors.items() if tensor.bound is not None}
        return filtered(Passage(self.setup, self.outcome, state, self.wanted, self.withdraw, bounded))

    def close(self) -> None:
        """Completes the outcome: every client that was asked is accepted, rejected or not needed.

        Raises:
            DivergedError: every upload has NaN or infinity.
            QuorumError: there were too few valid uploads.
        """
        outcome = self.outcome
        for index, task in self.tasks.items():
            if index not in self.arrived:
                self._count(task, None)
                outcome.rejected[index] = NOTHING
        outcome.accepted = sorted(self.accepted)
        outcome.unneeded = sorted(self.unneeded)
        outcome.retried = sorted(self.retried)
        outcome.deliveries = [self._reported(self.arrived[index]) for index in self.tasks if index in self.arrived]
        if self.diagnosis is not None:
            outcome.observations = self.diagnosis.observations(outcome.frequencies())
        reasons = {
            self.tasks[index].client.name: outcome.rejected[index] for index in self.tasks if index in outcome.rejected
        }
        require_finite_uploads(outcome, reasons)
        require_quorum(len(outcome.accepted), self.wanted, self.setup.quorum(self.wanted), reasons)

    def _reported(self, delivery: Delivery) -> Delivery:
        """Returns a delivery with the mean report, where it is of a secure round that took it in."""
        if self.outcome.mean_report is None or not delivery.kept or delivery.task.client.index in self.unneeded:
            return delivery
        report, frequency = self.outcome.mean_report
        return replace(delivery, report=report, frequency=frequency)

    def _sorted_in(self, delivery: Delivery) -> Upload | None:
        """Records a delivery; returns its upload if it is to be aggregated now."""
        outcome, index = self.outcome, delivery.task.client.index
        if delivery.task.round != outcome.round or index not in self.tasks:
            self._set_aside(delivery)
            return None
        if index in self.accepted:
            self._stray(delivery, f"the client's upload of round {outcome.round} was aggregated already")
            return None
        delivery = self._counted(delivery)
        self.arrived[index] = replace(delivery, upload=None)
        outcome.rejected.pop(index, None)
        self.unneeded.discard(index)
        if not delivery.needed or len(self.accepted) == self.wanted:
            self.unneeded.add(index)
            return None
        reason = delivery.failure or ("" if delivery.kept else self._rejection(self.tasks[index], delivery.upload))
        if reason or delivery.upload is None:
            outcome.rejected[index] = printable(reason or NOTHING) + _blame(self.tasks[index].download)
            return None
        self.accepted.add(index)
        return Upload(outcome.round, delivery.task.client, delivery.upload, self.tasks[index].download)

    def _tell_of(self, delivery: Delivery) -> None:
        """Notes what became of a delivery of this round."""
        index, outcome = delivery.task.client.index, self.outcome
        if delivery.task.round == outcome.round and index in self.tasks:
            reason, needed = outcome.rejected.get(index, ""), index not in self.unneeded
            size = outcome.traffic[index].upload_bytes if index in outcome.traffic else 0
            self.note("delivered", client=index, reason=reason, needed=needed, upload_bytes=size)

    def _set_aside(self, delivery: Delivery) -> None:
        """Keeps an upload of the round before if the rules allow it; drops all others."""
        if delivery.upload is None:
            return
        index, age = delivery.task.client.index, self.outcome.round - delivery.task.round
        if age == 0:
            self._stray(delivery, "the client was not asked in this round")
        elif age < 0:
            self._stray(delivery, f"it is of round {delivery.task.round}, but this is round {self.outcome.round}")
        elif age > 1 or self.rules.straggler_policy == "drop":
            self._stray(delivery, f"it is {age} round(s) late")
        elif index in self.accepted_before or index in self.late:
            self._stray(delivery, f"the client's upload of round {delivery.task.round} was aggregated already")
        else:
            self.late[index] = delivery

    def _late_uploads(self) -> Iterator[Upload]:
        """Yields the uploads of the round before whose clients delivered no newer one, in client order."""
        for index, delivery in sorted(self.late.items()):
            if index in self.accepted:
                self._stray(delivery, f"the client's upload of round {self.outcome.round} was aggregated instead")
                continue
            with self.outcome.clock.phase("validate"):
                reason = self._rejection(delivery.task, delivery.upload)
            self._stray(delivery, reason)
            if not reason and delivery.upload is not None:
                yield self._seen(
                    Upload(delivery.task.round, delivery.task.client, delivery.upload, delivery.task.download)
                )

    def _rejection(self, task: Task, upload: Payload | None) -> str:
        """Returns the fault of a task's upload; empty if it has none."""
        if upload is None:
            return NOTHING
        largest = self.setup.largest_value
        if largest is None:
            tensors = {name: tensor.nan_to_num(0, 0, 0) for name, tensor in upload.tensors.items()}
            upload = Payload(tensors, upload.scalars)
        try:
            if self.rules.upload_limit_bytes is not None:
                check_size(self._size_bytes(upload), self.rules.upload_limit_bytes)
            check_upload(
                upload,
                self.method.schema(self.model, task.client, task.download, task.round),
                norm_limit=self.rules.max_update_norm,
                largest_value=largest if largest is not None and isfinite(largest) else None,
            )
        except UploadError as error:
            if isinstance(error, NotFiniteError):
                self.outcome.not_finite.add(task.client.index)
            return error.message
        return ""

    def _counted(self, delivery: Delivery) -> Delivery:
        """Counts a delivery's bytes; returns it, without its upload if that cannot even be counted."""
        task = self.tasks[delivery.task.client.index]
        try:
            self._count(task, None if delivery.kept else delivery.upload)
        except (FedGuildError, TypeError, ValueError) as error:  # its names, scalars or dtypes
            self._count(task, None)
            return replace(delivery, upload=None, failure=unusable(error))
        return delivery

    def _count(self, task: Task, upload: Payload | None) -> None:
        """Adds an attempt's bytes to its client's."""
        index = task.client.index
        traffic = count_traffic(self.outcome.round, index, task.download, upload, self.rules.wire_dtype)
        before = self.outcome.traffic.get(index)
        self.outcome.traffic[index] = traffic if before is None else before + traffic

    def _size_bytes(self, upload: Payload) -> int:
        return size_bytes(shrunk_shapes(upload, self.rules.wire_dtype))

    def _stray(self, delivery: Delivery, dropped: str) -> None:
        try:
            size = 0 if delivery.upload is None else self._size_bytes(delivery.upload)
        except (FedGuildError, TypeError, ValueError) as error:  # its names, scalars or dtypes
            size, dropped = 0, unusable(error)
        self.outcome.strays.append(Stray(delivery.task.round, delivery.task.client.index, size, printable(dropped)))


def _blame(download: Payload) -> str:
    """Returns what a rejection adds where the client was given values from which nobody could train."""
    largest = largest_value(download)
    if largest <= LARGEST_TRAINED:
        return ""
    verb = "is not" if largest > LARGEST_VALUE else "may not be"
    return (
        f" The client {verb} to blame: it was sent values up to {largest:.4g}, which an earlier round brought into the "
        "state; `resume --round` goes back before it."
    )
