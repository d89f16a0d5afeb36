"""A site's own word on its privacy: fresh noise, a ledger over all runs, and nothing else that leaves."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import Config
from fedguild.core.errors import DataError, FedGuildError
from fedguild.federation import trainer_service
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.testing import drive
from fedguild.federation.trainer_service import LEDGER_NAME, WITHHELD, TrainerService, run_metadata
from fedguild.privacy.dp.accounting import Release, epsilon
from fedguild.privacy.dp.ledger import FILE, Ledger
from fedguild.runs.guarantee import rules_of
from tests.federation.flower.loopback_federation import QUICK, small_config, trainers_of
from tests.federation.test_trainer_service import RUN, train_request

METHOD = ("method.targets=[q_proj]", "method.rank_by_budget=false")
LOCAL = ("privacy.unit=client", "privacy.noise_multiplier=6", "privacy.clip=0.1")
EXAMPLE = ("privacy.unit=example", "privacy.noise_multiplier=3", "privacy.sample_rate=0.1")


def private(model: Path, *overrides: str) -> Config:
    return small_config(model, *QUICK, *METHOD, *overrides, base="fedit/tiny-tasks")


def site(config: Config, folder: Path, **accept: Any) -> TrainerService:
    return trainers_of(config, folder, [{"accept": accept}] * config.federation.clients)[1]


def answered(trainer: TrainerService, request: Message) -> dict[str, torch.Tensor]:
    reply = trainer.handle(request)
    assert not reply.failure
    return dict(read_payload(reply.body, "The upload").tensors)


@pytest.mark.parametrize("overrides", [LOCAL, EXAMPLE])
def test_another_request_gets_other_noise_and_the_same_one_the_same_answer(olmoe_folder, tmp_path, overrides):
    """Only the first and the third cost: the second is the same, and comes after a restart."""
    config = private(olmoe_folder, *overrides)
    trainer, request = site(config, tmp_path), train_request(config)
    first = answered(trainer, request)
    again = site(config, tmp_path)
    same = answered(again, request)
    assert all(torch.equal(first[name], value) for name, value in same.items())
    other = answered(again, replace(request, round=2))
    assert not any(torch.equal(first[name], value) for name, value in other.items())
    rules = rules_of(config)
    assert rules is not None
    expected = rules.release(len(trainer._client_data().train))
    assert list(Ledger(trainer.work / FILE).releases(LEDGER_NAME).values()) == [expected] * 2


def test_an_answer_that_a_full_disk_does_not_take_is_sent_all_the_same(olmoe_folder, tmp_path, monkeypatch):
    """The same request is then trained, and paid for, again."""

    def full(path: Path, content: bytes) -> None:
        raise FedGuildError(f"Cannot write {path}: No space left on device.")

    config = private(olmoe_folder, *LOCAL)
    trainer, request = site(config, tmp_path), train_request(config)
    trainer._session(RUN, trainer._config(request))
    with monkeypatch.context() as patch:
        patch.setattr(trainer_service, "write_bytes", full)
        first = answered(trainer, request)
    second, third = answered(trainer, request), answered(trainer, request)
    assert not any(torch.equal(first[name], value) for name, value in second.items())
    assert all(torch.equal(third[name], value) for name, value in second.items())
    assert len(Ledger(trainer.work / FILE).releases(LEDGER_NAME)) == 2


def test_a_site_says_no_size_loss_or_score_that_is_not_public(olmoe_folder: Path, tmp_path: Path) -> None:
    config = private(olmoe_folder, *LOCAL)
    trainer, request = site(config, tmp_path), train_request(config)
    hello = trainer.handle(Message("hello", RUN, 0, 1, metadata=run_metadata(config)))
    assert hello.metadata["sizes"] == {"train": 1, "validation": 0, "test": 0}
    assert f"{len(trainer._client_data().train)} training" not in hello.metadata["summary"]
    said = trainer.handle(request).metadata
    assert said["withheld"]
    assert {said[name] for name in ("tokens", "examples", "loss", "seconds", "forward_tokens")} == {0}
    assert (said["first_loss"], said["frequency"], said["peak_memory_bytes"]) == (None, None, None)
    asked = {**run_metadata(config), "scope": "client", "split": "test"}
    score = trainer.handle(Message("score", RUN, 1, 1, metadata=asked, body=request.body))
    assert "scores are not among the run's privacy.public" in score.failure


def test_a_site_does_not_say_whether_it_has_conversations(olmoe_folder: Path, tmp_path: Path) -> None:
    config, turns = private(olmoe_folder, *LOCAL), [("user", "a"), ("assistant", "b")]
    row = json.dumps({"messages": [{"role": role, "content": content} for role, content in turns]})
    (tmp_path / "chats.jsonl").write_text("\n".join([row] * 9))
    own = {"dataset": "instructions", "train": str(tmp_path / "chats.jsonl"), "partition": {"scheme": "iid"}}
    said = []
    for name, data in (("prompts", {}), ("chats", own)):
        given = {"data": {**data, "chat_template": "plain"}}
        trainer = trainers_of(config, tmp_path / name, [given] * config.federation.clients)[1]
        hello = trainer.handle(Message("hello", RUN, 0, 1, metadata=run_metadata(config)))
        assert not hello.failure
        said.append(hello.metadata["texts"])
    assert said == ["", ""]


def test_a_site_stops_at_its_own_limit_over_all_runs(olmoe_folder: Path, tmp_path: Path) -> None:
    config = private(olmoe_folder, *LOCAL)
    enough_for_two = (epsilon([Release(3.0, 2)], 1e-5) + epsilon([Release(3.0, 3)], 1e-5)) / 2
    trainer, request = site(config, tmp_path, max_epsilon=enough_for_two), train_request(config)
    other_run = Message("train", "cd" * 16, 1, 1, metadata=request.metadata, body=request.body)
    assert not trainer.handle(request).failure
    again = site(config, tmp_path, max_epsilon=enough_for_two)  # the site's process was started anew
    assert not again.handle(other_run).failure
    further = replace(request, round=2)
    assert "its privacy is spent: another round would bring all runs together" in again.handle(further).failure


def test_a_site_stops_at_the_runs_budget(olmoe_folder: Path, tmp_path: Path) -> None:
    config = private(olmoe_folder, *LOCAL, f"privacy.max_epsilon={epsilon([Release(3.0)], 1e-5) + 0.01}")
    trainer, request = site(config, tmp_path), train_request(config)
    assert not trainer.handle(request).failure
    assert "another round would bring this run to" in trainer.handle(replace(request, round=2)).failure


@pytest.mark.parametrize(
    ("overrides", "reason"),
    [
        ((), "has no differential privacy"),
        ((*LOCAL, "privacy.trust_model=central"), "the server adds the run's noise"),
        ((*LOCAL, "privacy.public=[scores, sizes]"), "declares scores and sizes public, beyond accept.public"),
    ],
)
def test_a_limit_refuses_what_it_cannot_count_whatever_is_asked(olmoe_folder, tmp_path, overrides, reason):
    """The server's word on what is public does not count."""
    config = private(olmoe_folder, *overrides)
    trainer, request = site(config, tmp_path, max_epsilon=100.0), train_request(config)
    for kind in ("hello", "train", "score", "deliver"):
        asked = {**run_metadata(config), "scope": "client", "split": "test"}
        reply = trainer.handle(Message(kind, RUN, 1, 1, metadata=asked, body=request.body))  # type: ignore[arg-type]
        assert reason in reply.failure, kind
        assert not reply.body
        assert "sizes" not in reply.metadata
    assert not trainer._sessions


