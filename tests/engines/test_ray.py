"""The ray engine on this machine: equal to `local`, and unharmed by the death of an actor."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild import experiment
from fedguild.config import load_config
from fedguild.config.federation import FederationSettings
from fedguild.errors import ConfigError, FedGuildError
from fedguild.methods import METHODS
from fedguild.payload import Payload
from fedguild.seeding import torch_rng
from fedguild.server.rounds import (
    WAIT_FOR_ALL,
    Delivery,
    Engine,
    Outcome,
    Task,
    Terms,
    run_round,
)
from fedguild.setup import Experiment, make_engine, prepare
from tests.engines.equality import assert_equal_to_local, case_config, save_models
from tests.experiment.runs import assert_same, ended

ray = pytest.importorskip("ray", reason="needs the extra ray")

from fedguild.engines import ray as engine_module  # noqa: E402 - after the check that ray is there
from fedguild.engines import ray_cluster  # noqa: E402
from fedguild.engines.ray import RayEngine  # noqa: E402
from fedguild.engines.ray_cluster import connect  # noqa: E402

pytestmark = pytest.mark.processes
TWO_ACTORS = "federation.engine={name: ray, ray: {actors: 2}}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """One Ray for all tests; engines use the one that is there, and end their own actors only."""
    assert connect(None, 8)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _plain_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.experiment.write_report", lambda folder: folder / "report.html")


class Shared:
    """Engines that several runs use one after the other, as starting an actor takes seconds."""

    def __init__(self) -> None:
        self.engines: dict[str, RayEngine] = {}

    def make(self, run: Experiment) -> Engine:
        """Stands in for `make_engine`: the engine of the run's model, with the run's memory."""
        model = run.config.model.path
        if model not in self.engines:
            chosen = load_config("flame/tiny-tasks", [TWO_ACTORS]).federation.engine
            federation = run.config.federation.model_copy(update={"engine": chosen})
            engine = make_engine(replace(run, config=run.config.model_copy(update={"federation": federation})))
            assert isinstance(engine, RayEngine)
            self.engines[model] = engine
        engine = self.engines[model]
        engine.memory, engine.ledger = run.memory, engine.ledger.beside(run.memory)
        return Borrowed(engine)


class Borrowed:
    """An engine that a run may not end."""

    def __init__(self, engine: RayEngine) -> None:
        self.train = engine.train

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def shared(_one_ray: None) -> Iterator[Shared]:
    engines = Shared()
    yield engines
    for engine in engines.engines.values():
        engine.close()


@pytest.mark.parametrize("label", sorted(METHODS))
def test_two_actors_give_the_bytes_and_bits_of_the_local_engine(label, models, shared, tmp_path):
    assert_equal_to_local(label, models, tmp_path, shared.make)
    for engine in shared.engines.values():
        actors = engine.describe()
        assert len({actor["pid"] for actor in actors} - {os.getpid()}) == 2
        assert [actor["loads"] for actor in actors] == [1, 1], "the backbone is loaded once per actor life"


@dataclass
class Begun:
    """A run of FLAME before its first round, and an engine of two actors.

    Attributes:
        run: The run.
        engine: The engine.
        state: The method's state.
        tasks: Of all four clients.
    """

    run: Experiment
    engine: RayEngine
    state: Payload
    tasks: list[Task]

    def train(self, terms: Terms = WAIT_FOR_ALL) -> Iterator[Delivery]:
        return self.engine.train(self.run.method, self.run.backbone.info, self.tasks, terms)

    def round(self, engine: Any) -> Outcome:
        model, rules = self.run.backbone.info, FederationSettings(quorum=1.0)
        return run_round(1, self.run.method, self.state, model, self.run.clients, engine, rules, seed=0)


@pytest.fixture
def begun(models, shared, tmp_path) -> Begun:
    config = case_config("flame", models)
    run = prepare(config, tmp_path / "run")
    shared.make(run)
    model = run.backbone.info
    state = run.method.start(model, run.budgets, torch_rng(0, "start"))
    tasks = [Task(1, client, run.method.download(state, model, client)) for client in run.clients]
    return Begun(run, shared.engines[config.model.path], state, tasks)


def uploads(deliveries: Any) -> list[dict[str, torch.Tensor]]:
    found = list(deliveries)
    assert [delivery.failure for delivery in found] == [""] * len(found)
    return [dict(delivery.upload.tensors) for delivery in found]


def assert_bits(found: list[dict[str, torch.Tensor]], expected: list[dict[str, torch.Tensor]]) -> None:
    assert [one.keys() for one in found] == [other.keys() for other in expected]
    for one, other in zip(found, expected, strict=True):
        assert all(torch.equal(one[name], tensor) for name, tensor in other.items())


class Killing:
    """An engine one of whose actors dies while its client is in training."""

    def __init__(self, engine: RayEngine, victim: int) -> None:
        self.engine, self.victim = engine, victim

    def train(self, *arguments: Any) -> Iterator[Delivery]:
        os.kill(self.victim, signal.SIGSTOP)  # so that it is not done when the signal comes
        arriving = self.engine.train(*arguments)
        yield next(arriving)
        os.kill(self.victim, signal.SIGKILL)
        yield from arriving


def test_an_actor_that_is_killed_in_a_round_is_replaced_and_the_round_is_unharmed(begun):
    unharmed = begun.round(begun.engine)
    first, second = (actor["pid"] for actor in begun.engine.describe())
    outcome = begun.round(Killing(begun.engine, second))
    assert outcome.rejected == {}
    assert outcome.retried == outcome.strays == []
    assert outcome.traffic == unharmed.traffic
    assert all(torch.equal(outcome.state.tensors[name], tensor) for name, tensor in unharmed.state.tensors.items())
    actors = begun.engine.describe()
    assert first in {actor["pid"] for actor in actors}
    assert second not in {actor["pid"] for actor in actors}
    assert [actor["loads"] for actor in actors] == [1, 1]


def test_a_cohort_that_kills_every_actor_fails_alone_and_a_dead_actor_is_replaced_later(begun, monkeypatch):
    whole = uploads(begun.train())
    monkeypatch.setattr(engine_module, "TRIES", 1)
    victim = begun.engine.describe()[1]["pid"]
    found = list(Killing(begun.engine, victim).train(begun.run.method, begun.run.backbone.info, begun.tasks))
    assert [delivery.failure for delivery in found] == ["", "1 actors died while they trained it", "", ""]
    assert [delivery.upload is None for delivery in found] == [False, True, False, False]
    monkeypatch.undo()
    os.kill(begun.engine.describe()[0]["pid"], signal.SIGKILL)
    assert_bits(uploads(begun.train()), whole)


def test_enough_is_the_same_draw_as_on_the_local_engine(begun):
    found = list(begun.train(Terms(enough=2)))
    local = make_engine(begun.run)
    assert not isinstance(local, RayEngine)
    expected = list(local.train(begun.run.method, begun.run.backbone.info, begun.tasks, Terms(enough=2)))
    assert [delivery.failure for delivery in found] == [delivery.failure for delivery in expected]
    assert [delivery.needed for delivery in found].count(True) == 2
    assert "not needed: 2 others were faster" in {delivery.failure for delivery in found}


def test_no_cohort_begins_after_the_deadline(begun):
    found = list(begun.train(Terms(deadline_seconds=1e-9)))
    assert {delivery.failure for delivery in found} == {"did not answer within 1e-09 s"}


def test_cohorts_of_several_and_auto_give_every_actor_some(begun, monkeypatch):
    alone = uploads(begun.train())
    told: list[tuple[int, int]] = []
    monkeypatch.setattr(begun.engine, "on_step", lambda done, total, loss: told.append((done, total)))
    monkeypatch.setattr(begun.engine, "cohort_size", "auto")
    for found, expected in zip(uploads(begun.train()), alone, strict=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(found[name], tensor, rtol=1e-4, atol=1e-6)
    assert told[-1][0] == told[-1][1] == len(told)


def test_a_run_by_its_config_ends_as_on_the_local_engine(models, tmp_path):
    experiment.run(case_config("flame", models), tmp_path / "local")
    experiment.run(case_config("flame", models, TWO_ACTORS), tmp_path / "ray")
    assert_same(ended(tmp_path / "ray"), ended(tmp_path / "local"))


def test_a_model_that_the_actors_cannot_load_is_told_so(models, tmp_path):
    config = case_config("flame", models, "federation.engine={name: ray, ray: {actors: 1}}")
    run = prepare(config, tmp_path)
    run.config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "gone")})})
    with pytest.raises(FedGuildError, match=r"An actor of the ray engine did not come up: (.|\n)*gone"):
        make_engine(run)


def test_actors_that_others_leave_no_room_for_are_refused(models, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PATIENCE_SECONDS", 0.1)
    cores = int(ray.cluster_resources()["CPU"])
    taken = sum(len(engine.describe()) for engine in shared.engines.values())
    assert taken
    config = case_config("flame", models, f"federation.engine={{name: ray, ray: {{actors: {cores}}}}}")
    with pytest.raises(ConfigError, match=rf"but Ray has {cores - taken} CPU core\(s\) and 0 GPU\(s\) free"):
        make_engine(prepare(config, tmp_path))


def test_more_actors_than_there_is_room_for_are_refused(models, tmp_path):
    cores = int(ray.cluster_resources()["CPU"])
    config = case_config("flame", models, f"federation.engine={{name: ray, ray: {{actors: {cores + 1}}}}}")
    with pytest.raises(ConfigError, match=rf"{cores + 1} actor\(s\) with 1 CPU core\(s\) each, but Ray has {cores}"):
        make_engine(prepare(config, tmp_path))


def test_an_address_without_a_cluster_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=r"no Ray cluster at '10\.0\.0\.1:6379'[\s\S]*RAY_AUTH_MODE=token"):
        connect("10.0.0.1:6379", cores=1)
