"""The ray engine on this machine: equal to `local`, and unaffected by the death of an actor."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import load_config
from fedguild.config.federation import FederationSettings
from fedguild.config.privacy import PrivacySettings
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.runs import experiment
from fedguild.runs.setup import Experiment, make_engine, prepare
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Engine, FilteredEngine, Task, Wait
from fedguild.server.round import Outcome, RoundSetup
from fedguild.server.rounds import run_round
from tests.engines.equality import METHODS_TO_COMPARE, assert_equal_to_local, case_config, save_models
from tests.runs.runs import assert_same, ended

ray = pytest.importorskip("ray", reason="needs the extra ray")

from fedguild.engines import ray as engine_module  # noqa: E402 - after the check that ray is there
from fedguild.engines import ray_cluster  # noqa: E402
from fedguild.engines.ray import RayEngine  # noqa: E402
from fedguild.engines.ray_cluster import connect  # noqa: E402
from fedguild.server.method import Roster  # noqa: E402

CORES = 5


def engine_setting(actors: int) -> str:
    return f"federation.engine={{name: ray, ray: {{actors: {actors}}}}}"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module", autouse=True)
def _one_ray() -> Iterator[None]:
    """One Ray for all tests; engines use the one that is up, and end their own actors only."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_prestart_worker_first_driver", "0")
        patch.setenv("RAY_worker_niceness", "0")  # else the other tests go first
        assert connect(None, CORES)
    yield
    ray.shutdown()


class SharedEngines:
    """Engines that several runs use one after the other, as starting an actor takes seconds."""

    def __init__(self) -> None:
        self.engines: dict[str, RayEngine] = {}

    def close(self) -> None:
        while self.engines:
            self.engines.popitem()[1].close()

    def make(self, run: Experiment) -> tuple[Engine, None]:
        """Replaces `make_engine`: returns the engine of the run's model, with the run's memory."""
        model = run.config.model.path
        if model not in self.engines:
            chosen = load_config("flame/tiny-tasks", [engine_setting(2)]).federation.engine
            federation = run.config.federation.model_copy(update={"engine": chosen})
            changes = {"federation": federation, "privacy": PrivacySettings()}
            engine, _ = make_engine(replace(run, config=run.config.model_copy(update=changes)))
            assert isinstance(engine, RayEngine)
            self.engines[model] = engine
        engine = self.engines[model]
        engine.memory, engine.ledger = run.memory, engine.ledger.beside(run.memory)
        engine.private = None if run.privacy is None else run.privacy.dp_sgd()
        borrowed = BorrowedEngine(engine)
        return borrowed if run.privacy is None else FilteredEngine(borrowed, [run.privacy.answers()]), None


class BorrowedEngine:
    """An engine that a run does not close."""

    def __init__(self, engine: RayEngine) -> None:
        self.train = engine.train

    def close(self) -> None: ...


@pytest.fixture(scope="module")
def shared(_one_ray: None) -> Iterator[SharedEngines]:
    engines = SharedEngines()
    yield engines
    engines.close()


@pytest.mark.long
@pytest.mark.parametrize(
    "setting",
    [
        ["privacy.unit=example", "privacy.sample_rate=0.1"],
        ["privacy.unit=client"],
        ["privacy.unit=client", "privacy.trust_model=central"],
    ],
)
def test_private_runs_on_actors_give_the_bits_of_the_local_engine(setting, models, shared, tmp_path):
    privacy = [*setting, "privacy.noise_multiplier=2"]
    scores = ["evaluation.clients=false", "evaluation.trained=false"]
    label = (
        "ffa-lora" if "privacy.trust_model=central" in setting else "fedit"
    )  # of equal ranks, as central noise needs
    assert_equal_to_local(label, models, tmp_path, shared.make, *privacy, *scores)


@pytest.mark.parametrize("label", METHODS_TO_COMPARE)
def test_two_actors_give_the_bytes_and_bits_of_the_local_engine(label, models, shared, tmp_path):
    assert_equal_to_local(label, models, tmp_path, shared.make)
    for engine in shared.engines.values():
        actors = engine.describe()
        assert len({actor["pid"] for actor in actors} - {os.getpid()}) == 2
        assert [actor["loads"] for actor in actors] == [1, 1], "the backbone is loaded once per actor life"


