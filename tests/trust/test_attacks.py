"""Hostile answers of one registered client, each through the server's own loop: none stops it, none is used."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import Config
from fedguild.runs.log import EvaluationRecord, RoutingRecord
from fedguild.server.guard import not_finite
from fedguild.testing import Driven, HostileClient, Message, drive
from tests.experiment.runs import says
from tests.trust.attacks import HELLO, SCORE, TRAIN, Attack, filled, saying
from tests.trust.conftest import config_of

HOSTILE = 2


def changed(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def attacking(kind: str, attack_of: Callable[[Message], Attack | None], **more: Any) -> HostileClient:
    """Returns a client that is honest but for its answers to one kind of request."""

    def answer(request: Message, honest: Callable[[], Message]) -> Message | bytes | None:
        attack = attack_of(request) if request.kind == kind else None
        return honest() if attack is None else attack(honest())

    return HostileClient(HOSTILE, answer, **more)


def each_once(attacks: Mapping[str, Attack]) -> Callable[[Message], Attack | None]:
    """Returns one attack after the other, and None after the last."""
    left: Iterator[Attack] = iter(attacks.values())
    return lambda request: next(left, None)


def assert_printable(driven: Driven) -> None:
    """Asserts that nothing on the operator's terminal moves its cursor."""
    for line in driven.lines:
        assert not [character for character in line if unicodedata.category(character) in ("Cc", "Cf", "Cs")], repr(
            line
        )
        assert len(line) < 2000


def test_attacks_on_a_round(config: Config, tmp_path: Path) -> None:
    """One in each round, and none in the last."""
    attacks = list(TRAIN.values())
    config = changed(config, "federation", rounds=len(attacks) + 1)
    hostile = attacking(
        "train", lambda request: attacks[request.round - 1][0] if request.round <= len(attacks) else None
    )
    driven = drive(config, tmp_path, [hostile], reads_data=True)
    assert driven.error is None
    assert len(driven.rounds) == len(attacks) + 1
    for number, (name, (_, reason)) in enumerate(TRAIN.items(), start=1):
        assert list(driven.rejected[number]) == [HOSTILE], name
        says(driven.rejected[number][HOSTILE], reason)
    assert driven.accepted[len(attacks) + 1] == [0, 1, 2]
    assert driven.state is not None
    assert not not_finite(driven.state)
    assert_printable(driven)


def test_no_client_decides_by_a_number_of_tokens_which_experts_the_run_uses(config: Config, tmp_path: Path) -> None:
    """All its tokens, 10^13 of them, activated the same experts, as far as it says."""
    once, entropies = changed(config, "federation", rounds=1), []
    claim = saying(tokens=10**13, frequency=[[1.0] * 4 + [0.0] * 4] * 2)
    for attack in (None, claim):
        driven = drive(once, tmp_path / str(attack is None), [attacking("train", lambda _: attack)], reads_data=True)  # noqa: B023
        assert driven.accepted == {1: [0, 1, 2]}
        (routing,) = (record for record in driven.records if isinstance(record, RoutingRecord))
        entropies.append(routing.normalised_entropy)
    alone = math.log(4) / math.log(8)
    for honest, claimed in zip(*entropies, strict=True):
        assert (claimed - alone) > 0.4 * (honest - alone) > 0.04, (honest, claimed)


def test_attacks_on_the_question_who_a_client_is(config: Config, tmp_path: Path) -> None:
    """From many connections with one key; the last one is honest, and takes part."""
    next_attack = each_once(HELLO)
    hostile = attacking("hello", next_attack, nodes=len(HELLO) + 1)
    driven = drive(config, tmp_path, [hostile], reads_data=True)
    assert driven.error is None
    refused = [line for line in driven.lines if "client-002 cannot take part" in line or "did not identify" in line]
    assert len(refused) >= len(HELLO)
    assert next_attack(Message("hello", "")) is None, "an attack was not tried"
    assert driven.accepted == {1: [0, 1, 2], 2: [0, 1, 2]}
    assert_printable(driven)


def test_attacks_on_the_scores(config: Config, tmp_path: Path) -> None:
    """One after each round; those after round 0 are honest."""
    attacks = list(SCORE.values())
    config = changed(changed(config, "federation", rounds=len(attacks)), "evaluation", every=1)
    hostile = attacking("score", lambda request: attacks[request.round - 1] if request.round else None)
    driven = drive(config, tmp_path, [hostile])
    assert driven.error is None
    scores = [record for record in driven.records if isinstance(record, EvaluationRecord)]
    assert sum(record.name == "client-002" for record in scores) == 1
    for number, name in enumerate(SCORE, start=1):
        recorded = [(record.scope, record.name) for record in scores if record.round == number]
        assert recorded == [("client", "client-000"), ("client", "client-001"), ("summary", "mtal")], name
    assert all(0 <= record.score <= 1 for record in scores)
    assert sum("client 2 has no scores" in line for line in driven.lines) == len(attacks)
    assert_printable(driven)


@pytest.mark.parametrize("method", ["florist", "flexlora"])
def test_values_that_no_decomposition_bears(method: str, config: Config, tmp_path: Path) -> None:
    """Even where the bound on values would let them pass, the round goes on without the upload that did it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.setup.protection.LARGEST_VALUE", 3.3e38)
        hostile = attacking("train", lambda request: filled(3e38))
        other = config_of(config.model.path, f"{method}/tiny-tasks")
        driven = drive(other, tmp_path, [hostile], reads_data=True)
    assert driven.error is None
    assert driven.accepted == {1: [0, 1], 2: [0, 1]}
    says(driven.rejected[1][HOSTILE], "the aggregate with it")
    assert driven.state is not None
    assert not not_finite(driven.state)
    honest = drive(
        other, tmp_path / "honest", [attacking("train", lambda request: lambda answer: answer.reply(failure="no"))]
    )
    assert honest.state is not None
    assert all(torch.equal(driven.state.tensors[name], value) for name, value in honest.state.tensors.items())