@pytest.mark.parametrize("overrides", [(), (*LOCAL, "privacy.trust_model=central")], ids=["none", "central"])
def test_a_run_without_the_sites_noise_is_in_its_ledger_and_no_later_limit_holds(olmoe_folder, tmp_path, overrides):
    config, later = private(olmoe_folder, *overrides), private(olmoe_folder, *LOCAL)
    trainer = site(config, tmp_path)
    for number in (1, 2):
        assert not trainer.handle(replace(train_request(config), round=number)).failure
    assert Ledger(trainer.work / FILE).releases(LEDGER_NAME) == {f"{RUN}-in-the-clear": Release(0.0)}
    request = replace(train_request(later), run="cd" * 16)
    limited = site(later, tmp_path, max_epsilon=1e6)
    assert "no accept.max_epsilon holds" in limited.handle(request).failure
    (limited.work / FILE).rename(tmp_path / "before")
    assert not site(later, tmp_path, max_epsilon=1e6).handle(request).failure


def test_a_refusal_says_no_number_that_follows_from_the_size(olmoe_folder: Path, tmp_path: Path) -> None:
    config = private(olmoe_folder, *LOCAL, "privacy.public=[scores]")
    failure = site(config, tmp_path, min_examples=10**6).handle(train_request(config)).failure
    assert failure.startswith("refused by its site: a round")
    assert "a withheld number of" in failure
    limited, request = site(config, tmp_path, min_scored=10**6), train_request(config)
    asked = {**run_metadata(config), "scope": "client", "split": "test"}
    score = Message("score", RUN, 1, 1, metadata=asked, body=request.body)
    assert "a score is of a withheld number of example(s)" in limited.handle(score).failure
    trainer = site(config, tmp_path / "other")
    assert not trainer.handle(request).failure
    records = trainer.handle(score).metadata["records"]
    assert len(trainer._client_data().test) > 1
    assert {record["examples"] for record in records} == {1}