@dataclass
class PreparedRun:
    """A run of FLAME before its first round, and an engine of two actors."""

    run: Experiment
    engine: RayEngine
    state: Payload
    tasks: list[Task]

    def train(self, terms: Wait = WAIT_FOR_ALL, engine: Engine | None = None) -> list[Delivery]:
        method, model = self.run.method, self.run.backbone.info
        return list((engine or self.engine).train(method, model, self.tasks, terms))

    def round(self, engine: Any) -> Outcome:
        model, rules = self.run.backbone.info, FederationSettings(quorum=1.0)
        return run_round(1, self.state, self.run.clients, RoundSetup(self.run.method, model, engine, rules, 0))


@pytest.fixture
def prepared(models, shared, tmp_path) -> PreparedRun:
    config = case_config("flame", models)
    run = prepare(config, tmp_path / "run")
    shared.make(run)
    model = run.backbone.info
    state = run.method.start(model, Roster(run.budgets), torch_rng(0, "start"))
    tasks = [Task(1, client, run.method.download(state, model, client)) for client in run.clients]
    return PreparedRun(run, shared.engines[config.model.path], state, tasks)


def uploads(deliveries: Iterable[Delivery]) -> list[dict[str, torch.Tensor]]:
    tensors = []
    for delivery in deliveries:
        assert not delivery.failure
        assert delivery.upload is not None
        tensors.append(dict(delivery.upload.tensors))
    return tensors


class KillingEngine:
    """An engine one of whose actors dies while its client is in training."""

    def __init__(self, engine: RayEngine, victim: int) -> None:
        self.engine, self.victim = engine, victim

    def train(self, *arguments: Any) -> Iterator[Delivery]:
        os.kill(self.victim, signal.SIGSTOP)  # so that it has not finished when the signal comes
        deliveries = self.engine.train(*arguments)
        yield next(deliveries)
        os.kill(self.victim, signal.SIGKILL)
        yield from deliveries


@pytest.mark.long
def test_an_actor_that_is_killed_in_a_round_is_replaced_and_the_round_is_unaffected(prepared):
    undisturbed = prepared.round(prepared.engine)
    first, second = (actor["pid"] for actor in prepared.engine.describe())
    outcome = prepared.round(KillingEngine(prepared.engine, second))
    assert outcome.rejected == {}
    assert outcome.retried == outcome.strays == []
    assert outcome.traffic == undisturbed.traffic
    assert all(torch.equal(outcome.state.tensors[name], tensor) for name, tensor in undisturbed.state.tensors.items())
    actors = prepared.engine.describe()
    assert first in {actor["pid"] for actor in actors}
    assert second not in {actor["pid"] for actor in actors}
    assert [actor["loads"] for actor in actors] == [1, 1]


@pytest.mark.long
def test_a_cohort_on_which_every_actor_dies_fails_alone_and_an_idle_actor_that_died_is_replaced(prepared, monkeypatch):
    expected = uploads(prepared.train())
    monkeypatch.setattr(engine_module, "TRIES", 1)
    os.kill(prepared.engine.describe()[0]["pid"], signal.SIGKILL)
    deliveries = prepared.train()
    assert [delivery.failure for delivery in deliveries] == ["1 actors died while they trained it", "", "", ""]
    assert [delivery.upload is None for delivery in deliveries] == [True, False, False, False]
    for tensors, alone in zip(uploads(prepared.train()), expected, strict=True):
        assert tensors.keys() == alone.keys()
        assert all(torch.equal(tensors[name], tensor) for name, tensor in alone.items())


def test_enough_is_the_same_draw_as_on_the_local_engine(prepared):
    deliveries = prepared.train(Wait(enough=2))
    local, _ = make_engine(prepared.run)
    assert not isinstance(local, RayEngine)
    expected = prepared.train(Wait(enough=2), local)
    assert [delivery.failure for delivery in deliveries] == [delivery.failure for delivery in expected]
    assert [delivery.needed for delivery in deliveries].count(True) == 2
    assert "not needed: 2 others were faster" in {delivery.failure for delivery in deliveries}


def test_no_cohort_begins_after_the_deadline(prepared):
    deliveries = prepared.train(Wait(deadline_seconds=1e-9))
    assert {delivery.failure for delivery in deliveries} == {"did not answer within 1e-09 s"}


