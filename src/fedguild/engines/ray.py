"""The `ray` engine: cohorts spread over actors, one process and one backbone each, wherever Ray has room.

Payloads go through Ray's object store as safetensors bytes. The clients' memory stays with the driver (the process that
runs the rounds), which also aggregates. The actors train and score; the driver holds no backbone. An actor that dies is
replaced and its cohort trained again. A cohort's result depends on its inputs alone, so the round is unaffected.

An actor may be a team of processes that share one backbone's layers (`gpus_per_actor`), each with its own cohorts. If
one of them dies, the whole team is replaced.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import GetTimeoutError, ObjectLostError, OutOfMemoryError, RayActorError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import MergeLedger, by_version, without_merges
from fedguild.config.training import TrainingSettings
from fedguild.core.codec import encode
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.payload import Payload, with_part
from fedguild.core.progress import Note, unnoted
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
from fedguild.engines.ray_cluster import actors_on, connect, place, require_room
from fedguild.engines.worker_slots import WorkerSlots, opened, raised
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.model.ranks import TIMEOUT_SECONDS
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, too_late
from fedguild.server.method import Method

TRIES = 3
"""Actors that may die on one cohort before its clients count as failed, or replacements while they start."""
START_SECONDS = 900.0
"""Time limit for an actor to load the backbone, including the start of its machine."""
DEATH_SECONDS = 10.0
"""Time in which Ray tells of a process's death, which another of its actor may have told as an error before."""
LOST = (RayActorError, ObjectLostError, OutOfMemoryError)
"""Raised by Ray when a process or a machine is lost, or Ray ends a process to free its machine's memory."""