def test_no_number_of_refusals_tells_a_size(olmoe_folder: Path, tmp_path: Path) -> None:
    """With epochs the smallest limit that is not refused did, by bisection."""
    steps = ("training.steps=null", "training.epochs={}")
    trainer = site(private(olmoe_folder, *LOCAL), tmp_path, max_steps=10)
    heard = set()
    for epochs in (1, 2, 1000):
        config = private(olmoe_folder, *LOCAL, *(each.format(epochs) for each in steps))
        heard.add(trainer.handle(Message("hello", f"{epochs:032x}", 0, 1, metadata=run_metadata(config))).failure)
    (failure,) = heard
    assert "training.epochs makes the steps of a round follow from this site's number of examples" in failure


@pytest.mark.parametrize("error", [RuntimeError("index 17 of example 'secret'"), DataError("Example 'secret' is bad.")])
def test_an_error_tells_a_private_runs_server_nothing(olmoe_folder, tmp_path, error, capsys):
    config = private(olmoe_folder, *LOCAL)
    trainer = site(config, tmp_path)

    def failing(*_: object) -> None:
        raise error

    trainer._engine = failing  # type: ignore[method-assign, assignment]
    assert trainer.handle(train_request(config)).failure == WITHHELD
    assert "secret" in capsys.readouterr().err


def test_a_run_keeps_the_config_that_it_began_with(olmoe_folder: Path, tmp_path: Path) -> None:
    """Else a second config could ask for what the first one left in the client's memory."""
    first, second = private(olmoe_folder, *LOCAL), private(olmoe_folder, *EXAMPLE)
    assert not site(first, tmp_path).handle(train_request(first)).failure
    trainer = site(second, tmp_path)  # the site's process was started anew
    assert "the run began here with another config" in trainer.handle(train_request(second, round=2)).failure
    assert len(Ledger(trainer.work / FILE).releases(LEDGER_NAME)) == 1
    assert not trainer.handle(train_request(first, round=2)).failure
    assert not trainer.handle(replace(train_request(second), run="cd" * 16)).failure


CENTRAL = ("privacy.unit=client", "privacy.trust_model=central", "privacy.noise_multiplier=3", "privacy.clip=0.1")


@pytest.mark.parametrize(
    ("overrides", "released"),
    [(EXAMPLE, Release(3.0, 4, 0.1)), (CENTRAL, Release(3.0, 2)), (LOCAL, Release(3.0, 2))],
    ids=["example", "central", "local"],
)
def test_a_federation_records_what_its_clients_spend(olmoe_folder, tmp_path, overrides, released):
    settings = [*QUICK, *METHOD, *overrides, f"model.path={olmoe_folder}", "model.dtype=float32", "model.device=cpu"]
    settings += ["training.steps=2", "training.batch_size=2", "evaluation.max_examples=4", "method.rank=3"]
    settings += ["data.options={train_examples: 96, test_examples: 12, families: [sum, reverse, topic]}"]
    settings += ["federation.budgets=[{name: all, active_experts: 4, rank: 3}]", "data.partition.minimum=4"]
    driven = drive("fedit/tiny-tasks", tmp_path, [], overrides=settings, server_evaluation=True)
    assert driven.error is None
    assert not any(driven.rejected.values())
    (*_, last) = [record for record in driven.records if record.kind == "privacy"]
    assert last.epsilon == [epsilon([released], last.delta)] * 3
    trained = [record for record in driven.records if record.kind == "client"]
    assert {(record.examples, record.steps, record.train_loss) for record in trained} == {(None, 2, None)}
    assert len((driven.folder / "secret").read_bytes()) == 32
    ledger = Ledger(tmp_path / "client-001" / "work" / FILE).releases(LEDGER_NAME)
    central = "privacy.trust_model=central" in overrides
    assert sum(each.times for each in ledger.values()) == (1 if central else released.times)
    assert (epsilon(ledger.values(), 1e-5) == math.inf) == central
    assert any("do not leave the machines that draw it" in line for line in driven.lines)