def test_cohorts_of_several_and_auto_give_every_actor_some(prepared, monkeypatch):
    alone = uploads(prepared.train())
    steps: list[tuple[int, int]] = []
    monkeypatch.setattr(prepared.engine, "on_step", lambda done, total, loss: steps.append((done, total)))
    monkeypatch.setattr(prepared.engine, "cohort_size", "auto")
    for tensors, expected in zip(uploads(prepared.train()), alone, strict=True):
        for name, tensor in expected.items():
            torch.testing.assert_close(tensors[name], tensor, rtol=1e-4, atol=1e-6)
    assert steps[-1][0] == steps[-1][1] == len(steps)


@pytest.mark.long
def test_a_run_by_its_config_ends_as_on_the_local_engine(models, tmp_path, monkeypatch):
    experiment.run(case_config("flame", models), tmp_path / "local")
    monkeypatch.setattr(
        "fedguild.runs.setup.preparation.load_model", lambda _: pytest.fail("the driver loaded the model")
    )
    experiment.run(case_config("flame", models, engine_setting(1)), tmp_path / "ray")
    assert_same(ended(tmp_path / "ray"), ended(tmp_path / "local"))


@pytest.mark.long
def test_a_model_that_the_actors_cannot_load_is_told_so(models, tmp_path):
    config = case_config("flame", models, engine_setting(1))
    run = prepare(config, tmp_path)
    run.config = config.model_copy(update={"model": config.model.model_copy(update={"path": str(tmp_path / "gone")})})
    with pytest.raises(FedGuildError, match=r"An actor of the ray engine did not start: (.|\n)*gone"):
        make_engine(run)


def test_actors_that_others_leave_no_room_for_are_refused(models, shared, tmp_path, monkeypatch):
    monkeypatch.setattr(ray_cluster, "PATIENCE_SECONDS", 0.1)
    cores = int(ray.cluster_resources()["CPU"])
    taken = sum(len(engine.describe()) for engine in shared.engines.values())
    assert taken
    config = case_config("flame", models, engine_setting(cores))
    with pytest.raises(ConfigError, match=rf"but Ray has {cores - taken} CPU core\(s\) and 0 GPU\(s\) free"):
        make_engine(prepare(config, tmp_path))


def test_more_actors_than_there_is_room_for_are_refused(models, tmp_path):
    cores = int(ray.cluster_resources()["CPU"])
    config = case_config("flame", models, engine_setting(cores + 1))
    with pytest.raises(ConfigError, match=rf"{cores + 1} actor\(s\) with 1 CPU core\(s\) each, but Ray has {cores}"):
        make_engine(prepare(config, tmp_path))


def test_an_address_without_a_cluster_is_told_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(**_: Any) -> None:
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379")

    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(ray, "init", fail)
    with pytest.raises(ConfigError, match=r"no Ray cluster at '10\.0\.0\.1:6379'[\s\S]*RAY_AUTH_MODE=token"):
        connect("10.0.0.1:6379", cores=1)


SHARDED = "federation.engine={name: ray, timeout_seconds: 60, ray: {actors: 1, gpus_per_actor: 2}}"


@pytest.mark.long
def test_processes_that_share_a_backbone_end_as_the_local_engine(models, shared, tmp_path):
    """Two processes hold half the layers each, train cohorts of their own, three in all, and score.

    The last tests here: they need the cores of the actors that the others share.
    """
    shared.close()
    experiment.run(case_config("flame", models), tmp_path / "local")
    experiment.run(case_config("flame", models, SHARDED), tmp_path / "ray")
    assert_same(ended(tmp_path / "ray"), ended(tmp_path / "local"))


@pytest.mark.long
def test_processes_that_share_a_backbone_are_replaced_if_one_is_killed_in_a_round(models, shared, tmp_path):
    """Ray tells of its death after the error of the other process, whose pass it does not come to."""
    shared.close()
    run = prepare(case_config("flame", models, SHARDED), tmp_path)
    engine, _ = make_engine(run)
    state = run.method.start(run.backbone.info, Roster(run.budgets), torch_rng(0, "start"))
    tasks = [Task(1, client, run.method.download(state, run.backbone.info, client)) for client in run.clients]
    expected = uploads(engine.train(run.method, run.backbone.info, tasks))
    victim = engine.describe()[1]["pid"]
    os.kill(victim, signal.SIGSTOP)
    death = threading.Timer(3.0, os.kill, (victim, signal.SIGKILL))
    death.start()
    found = uploads(engine.train(run.method, run.backbone.info, tasks))
    death.join()
    assert victim not in {actor["pid"] for actor in engine.describe()}
    engine.close()
    for tensors, alone in zip(found, expected, strict=True):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in alone.items())