class RayEngine:
    """Trains cohorts on actors.

    Args:
        backbone: The arguments of `load_backbone`, for the actors.
        examples: Client index -> its training examples, encoded.
        memory: What clients keep between rounds; stays with the driver.
        cohort_size: Clients in one forward and backward pass; `auto` for as many as an actor's memory holds, and no
            more than every actor's share.
        address: Address of a Ray cluster; None for the one that this process is connected to, or else a new one on this
            machine.
        actors: Number of actors; `auto` as many as the GPUs hold, or one.
        gpu_fraction: Part of a GPU and of its memory that an actor gets.
        cpus_per_actor: CPU cores of an actor's process, and its threads.
        gpus_per_actor: Processes of an actor, over which the backbone is sharded, each on a GPU if there is one.
        timeout_seconds: Time that the processes of an actor wait for each other.
        on_step: Called after each cohort with (cohorts done, total cohorts, its clients' mean loss).
        note: Receives the clients of each cohort as it goes to an actor.
        ledger: The changes to the backbone that were received; by default in a folder next to `memory`.
        private: Returns a client's DP-SGD in a round; None to train without.

    Raises:
        ConfigError: Ray cannot be reached, or has no room for the actors.
        FedGuildError: an actor cannot load the backbone.
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
        address: str | None = None,
        actors: CohortSize = "auto",
        gpu_fraction: float = 1.0,
        cpus_per_actor: int = 1,
        gpus_per_actor: int = 1,
        timeout_seconds: float = TIMEOUT_SECONDS,
        on_step: OnStep | None = None,
        note: Note = unnoted,
        ledger: MergeLedger | None = None,
        private: Private | None = None,
    ) -> None:
        self.private = private
        self.memory = memory
        self.ledger = ledger or MergeLedger.beside(memory)
        self._versions = StoredVersions()
        self.cohort_size = cohort_size
        self.seed = seed
        self.on_step = on_step
        self.note = note
        size = self._team_size = gpus_per_actor
        self._timeout_seconds = timeout_seconds
        self._teams: list[_Team] = []
        self._started_ray = connect(address, (1 if actors == "auto" else actors) * cpus_per_actor * size)
        try:
            device, gpus = place(str(backbone["device"]), ray.cluster_resources().get("GPU", 0.0))
            self.device = torch.device(device)
            count = max(1, actors_on(gpus, gpu_fraction) // size) if actors == "auto" else actors
            require_room(count * size, cpus_per_actor, gpu_fraction if gpus else 0.0)
            self._actor_resources = {"num_cpus": cpus_per_actor, "num_gpus": gpu_fraction if gpus else 0}
            packed = ray.put(pack_examples(examples))
            path = Path(str(backbone["path"]))
            placed = {**backbone, "device": device, "path": str(path.resolve() if path.exists() else path)}
            self._actor_arguments = (placed, settings.model_dump(), seed, cpus_per_actor, gpu_fraction, packed)
            for _ in range(count):
                self._teams.append(self._new_team())
            self.describe()
        except BaseException:
            self.close()
            raise

    @property
    def _actors(self) -> list[Any]:
        return [actor for team in self._teams for actor in team.actors]

    def describe(self) -> list[Plain]:
        """Returns every actor's process, how often it loaded the backbone, its threads and its device.

        Raises:
            FedGuildError: an actor did not start, or not within `START_SECONDS`.
        """
        try:
            _answers([reference for team in self._teams for reference in team.start], START_SECONDS)
            return _answers([actor.describe.remote() for actor in self._actors], START_SECONDS)
        except GetTimeoutError as error:
            raise _not_started() from error
        except LOST as error:
            raise _not_started(error) from error

    def train(
        self, method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL
    ) -> Iterator[Delivery]:
        """Yields every task's delivery, in client order, after saving each client's memory.

        Cohorts go to the actors as these become free. The deadline is checked before each; a cohort that has started is
        finished. With `terms.enough`, that many clients train, drawn at random as on the local engine. If `TRIES`
        actors die on a cohort, its clients fail.

        Raises:
            FedGuildError: a device's memory is too small for one client, or a client's memory cannot be written.
        """
        planned, left_out = split_by_need(method, model, tasks, terms, self.seed)
        yield from in_order(left_out, self._deliveries(method, planned, terms.deadline_seconds))

    def close(self) -> None:
        for team in self._teams:
            team.end()
        self._teams = []
        self._versions.clear()
        if self._started_ray:
            ray.shutdown()

    def _deliveries(self, method: Method, planned: Sequence[Planned], deadline: float | None) -> Iterator[Delivery]:
        if not planned:
            return
        try:
            changes = self.ledger.receive(*(task.download for task, _ in planned))
        except CheckpointError as error:
            yield from (Delivery(task, None, plan, failure=error.message) for task, plan in planned)
            return
        merges = self._versions.references(changes, self.ledger.contents)
        cohorts = [cohort for members in plan_groups(planned) for cohort in self._cohorts(method, members)]
        scheduler = _Scheduler(
            method, cohorts, merges, self.memory, self._teams, self._new_team, deadline, self.private, self.note
        )
        for position, cohort in enumerate(cohorts):
            trained = scheduler.result(position)
            if isinstance(trained, str):
                yield from (Delivery(task, None, plan, failure=trained) for task, plan in cohort)
                continue
            for (task, _), result in zip(cohort, trained, strict=True):
                result.remember(self.memory, task.client.name, task.round)
            if self.on_step is not None:
                losses = [result.report.training.loss for result in trained]
                self.on_step(position + 1, len(cohorts), sum(losses) / len(losses))
            for (task, plan), result in zip(cohort, trained, strict=True):
                scheduler.advance()
                yield delivery(task, plan, result)

    def _cohorts(self, method: Method, members: Sequence[Planned]) -> list[list[Planned]]:
        """Splits clients that can train together into cohorts, enough of them that every actor gets one."""
        if self.cohort_size == "auto":
            job = job_of(method, members, private=self.private)
            size = min(self._largest_cohort(job), -(-len(members) // len(self._actors)))
        else:
            size = self.cohort_size
        return [list(members[start : start + size]) for start in range(0, len(members), size)]

    def _largest_cohort(self, job: Plain) -> int:
        """Returns how many of a job's clients fit an actor, by the answer of the first that has started."""
        for position, team in sorted(enumerate(self._teams), key=lambda pair: not pair[1].has_started()):
            try:
                return int(ray.get(team.actors[0].cohort_size.remote(job), timeout=START_SECONDS))
            except GetTimeoutError as error:
                raise _not_started() from error
            except LOST:
                team.end()
                self._teams[position] = self._new_team()
        return 1

    @property
    def count(self) -> int:
        return len(self._actors)

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every process at the same time, each with its own arguments.

        Raises:
            FedGuildError: a process failed or died.
        """
        calls = [getattr(actor, name).remote(*own) for actor, own in zip(self._actors, arguments, strict=True)]
        try:
            return _answers(calls)
        except LOST as error:
            raise FedGuildError(
                f"An actor of the ray engine died while it scored: {str(error).strip().splitlines()[0]}",
                "`fedguild resume` continues from the last complete round.",
            ) from error

    def slots(
        self,
        plans: Sequence[AdapterPlan],
        tensors: Sequence[Mapping[str, Tensor]],
        merged: Mapping[str, Tensor],
        model: ModelInfo,
    ) -> AbstractContextManager[WorkerSlots]:
        """Loads models into all processes for the duration of a block, to be scored there.

        Actors that died since the last round are replaced first.

        Raises:
            FedGuildError: as `describe`.
        """
        for position, team in enumerate(self._teams):
            try:
                ray.get([actor.describe.remote() for actor in team.actors], timeout=START_SECONDS)
            except GetTimeoutError as error:
                raise _not_started() from error
            except LOST:
                team.end()
                self._teams[position] = self._new_team()
        self.describe()
        return opened(self, plans, tensors, merged, model)

    def free_bytes(self) -> int:
        """Returns the bytes that the process with the fullest device can still use."""
        return int(min(self.call("free_bytes", [()] * self.count)))

    def _new_team(self) -> _Team:
        if self._team_size == 1:
            actor = self._new_actor()
            return _Team([actor], [actor.describe.remote()])
        bundle = zip(("CPU", "GPU"), self._actor_resources.values(), strict=True)
        group = placement_group([{name: amount for name, amount in bundle if amount}] * self._team_size)
        actors = [
            self._new_actor(
                (rank, self._team_size, self._timeout_seconds),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank),
            )
            for rank in range(self._team_size)
        ]
        places = [actor.address.remote() for actor in actors]
        return _Team(actors, [actor.meet.remote(*places) for actor in actors], group)

    def _new_actor(self, place: tuple[int, int, float] | None = None, **options: Any) -> Any:
        kind = ray.remote(CohortActor).options(max_restarts=0, **self._actor_resources, **options)
        return kind.remote(*self._actor_arguments, place)


@dataclass
class _Team:
    """An actor: one process, or several that share one backbone's layers.

    Attributes:
        actors: The processes.
        start: References that are ready as soon as a process holds its backbone, or has an error.
        group: The resources that Ray keeps for them.
    """

    actors: list[Any]
    start: list[Any]
    group: Any = None

    def has_started(self) -> bool:
        return not ray.wait(self.start, num_returns=len(self.start), timeout=0)[1]

    def end(self) -> None:
        for actor in self.actors:
            ray.kill(actor)
        if self.group is not None:
            remove_placement_group(self.group)


@dataclass
class _Finished:
    """An actor's result: a small summary in this process, and payloads that may be on another machine."""

    summary: Plain
    payloads: Any


