"""The ray engine's scheduler on a Ray that answers, fails or never answers as a test says."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from fedguild.client.memory import ClientMemory
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.payload import Payload

pytest.importorskip("ray", reason="needs the extra ray")

from ray.exceptions import OutOfMemoryError, RayActorError

from fedguild.engines import ray as engine_module

NEVER = object()
DONE = {"reports": []}
ERROR = {"error": "The memory is too small", "hint": "Lower training.batch_size."}


class Reference:
    """A result that comes at once: a value, an exception to be raised, or nothing ever for `NEVER`."""

    def __init__(self, result: Any) -> None:
        self.result = result


class FakeRay:
    """The functions of Ray that the engine calls; to wait for ever fails the test."""

    def wait(
        self, references: Sequence[Reference], num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[Reference], list[Reference]]:
        ready = [reference for reference in references if reference.result is not NEVER][:num_returns]
        assert ready or timeout is not None, "nothing that is waited for will ever come"
        return ready, [reference for reference in references if reference not in ready]

    def get(self, references: Any, timeout: float | None = None) -> Any:
        if isinstance(references, list):
            return [self.get(reference) for reference in references]
        assert references.result is not NEVER
        if isinstance(references.result, Exception):
            raise references.result
        return references.result

    def kill(self, actor: Any) -> None: ...


@pytest.fixture(autouse=True)
def _fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "ray", FakeRay())


def team(*trainings: Any, start: Any = None) -> engine_module._Team:
    """Returns an actor whose processes answer each training alike, the last of them its start by `start`."""
    starts = [*(Reference(None) for _ in trainings[1:]), Reference(start)]
    return engine_module._Team([SimpleNamespace(training=one) for one in trainings], starts)


class Scheduler(engine_module._Scheduler):
    """A scheduler of cohorts without content; `spare` are the replacements of actors, then those without room."""

    def __init__(
        self, cohorts: int, teams: list[Any], spare: Sequence[Any] = (), deadline: float | None = None
    ) -> None:
        left = list(spare)
        task = SimpleNamespace(download=Payload(), client=SimpleNamespace(index=0))
        super().__init__(
            None,  # type: ignore[arg-type]
            [[(task, None)]] * cohorts,  # type: ignore[list-item]
            [],
            None,  # type: ignore[arg-type]
            teams,
            lambda: left.pop(0) if left else team(NEVER, start=NEVER),
            deadline,
        )

    def _start(self, actor: Any, position: int | None, digest: str) -> tuple[Any, Any]:
        return Reference(actor.training), Reference([])

    def results(self) -> list[Any]:
        found = []
        for position in range(len(self.cohorts)):
            found.append(self.result(position))
            self.advance()
        return found


@pytest.mark.parametrize("lost", [RayActorError(), OutOfMemoryError("over the threshold")])
def test_an_actor_that_is_lost_is_replaced(lost: Exception) -> None:
    assert Scheduler(3, [team(lost)], [team(lost), team(DONE)]).results() == [[], [], []]


def test_the_first_cohorts_go_to_the_actors_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of several references that are ready, Ray returns any."""
    wait = FakeRay.wait
    monkeypatch.setattr(FakeRay, "wait", lambda ray, references, **options: wait(ray, references[::-1], **options))
    scheduler = Scheduler(3, [team(NEVER), team(NEVER), team(NEVER)])
    scheduler.advance()
    assert [(seat, position) for seat, position, _ in scheduler.running.values()] == [(0, 0), (1, 1), (2, 2)]


def test_an_actor_one_of_whose_processes_tells_the_death_of_another_first_is_replaced() -> None:
    assert Scheduler(3, [team(ERROR, RayActorError())], [team(DONE, DONE)]).results() == [[], [], []]


def test_an_actor_that_finds_no_room_leaves_its_cohorts_to_the_others() -> None:
    assert Scheduler(3, [team(RayActorError()), team(DONE)]).results() == [[], [], []]
    assert Scheduler(3, [team(NEVER, start=NEVER), team(DONE)]).results() == [[], [], []]
    assert Scheduler(3, [team(NEVER, NEVER, start=NEVER), team(DONE, DONE)]).results() == [[], [], []]


def test_without_any_actor_the_round_ends_in_time() -> None:
    with pytest.raises(FedGuildError, match="did not start within 15 minutes"):
        Scheduler(2, [team(RayActorError())]).results()
    late = Scheduler(2, [team(NEVER, start=NEVER)], deadline=1e-9).results()
    assert late == ["did not answer within 1e-09 s"] * 2


def test_an_actor_that_dies_whenever_it_starts_is_not_replaced_without_end() -> None:
    sharded = [team(DONE, DONE, start=RayActorError()), team(DONE, DONE)]
    assert Scheduler(3, [team(DONE, RayActorError())], sharded).results() == [[], [], []]
    spare = [team(DONE, start=RayActorError()) for _ in range(2)]
    assert Scheduler(1, [team(RayActorError())], [*spare, team(DONE)]).results() == [[]]
    with pytest.raises(FedGuildError, match="An actor of the ray engine did not start"):
        Scheduler(1, [team(RayActorError())], [*spare, team(DONE, start=RayActorError())]).results()


def test_an_error_of_one_process_ends_the_wait_for_those_that_wait_for_it() -> None:
    """Also of one without a cohort, or while models are scored or the processes meet."""
    for cohorts in (1, 2):
        with pytest.raises(FedGuildError, match="The memory is too small"):
            Scheduler(cohorts, [team(NEVER, ERROR)]).result(0)
    with pytest.raises(FedGuildError, match="The memory is too small"):
        engine_module._answers([Reference(NEVER), Reference(ERROR)])


@pytest.mark.parametrize("started", [True, False])
def test_an_engine_that_cannot_begin_shuts_down_the_ray_that_it_started(started, tmp_path, monkeypatch) -> None:
    calls: list[str] = []
    monkeypatch.setattr(engine_module, "connect", lambda *_: started)
    monkeypatch.setattr(engine_module.ray, "cluster_resources", dict, raising=False)
    monkeypatch.setattr(engine_module.ray, "shutdown", lambda: calls.append("shutdown"), raising=False)
    with pytest.raises(ConfigError, match="Ray sees no GPU"):
        engine_module.RayEngine({"device": "cuda"}, {}, TrainingSettings(steps=1), ClientMemory(tmp_path), seed=0)
    assert calls == ["shutdown"] * started
