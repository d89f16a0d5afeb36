"""Excerpts of a method's state that a client is sent to score its own model or take it home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedguild.config import Config
from fedguild.core.layout import CHECKPOINTS
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.methods.fedamole.pool import Pool, held_experts
from fedguild.runs import experiment
from fedguild.server import checkpoint
from tests.engines.equality import case_config
from tests.federation.flower.loopback import LoopbackGrid, LoopbackNode
from tests.federation.flower.loopback_federation import Lines, serve_on, trainers_of


@pytest.fixture(scope="module")
def models(llama_folder: Path, olmoe_folder: Path) -> dict[str, Path]:
    return {"llama": llama_folder, "olmoe": olmoe_folder}


def recorded(config: Config, folder: Path) -> tuple[LoopbackGrid, list[Message]]:
    requests: list[Message] = []

    def of(handle: Callable[[Message], Message]) -> Callable[[Message], Message]:
        return lambda message: requests.append(message) or handle(message)  # type: ignore[func-returns-value]

    trainers = trainers_of(config, folder)
    return LoopbackGrid(LoopbackNode(100 + trainer.site.client, of(trainer.handle)) for trainer in trainers), requests


def scoring(config: Config) -> Config:
    scores = {"clients": True, "received": True}
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=scores)})


def test_a_client_of_fedamole_is_sent_its_own_experts_and_no_others(models: dict[str, Path], tmp_path: Path) -> None:
    config, lines = scoring(case_config("fedamole", models)), Lines()
    local = experiment.run(config, tmp_path / "local")
    grid, requests = recorded(config, tmp_path / "sites")
    result = serve_on(grid, config, tmp_path / "server", lines, server_evaluation=False, deliver=True)
    assert local.own
    assert result.own == local.own
    saved = checkpoint.load(
        tmp_path / "server/state/run" / CHECKPOINTS, result.rounds, fingerprint=config.fingerprint()
    )
    pool = Pool.of(saved.state)
    scored = [message for message in requests if message.kind == "score" and message.round == result.rounds]
    assert {message.client for message in scored} == set(range(config.federation.clients))
    for message in scored:
        sent = read_payload(message.body, "test")
        assert not sent.scalars
        assert {name.partition("/")[0] for name in sent.tensors} == {"common", "experts"}
        assigned = {
            module: tuple(rows[message.client].nonzero().flatten().tolist()) for module, rows in pool.assigned.items()
        }
        assert held_experts(sent.part("experts")) == assigned
        assert all(len(ids) < config.method.options["experts"] for ids in assigned.values())
    assert not [message for message in requests if message.kind == "deliver"]
    assert lines.says("No client receives a model", "fedamole", "MixtureOfLora", "clients")
    assert not list((tmp_path / "sites").rglob("models"))


@pytest.mark.parametrize(
    "label", ["fedavg", *(pytest.param(label, marks=pytest.mark.long) for label in ("fedmoe", "flame", "hetlora"))]
)
def test_the_scores_are_those_of_a_simulation(label: str, models: dict[str, Path], tmp_path: Path) -> None:
    """Where a state is about no client, all are sent the same bytes."""
    config = scoring(case_config(label, models))
    local = experiment.run(config, tmp_path / "local")
    grid, requests = recorded(config, tmp_path / "sites")
    remote = serve_on(grid, config, tmp_path / "server", server_evaluation=False)
    assert local.own
    assert remote.own == local.own
    sent = {message.body for message in requests if message.kind == "score" and message.round == remote.rounds}
    assert label != "fedavg" or len(sent) == 1