class StoredVersions:
    """The versions of the backbone's changes in Ray's object store, each encoded and stored once.

    An actor fetches them when it must merge them; a node that already has a version does not fetch it again.
    """

    def __init__(self, put: Callable[[Any], Any] = ray.put) -> None:
        self._put = put
        self._references: dict[str, Any] = {}

    def references(self, merges: Mapping[str, Tensor], contents: Mapping[int, str]) -> list[Any]:
        """Returns the reference of each version, in ascending order; drops versions that are not among `merges`.

        Args:
            merges: All changes, as the ledger returns them.
            contents: Version -> what identifies its content.
        """
        held, self._references = self._references, {}
        for version, tensors in by_version(merges).items():
            key = f"{version} {contents[version]}"
            if key not in held:
                held[key] = self._put(encode(Payload(with_part(str(version), tensors))))
            self._references[key] = held[key]
        return list(self._references.values())

    def clear(self) -> None:
        self._references = {}


def _answers(calls: Sequence[Any], timeout_seconds: float | None = None) -> list[Any]:
    """Returns the results of calls of several processes.

    Args:
        timeout_seconds: Longest time without a result.

    Raises:
        FedGuildError: a process returned an error; those that wait for it are not waited for.
        GetTimeoutError: no result came in time.
    """
    waiting = list(calls)
    found: dict[Any, Any] = {}
    while waiting:
        done, waiting = ray.wait(waiting, timeout=timeout_seconds)
        if not done:
            raise GetTimeoutError
        found |= zip(done, raised(ray.get(done)), strict=True)
    return [found[call] for call in calls]


