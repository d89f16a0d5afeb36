"""The round loop's body, the same on every engine and for every method.

All failures of clients and of the network are handled here: a missing upload is requested again or skipped, an invalid
or unexpected one is left out and recorded, and too few valid uploads are an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Literal, cast

from torch import Tensor

from fedguild.activity import Note, unnoted
from fedguild.client.budget import ClientInfo
from fedguild.config.federation import FederationSettings
from fedguild.errors import CheckpointError, DivergedError, NotFiniteError, UploadError
from fedguild.model.info import ModelInfo
from fedguild.payload import Payload
from fedguild.server.clock import Clock
from fedguild.server.diagnosis import Diagnosis
from fedguild.server.engine import Delivery, Engine, Task, Terms
from fedguild.server.guard import LARGEST_TRAINED, LARGEST_VALUE, Guard, largest_value, not_finite
from fedguild.server.method import Method, Observation, Upload
from fedguild.server.optimizer import server_step, without_momentum
from fedguild.server.private_mean import PrivateMean
from fedguild.server.sampling import require_quorum, sample, wanted_count
from fedguild.server.secure_round import Peers, SecureAggregation
from fedguild.server.validation import check_size, check_upload, unusable
from fedguild.wire.accounting import Traffic, count_traffic, size_bytes
from fedguild.wire.codec import shrunk_shapes
from fedguild.wire.schema import printable

NOTHING = "nothing was delivered"
NEARLY_GUESSING, WORSE_THAN_UNTRAINED, WORSE_THAN_GUESSING = 0.85, 1.5, 2.0
"""Multiples of losses above which training is taken to have diverged; see `require_learning`."""
DIVERGED_HINT = (
    "The last complete round is untouched, but resuming repeats this one: start again with a lower "
    "training.learning_rate or training.clip_norm."
)
Again = Callable[[int, Sequence[ClientInfo]], Sequence[ClientInfo]]
"""Round and clients -> those of them that may be asked once more."""


@dataclass(frozen=True)
class Stray:
    """An unexpected upload: of an earlier round, a second time, or unrequested.

    Attributes:
        round: The round that it belongs to.
        client: The index of its client.
        upload_bytes: Its size.
        dropped: The reason why it was not aggregated; empty if it was.
    """

    round: int
    client: int
    upload_bytes: int
    dropped: str = ""


@dataclass
class Outcome:
    """A completed round.

    Attributes:
        round: Its number, from 1.
        state: The method's state after it.
        asked: The clients that were asked.
        deliveries: The last delivery of each of them, without its upload, in client order.
        traffic: Bytes of each asked client over all its attempts.
        rejected: Client index -> the reason why its upload was not aggregated.
        accepted: Indices of the clients whose upload of this round was aggregated.
        unneeded: Indices of the clients that the engine did not wait for because enough others had delivered.
        retried: Indices of the clients that were asked more than once.
        strays: Unexpected uploads.
        faults: Client index -> what it did wrong in a secure aggregation that the others could make good.
        bounds: Name of a mean of a secure round -> the largest error of fixed point in it.
        observations: What averaging did to the uploads, where that is asked for.
        not_finite: Indices of the clients that sent an upload with NaN or infinity.
        phase_seconds: Wall time by phase.
    """

    round: int
    state: Payload
    asked: list[ClientInfo]
    deliveries: list[Delivery] = field(default_factory=list)
    traffic: dict[int, Traffic] = field(default_factory=dict)
    rejected: dict[int, str] = field(default_factory=dict)
    accepted: list[int] = field(default_factory=list)
    unneeded: list[int] = field(default_factory=list)
    retried: list[int] = field(default_factory=list)
    strays: list[Stray] = field(default_factory=list)
    faults: dict[int, str] = field(default_factory=dict)
    bounds: dict[str, float] = field(default_factory=dict)
    observations: list[Observation] = field(default_factory=list)
    not_finite: set[int] = field(default_factory=set)
    phase_seconds: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.clock = Clock(self.phase_seconds)

    @property
    def moved_bytes(self) -> int:
        """Bytes that the round moved, both ways, further attempts and unexpected uploads included."""
        counted = sum(one.download_bytes + one.upload_bytes for one in self.traffic.values())
        return counted + sum(stray.upload_bytes for stray in self.strays)

    def tokens(self) -> dict[int, int]:
        """Returns client index -> training tokens."""
        return {delivery.task.client.index: delivery.report.tokens for delivery in self.deliveries}

    def frequencies(self) -> dict[int, Tensor]:
        """Returns client index -> [L, M] activation frequency, of the accepted clients that reported one."""
        return {
            delivery.task.client.index: delivery.frequency
            for delivery in self.deliveries
            if delivery.frequency is not None and delivery.task.client.index in self.accepted
        }


def run_round(
    round_index: int,
    method: Method,
    state: Payload,
    model: ModelInfo,
    clients: Sequence[ClientInfo],
    engine: Engine,
    rules: FederationSettings,
    accepted_before: Collection[int] = (),
    *,
    seed: int,
    guard: Guard | None = None,
    secure: SecureAggregation | None = None,
    private_mean: PrivateMean | None = None,
    again: Again | None = None,
    diagnose: bool = False,
    note: Note = unnoted,
) -> Outcome:
    """Runs one round.

    Uploads are validated as they arrive and aggregated as running sums, so that the server holds
    one upload at a time (and those of late clients). The order is: uploads of the first attempt in client order, those
    of each retry, then late ones. An upload that fails validation is left out and recorded; no upload is aggregated
    twice.

    Args:
        round_index: The round, from 1.
        method: The method.
        state: The state before the round.
        model: The backbone's description.
        clients: All clients that could take part.
        engine: The engine that trains them.
        rules: The rules of sampling, quorum and valid uploads.
        accepted_before: `Outcome.accepted` of the round before, whose uploads `state` holds.
        seed: The run's seed, for the sampling.
        guard: Protection of the state against valid uploads; the server then holds them on disk and aggregates
            after the last.
        secure: How uploads are aggregated that the server does not see; the engine is then one of its `Peers`.
        private_mean: Central differential privacy, which takes the guard's place.
        again: Decides before each further attempt who is asked once more; None for everybody whose upload is missing.
        diagnose: Whether to look at what averaging does to the uploads; a round's uploads are then all held.
        note: Takes what happens in the round, for whoever watches.

    Raises:
        DivergedError: every upload has NaN or infinity; the earlier state is unchanged.
        QuorumError: there were too few valid uploads; the earlier state is unchanged.
        CheckpointError: the state, before the round or after it, has NaN or infinity.
    """
    _require_finite(state, f"before round {round_index}")
    own = without_momentum(state)
    # sample
    asked = sample(round_index, clients, rules.participation, seed, over_selection=rules.over_selection)
    wanted = min(wanted_count(len(clients), rules.participation), len(asked))
    outcome = Outcome(round_index, state, asked)
    # download
    with outcome.clock.phase("download"):
        tasks = [Task(round_index, client, method.download(own, model, client)) for client in asked]
    # train, validate and aggregate, one upload after the other
    largest = None if guard is None else guard.largest_value
    accepted = frozenset(accepted_before)
    zeroes = private_mean is not None
    intake = _Intake(method, model, engine, rules, outcome, tasks, wanted, accepted, largest, again, zeroes, note)
    diagnosis = Diagnosis(own, model) if diagnose else None

    def withdraw(upload: Upload, reason: str) -> None:
        intake.withdraw(upload, reason)
        if diagnosis is not None:
            diagnosis.forget(upload)

    with (
        outcome.clock.phase("aggregate"),
        closing(intake.uploads()) as arriving,
    ):  # the engine ends its work in any case
        uploads = arriving if diagnosis is None else diagnosis.watched(arriving)
        if secure is not None:
            intake.aggregate_securely(secure, own, list(uploads))
            aggregate = outcome.state
        elif private_mean is not None:
            aggregate = private_mean.aggregate(
                method,
                own,
                intake.with_downloads(uploads),
                withdraw,
                round_index=round_index,
                wanted=wanted,
            )
        elif guard is None:
            aggregate = method.aggregate(own, uploads)
        else:
            bounded = {name for client in asked for name in method.bounds(model, client)}
            aggregate = guard.aggregate(method, own, intake.with_downloads(uploads), withdraw, bounded)
        outcome.state = server_step(state, aggregate, step=rules.server_step, momentum=rules.server_momentum)
    # record
    intake.close()
    if diagnosis is not None:
        outcome.observations = diagnosis.observations(outcome.frequencies())
    reasons = {client.name: outcome.rejected[client.index] for client in asked if client.index in outcome.rejected}
    _require_finite_uploads(outcome, reasons)
    require_quorum(len(outcome.accepted), wanted, rules.quorum, reasons)
    _require_finite(outcome.state, f"after round {round_index}")
    return outcome


class _Intake:
    """Asks the clients of one round and sorts their deliveries into an outcome."""

    def __init__(
        self,
        method: Method,
        model: ModelInfo,
        engine: Engine,
        rules: FederationSettings,
        outcome: Outcome,
        tasks: Sequence[Task],
        wanted: int,
        accepted_before: frozenset[int],
        largest_value: float | None = None,
        again: Again | None = None,
        zeroes_broken: bool = False,
        note: Note = unnoted,
    ) -> None:
        self.note = note
        self.largest_value, self.again, self.zeroes_broken = largest_value, again, zeroes_broken
        self.method, self.model, self.engine, self.rules = method, model, engine, rules
        self.outcome, self.wanted, self.accepted_before = outcome, wanted, accepted_before
        self.tasks = {task.client.index: task for task in tasks}
        self.accepted: set[int] = set()
        self.unneeded: set[int] = set()
        self.retried: set[int] = set()
        self.arrived: dict[int, Delivery] = {}
        self.late: dict[int, Delivery] = {}

    def uploads(self) -> Generator[Upload, None, None]:
        """Trains the clients, with the retries that the rules allow; yields the uploads to aggregate, records all."""
        for attempt in range(1 + self.rules.retries):
            tasks = [task for index, task in self.tasks.items() if index not in self.accepted]
            missing = self.wanted - len(self.accepted)
            if missing == 0:
                break
            if attempt and self.again is not None:
                may = {client.index for client in self.again(self.outcome.round, [task.client for task in tasks])}
                tasks = [task for task in tasks if task.client.index in may]
            if not tasks:
                break
            if attempt:
                self.retried.update(task.client.index for task in tasks)
            terms = Terms(self.rules.deadline_seconds, enough=missing if missing < len(tasks) else None)
            asked = [task.client.index for task in tasks]
            self.note("asked", round=self.outcome.round, attempt=attempt, clients=asked)
            arriving = self.engine.train(self.method, self.model, tasks, terms)
            while True:
                with self.outcome.clock.phase("train"):
                    delivery = next(arriving, None)
                if delivery is None:
                    break
                with self.outcome.clock.phase("validate"):
                    upload = self._sorted_in(delivery)
                self._tell_of(delivery)
                if upload is not None:
                    yield upload
        self.note("phase", phase="aggregate")
        yield from self._late_uploads()

    def with_downloads(self, uploads: Iterable[Upload]) -> Iterator[tuple[Upload, Payload]]:
        """Yields each upload with the download that it answers."""
        for upload in uploads:
            index = upload.client.index
            task = self.tasks[index] if upload.round == self.outcome.round else self.late[index].task
            yield upload, task.download

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

    def aggregate_securely(self, secure: SecureAggregation, state: Payload, uploads: Sequence[Upload]) -> None:
        """Aggregates the uploads that the clients keep; each client's report becomes the mean over the clients."""
        outcome, peers = self.outcome, cast(Peers, self.engine)
        reasons = {self.tasks[index].client.name: reason for index, reason in outcome.rejected.items()}
        require_quorum(len(self.accepted), self.wanted, self.rules.quorum, reasons)
        result = secure.aggregate(outcome.round, self.method, state, self.model, peers, uploads)
        for upload in uploads:
            index = upload.client.index
            outcome.traffic[index] = outcome.traffic[index] + result.traffic[index]
            if index in result.dropped:
                self.withdraw(upload, result.dropped[index])
            self.arrived[index] = replace(self.arrived[index], report=result.report, frequency=result.frequency)
        outcome.faults = {index: printable(fault) for index, fault in result.faults.items()}
        outcome.state, outcome.bounds = result.state, dict(result.bounds)

    def close(self) -> None:
        """Completes the outcome: every client that was asked is accepted, rejected or not needed."""
        outcome = self.outcome
        for index, task in self.tasks.items():
            if index not in self.arrived:
                self._count(task, None)
                outcome.rejected[index] = NOTHING
        outcome.accepted = sorted(self.accepted)
        outcome.unneeded = sorted(self.unneeded)
        outcome.retried = sorted(self.retried)
        outcome.deliveries = [self.arrived[index] for index in self.tasks if index in self.arrived]

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
        return Upload(outcome.round, delivery.task.client, delivery.upload)

    def _tell_of(self, delivery: Delivery) -> None:
        """Notes what became of a delivery of this round."""
        index, outcome = delivery.task.client.index, self.outcome
        if delivery.task.round == outcome.round and index in self.tasks:
            reason, needed = outcome.rejected.get(index, ""), index not in self.unneeded
            self.note("delivered", client=index, reason=reason, needed=needed)

    def _set_aside(self, delivery: Delivery) -> None:
        """Keeps an upload of the round before if the rules allow it; drops all others."""
        if delivery.upload is None:
            return
        index, age = delivery.task.client.index, self.outcome.round - delivery.task.round
        if age == 0:
            self._stray(delivery, "the client was not asked in this round")
        elif age < 0:
            self._stray(delivery, f"it is of round {delivery.task.round}, but this is round {self.outcome.round}")
        elif age > 1 or self.rules.late == "drop":
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
                yield Upload(delivery.task.round, delivery.task.client, delivery.upload)

    def _rejection(self, task: Task, upload: Payload | None) -> str:
        """Returns the fault of a task's upload; empty if it has none."""
        if upload is None:
            return NOTHING
        client = task.client.name
        if self.zeroes_broken:  # a rejection would tell of the upload, before there is noise on it
            upload = Payload(
                {name: tensor.nan_to_num(0, 0, 0) for name, tensor in upload.tensors.items()}, upload.scalars
            )
        try:
            if self.rules.upload_limit_bytes is not None:
                check_size(self._size_bytes(upload), self.rules.upload_limit_bytes, client=client)
            expected = self.method.expected_upload(self.model, task.client, task.download)
            check_upload(
                upload,
                expected,
                client=client,
                norm_limit=self.rules.norm_limit,
                expected_scalars=self.method.expected_scalars(task.download),
                largest_value=self.largest_value,
                bounds=self.method.bounds(self.model, task.client),
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
        except Exception as error:
            self._count(task, None)
            return replace(delivery, upload=None, failure=unusable(error))
        return delivery

    def _count(self, task: Task, upload: Payload | None) -> None:
        """Adds an attempt's bytes to its client's."""
        index = task.client.index
        traffic = count_traffic(self.outcome.round, index, task.download, upload, self.rules.codec)
        before = self.outcome.traffic.get(index)
        self.outcome.traffic[index] = traffic if before is None else before + traffic

    def _size_bytes(self, upload: Payload) -> int:
        return size_bytes(shrunk_shapes(upload, self.rules.codec))

    def _stray(self, delivery: Delivery, dropped: str) -> None:
        try:
            size = 0 if delivery.upload is None else self._size_bytes(delivery.upload)
        except Exception as error:
            size, dropped = 0, unusable(error)
        self.outcome.strays.append(Stray(delivery.task.round, delivery.task.client.index, size, printable(dropped)))


def _require_finite_uploads(outcome: Outcome, reasons: Mapping[str, str]) -> None:
    """Raises DivergedError where every client trained until its values were no longer finite."""
    if outcome.accepted or not outcome.asked or any(one.index not in outcome.not_finite for one in outcome.asked):
        return
    listed = "".join(f"\n  {client}: {reason}" for client, reason in sorted(reasons.items()))
    raise DivergedError(
        f"The training of round {outcome.round} diverged: 0 of {len(outcome.asked)} clients delivered a valid upload."
        f"{listed}",
        DIVERGED_HINT,
    )


def _require_finite(state: Payload, when: str) -> None:
    broken = not_finite(state)
    if broken:
        raise CheckpointError(
            f"The state {when} has NaN or infinity in '{broken}'; it is not saved.",
            "`fedguild resume FOLDER --round N` goes back to the checkpoint of an earlier round; training that "
            "diverges needs a lower learning rate or training.clip_norm.",
        )


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


def require_learning(
    outcome: Outcome, limit: float | Literal["auto"] | None, vocabulary: int, untrained: float | None = None
) -> None:
    """Raises if a round's training diverged by its clients' losses, each the mean over its steps.

    The median client counts, so that a minority cannot stop a run by what it reports; losses that are withheld for
    privacy do not count. A model whose values overflow predicts every token alike, with the loss ln V.

    Args:
        outcome: The round.
        limit: `training.loss_limit`; auto: 2 ln V or, if `untrained` is known, the larger of 0.85 ln V and 1.5 times
            that.
        vocabulary: V, the number of tokens that the model chooses from.
        untrained: The backbone's own loss on training texts, nats per response token; None if it is not known.

    Raises:
        DivergedError: the loss is not finite, or above the limit.
    """
    if limit is None:
        return
    guessing = math.log(vocabulary)
    if limit != "auto":
        highest = limit
    elif untrained is None:
        highest = WORSE_THAN_GUESSING * guessing
    else:
        highest = max(NEARLY_GUESSING * guessing, WORSE_THAN_UNTRAINED * untrained)
    reports = [one.report for one in outcome.deliveries if one.task.client.index in outcome.accepted]
    losses = sorted(math.inf if math.isnan(one.loss) else one.loss for one in reports if not one.withheld and one.steps)
    middle = losses[(len(losses) - 1) // 2] if losses else 0.0
    if middle <= highest:
        return
    others = f"guessing every token alike has {guessing:.4g}"
    others += "" if untrained is None else f", the backbone without training {untrained:.4g}"
    raise DivergedError(
        f"The training of round {outcome.round} diverged: the median client's loss is {middle:.4g} nats per token, "
        f"above the limit of {highest:.4g} (training.loss_limit); {others}.",
        DIVERGED_HINT,
    )
