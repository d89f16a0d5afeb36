"""What a client's trainer answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedguild.client.budget import ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config
from fedguild.engines.flower.engine import read_facts, read_upload
from fedguild.engines.flower.parcel import Parcel
from fedguild.federation.desk import Desk, facts_of, model_digest
from fedguild.methods import build_method
from fedguild.seeding import torch_rng
from fedguild.setup import fit_method, load_model
from fedguild.wire.codec import encode
from tests.engines.flower.guild import QUICK, desks_of, small_config
from tests.experiment.runs import save_model

RUN = "ab" * 16


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    return small_config(save_model(tmp_path_factory.mktemp("model")), *QUICK)


@pytest.fixture
def desk(config: Config, tmp_path: Path) -> Desk:
    return desks_of(config, tmp_path)[1]


def order(config: Config, round: int = 1, client: int = 1) -> Parcel:
    """Returns the server's question of a round."""
    backbone = load_model(config)
    method, tiers = fit_method(build_method(config.method.name, config.method.options), config, backbone.info)
    budgets = list(tiers.values())
    state = method.start(backbone.info, budgets, torch_rng(config.seed, "start", config.method.name))
    download = method.download(state, backbone.info, ClientInfo(client, budgets[client % 2], 10))
    return Parcel("train", RUN, round, client, facts=facts_of(config), body=encode(download))


def test_what_a_server_tells_holds_nothing_of_its_folders(config: Config) -> None:
    told = facts_of(config.model_copy(update={"output": "/secret/output"}))
    assert "/secret" not in str(told)
    assert config.model.path not in str(told)


def test_the_backbone_is_loaded_once_over_many_rounds(config: Config, desk: Desk) -> None:
    for round in range(1, 4):
        answer = desk.answer(order(config, round))
        assert not answer.failure
        assert answer.facts["backbone_loads"] == 1
    assert desk.loads == 1


def test_a_trained_round_comes_with_its_report(config: Config, desk: Desk) -> None:
    answer = desk.answer(order(config))
    report, frequency, peak = read_facts(answer.facts)
    assert (answer.run, answer.round, answer.client) == (RUN, 1, 1)
    assert report.steps == 2
    assert frequency is not None
    assert frequency.shape == (2, 8)
    assert (peak or 0) > 0
    assert read_upload(answer.body, "test").tensors


def test_the_memory_of_two_runs_is_apart(config: Config, desk: Desk) -> None:
    desk.answer(order(config))
    desk.answer(replace(order(config), run="cd" * 16))
    folders = sorted(path.name for path in (desk.work / "runs").iterdir())
    assert folders == [RUN, "cd" * 16]
    first, second = (ClientMemory(desk.work / "runs" / name / "clients").load("client-001", 2) for name in folders)
    assert first.tensors.keys() == second.tensors.keys() != set()


def test_a_message_for_another_client_is_not_worked_on(config: Config, desk: Desk) -> None:
    assert desk.answer(order(config, client=0)).failure == "a message for client 0 reached client 1"
    assert desk.loads == 0


def test_a_config_of_another_version_is_a_failure(config: Config, desk: Desk) -> None:
    strange = replace(order(config), facts={"config": {"method": "fedit", "novelty": 1}})
    assert "the same version of fedguild" in desk.answer(strange).failure


def test_an_unknown_method_lists_the_known(config: Config, desk: Desk) -> None:
    asked = order(config)
    asked.facts["config"]["method"] = {"name": "fedwhat"}
    assert "fedwhat" in desk.answer(asked).failure


def test_damaged_bytes_are_a_failure(config: Config, desk: Desk) -> None:
    assert "cannot be decoded" in desk.answer(replace(order(config), body=b"\1" * 64)).failure


def test_who_it_is(config: Config, desk: Desk) -> None:
    answer = desk.answer(Parcel("hello", RUN, facts=facts_of(config)))
    assert answer.client == 1
    assert answer.facts["model"] == model_digest(load_model(config).info)
    assert answer.facts["budget"] == "small"
    assert answer.facts["sizes"]["train"] > 0


def test_a_budget_that_the_run_does_not_have(config: Config, tmp_path: Path) -> None:
    desk = desks_of(config, tmp_path, None, [{}, {"budget": "smal"}, {}])[1]
    failure = desk.answer(Parcel("hello", RUN, facts=facts_of(config))).failure
    assert failure == "its site says budget 'smal', which the run does not have"