def _not_started(death: Exception | None = None) -> FedGuildError:
    """Returns the error of actors that are not there in time, or of one that died while it started."""
    if death is None:
        return FedGuildError(
            f"The actors of the ray engine did not start within {START_SECONDS / 60:g} minutes.",
            "`ray status` shows what Ray is waiting for.",
        )
    return FedGuildError(
        f"An actor of the ray engine did not start: {str(death).strip()}",
        "The backbone must fit the memory of each actor, and every machine needs FedGuild and the model.",
    )


class _Scheduler:
    """The cohorts of one `train` call and their assignment to actors.

    A seat is an actor's place among the engine's. It is idle once its actor holds the backbone; until then, `running`
    has the references of its start, without payloads.

    Args:
        cohorts: All of them, in client order.
        merges: References of the changes that the backbone must hold.
        teams: The engine's actors; a dead one is replaced in place.
        deadline_seconds: No cohort starts later than this after the scheduler's creation; None for no deadline.
        private: Returns a client's DP-SGD in a round; None to train without.
    """

    def __init__(
        self,
        method: Method,
        cohorts: Sequence[Sequence[Planned]],
        merges: Sequence[Any],
        memory: ClientMemory,
        teams: list[_Team],
        new_team: Callable[[], _Team],
        deadline_seconds: float | None,
        private: Private | None = None,
        note: Note = unnoted,
    ) -> None:
        self.private, self.note = private, note
        self.method, self.cohorts, self.memory = method, cohorts, memory
        self.teams, self.new_team, self.deadline = teams, new_team, deadline_seconds
        self.started = time.monotonic()
        self.merges = list(merges)
        self.waiting = deque(range(len(cohorts)))
        self.idle: deque[int] = deque()
        self.busy: Counter[int] = Counter()
        self.running: dict[Any, tuple[int, int | None, Any]] = {}
        self.finished: dict[int, _Finished] = {}
        self.deaths: Counter[int] = Counter()
        self.failed_starts: Counter[int] = Counter()
        self.receivers = Counter(_content(task.download) for cohort in cohorts for task, _ in cohort)
        self.downloads: dict[Any, Any] = {}
        for seat in range(len(teams)):
            self._await_start(seat)
            self._collect(timeout_seconds=0.0)  # so that the first cohorts go to actors of one process in their order

    def result(self, position: int) -> list[Trained] | str:
        """Waits for a cohort; returns its clients' results, or why there are none. The result is not kept.

        Raises:
            FedGuildError: the memory of an actor's device is too small for one client, or no actor starts.
        """
        while True:
            while position not in self.finished:
                if self.deaths[position] == TRIES:
                    return f"{TRIES} actors died while they trained it"
                self._dispatch()
                is_training = any(payloads is not None for _, _, payloads in self.running.values())
                if not is_training and self._seconds_left() < 0:
                    return too_late(*self.cohorts[position][0], self.deadline or 0.0).failure
                limit = None if is_training else max(0.0, min(START_SECONDS, self._seconds_left()))
                if not self._collect(limit) and limit == START_SECONDS:
                    raise _not_started()
            finished = self.finished.pop(position)
            try:
                payloads = ray.get(finished.payloads)
            except LOST:
                self._requeue(position)
                continue
            return [
                decode_result(report, *payloads[3 * slot : 3 * slot + 3])
                for slot, report in enumerate(finished.summary["reports"])
            ]

    def advance(self) -> None:
        """Gives free actors their next cohort, without waiting."""
        self._collect(timeout_seconds=0.0)
        self._dispatch()

    def _dispatch(self) -> None:
        """Gives waiting cohorts to idle actors, one to each of its processes, unless the deadline has passed."""
        while self.waiting and self.idle and self._seconds_left() >= 0:
            seat = self.idle.popleft()
            actors = self.teams[seat].actors
            positions: list[int | None] = [self.waiting.popleft() for _ in actors[: len(self.waiting)]]
            digest = merge_digest(self.cohorts[positions[0] or 0])
            positions += [None] * (len(actors) - len(positions))
            for actor, position in zip(actors, positions, strict=True):
                summary, payloads = self._start(actor, position, digest)
                self.running[summary] = seat, position, payloads
            self.busy[seat] = len(actors)

    def _start(self, actor: Any, position: int | None, digest: str) -> tuple[Any, Any]:
        """Gives a process a cohort, or lets it take part in the passes of the others."""
        train = actor.train.options(num_returns=2)
        if position is None:
            return tuple(train.remote(idle_job(self.method, digest), self.merges))
        tasks = [task for task, _ in self.cohorts[position]]
        self.note("training", clients=[task.client.index for task in tasks])
        downloads = [self._put(task.download) for task in tasks]
        memories = [encode(self.memory.load(task.client.name, task.round)) for task in tasks]
        keep_trained = self.memory.trained is not None
        job = job_of(self.method, self.cohorts[position], keep_trained=keep_trained, private=self.private)
        return tuple(train.remote(job, *downloads, *memories, self.merges))

    def _seconds_left(self) -> float:
        return math.inf if self.deadline is None else self.started + self.deadline - time.monotonic()

    def _collect(self, timeout_seconds: float | None) -> bool:
        """Fetches the summaries of finished cohorts; replaces actors that died. Returns whether anything came in time.

        Raises:
            FedGuildError: a process returned an error, also one without a cohort, or `TRIES` replacements died while
                they started.
        """
        done = ray.wait(list(self.running), timeout=timeout_seconds)[0] if self.running else []
        for reference in done:
            seat, position, payloads = self.running.pop(reference)
            self.busy[seat] -= 1
            try:
                summary = ray.get(reference)
                if summary and "error" in summary:
                    self._raise_if_dead(seat)
                    raised([summary])
                if position is not None:
                    self.finished[position] = _Finished(summary, payloads)
            except LOST as error:
                if payloads is None:
                    self.failed_starts[seat] += 1
                    if self.failed_starts[seat] == TRIES:
                        raise _not_started(error) from error
                if position is not None:
                    self._requeue(position)
                self._replace(seat)
            if not self.busy[seat]:
                self.idle.append(seat)
        return bool(done)

    def _raise_if_dead(self, seat: int) -> None:
        """Raises one of `LOST` if a process of an actor, one of which has an error, is dead."""
        if others := [reference for reference, (own, _, _) in self.running.items() if own == seat]:
            ray.get(ray.wait(others, num_returns=len(others), timeout=DEATH_SECONDS)[0])

    def _replace(self, seat: int) -> None:
        """Replaces an actor of which a process died; the cohorts of its other processes are trained again as well."""
        self.teams[seat].end()
        for reference in [other for other, (own, _, _) in self.running.items() if own == seat]:
            _, position, _ = self.running.pop(reference)
            self.busy[seat] -= 1
            if position is not None:
                self._requeue(position)
        self.teams[seat] = self.new_team()
        self._await_start(seat)

    def _await_start(self, seat: int) -> None:
        """Makes a seat idle as soon as its actor holds the backbone, which may have no room yet."""
        start = self.teams[seat].start
        self.running |= dict.fromkeys(start, (seat, None, None))
        self.busy[seat] = len(start)

    def _requeue(self, position: int) -> None:
        """Puts a cohort whose actor or result is lost at the head of the queue, unless its tries are used up."""
        self.deaths[position] += 1
        if self.deaths[position] < TRIES:
            self.waiting.appendleft(position)

    def _put(self, download: Payload) -> Any:
        """Returns the reference of a download; one that several clients receive is stored once."""
        content = _content(download)
        if self.receivers[content] == 1:
            return ray.put(encode(without_merges(download)))
        if content not in self.downloads:
            self.downloads[content] = ray.put(encode(without_merges(download)))
        return self.downloads[content]


def _content(download: Payload) -> Any:
    """Returns a key that is the same for downloads of the same tensors and scalars."""
    tensors = tuple((name, id(tensor)) for name, tensor in download.tensors.items())
    return tensors, tuple(sorted(download.scalars.items()))
