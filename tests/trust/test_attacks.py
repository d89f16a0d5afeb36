"""Hostile answers of one registered client, each through the server's own loop: none stops it, none is used."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import Config
from fedguild.federation.testing import Driven, HostileClient, Message, drive
from fedguild.measuring.log.records import EvaluationRecord, RoutingRecord
from fedguild.server.guard import not_finite
from tests.runs.runs import says
from tests.trust.attacks import HELLO, SCORE, TRAIN, Attack, filled, saying
from tests.trust.conftest import config_of

HOSTILE = 2
SEVERAL = (2, 3, 4)
"""Hostile clients of a run with two honest ones, who each try another attack in the same round."""


def changed(config: Config, section: str, **changes: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=changes)})


def five(config: Config, rounds: int) -> Config:
    return changed(config, "federation", rounds=rounds, clients=2 + len(SEVERAL), quorum=0.4)


def dealt(names: Iterable[str], first_round: int) -> dict[tuple[int, int], str]:
    return {
        (first_round + place // len(SEVERAL), SEVERAL[place % len(SEVERAL)]): name for place, name in enumerate(names)
    }


def attacking(
    kind: str, attack_of: Callable[[Message], Attack | None], client: int = HOSTILE, **more: Any
) -> HostileClient:
    def answer(request: Message, honest: Callable[[], Message]) -> Message | bytes | None:
        attack = attack_of(request) if request.kind == kind else None
        return honest() if attack is None else attack(honest())

    return HostileClient(client, answer, **more)


def each_once(attacks: Mapping[str, Attack]) -> Callable[[Message], Attack | None]:
    left: Iterator[Attack] = iter(attacks.values())
    return lambda request: next(left, None)


def assert_printable(driven: Driven) -> None:
    for line in driven.lines:
        assert not [character for character in line if unicodedata.category(character) in ("Cc", "Cf", "Cs")], repr(
            line
        )
        assert len(line) < 2000


def test_attacks_on_a_round(config: Config, tmp_path: Path) -> None:
    """Three in each round, and none in the last."""
    attacks = dealt(TRAIN, first_round=1)
    last = max(number for number, _ in attacks) + 1

    def attack(client: int) -> Callable[[Message], Attack | None]:
        return lambda request: TRAIN[attacks[request.round, client]][0] if (request.round, client) in attacks else None

    hostile = [attacking("train", attack(client), client) for client in SEVERAL]
    driven = drive(five(config, rounds=last), tmp_path, hostile, server_evaluation=True)
    assert driven.error is None
    assert len(driven.rounds) == last
    assert {(number, client) for number, rejected in driven.rejected.items() for client in rejected} == attacks.keys()
    for (number, client), name in attacks.items():
        says(driven.rejected[number][client], TRAIN[name][1])
    assert driven.accepted[last] == [0, 1, *SEVERAL]
    assert driven.state is not None
    assert not not_finite(driven.state)
    assert_printable(driven)


def test_no_client_decides_by_a_number_of_tokens_which_experts_the_run_uses(config: Config, tmp_path: Path) -> None:
    """All its tokens, 10^13 of them, activated the same experts, as far as it says."""
    once, entropies = changed(config, "federation", rounds=1), []
    claim = saying(tokens=10**13, frequency=[[1.0] * 4 + [0.0] * 4] * 2)
    for attack in (None, claim):
        hostile = [attacking("train", lambda _: attack)]  # noqa: B023
        driven = drive(once, tmp_path / str(attack is None), hostile, server_evaluation=True)
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
    driven = drive(config, tmp_path, [hostile], server_evaluation=True)
    assert driven.error is None
    refused = [line for line in driven.lines if "client-002 cannot take part" in line or "did not identify" in line]
    assert len(refused) >= len(HELLO)
    assert next_attack(Message("hello", "")) is None, "an attack was not tried"
    assert driven.accepted == {1: [0, 1, 2], 2: [0, 1, 2]}
    assert_printable(driven)


def test_attacks_on_the_scores(config: Config, tmp_path: Path) -> None:
    """Three after each round from the second on."""
    attacks = dealt(SCORE, first_round=2)
    last = max(number for number, _ in attacks)

    def attack(client: int) -> Callable[[Message], Attack | None]:
        return lambda request: SCORE[attacks[request.round, client]] if (request.round, client) in attacks else None

    hostile = [attacking("score", attack(client), client) for client in SEVERAL]
    driven = drive(changed(five(config, rounds=last), "evaluation", every=1), tmp_path, hostile)
    assert driven.error is None
    scores = [record for record in driven.records if isinstance(record, EvaluationRecord)]
    for number in range(last + 1):
        recorded = [record.name for record in scores if (record.round, record.scope) == (number, "client")]
        assert recorded == [f"client-00{client}" for client in range(5) if (number, client) not in attacks], number
    assert {(record.scope, record.name) for record in scores if record.scope != "client"} == {("summary", "mtal")}
    assert all(0 <= record.score <= 1 for record in scores)
    assert sum("has no scores" in line for line in driven.lines) == len(attacks)
    assert_printable(driven)


@pytest.mark.parametrize("method", ["florist", "flexlora"])
def test_values_that_no_decomposition_bears(method: str, config: Config, tmp_path: Path) -> None:
    """Even where the bound on values would let them pass, the round goes on without the upload that did it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.runs.setup.protection.LARGEST_VALUE", 3.3e38)
        hostile = attacking("train", lambda request: filled(3e38))
        other = config_of(config.model.path, f"{method}/tiny-tasks")
        driven = drive(other, tmp_path, [hostile], server_evaluation=True)
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
