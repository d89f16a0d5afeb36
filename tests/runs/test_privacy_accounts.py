"""Accounts over rounds that are repeated, and over clients that nobody may know to have taken part."""

from __future__ import annotations

from itertools import count
from pathlib import Path

import pytest

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config.privacy import PrivacySettings
from fedguild.config.training import TrainingSettings
from fedguild.privacy.dp.accounting import Release, epsilon
from fedguild.privacy.dp.ledger import Ledger
from fedguild.runs.privacy_accounts import PrivacyAccounts

CLIENTS = [ClientInfo(index, Budget("all", 0, 2), 1) for index in range(3)]


def accounts(folder: Path, *, real: bool = False, **settings: object) -> PrivacyAccounts:
    given = {"unit": "client", "trust_model": "central", "noise_multiplier": 8.0, **settings}
    rules = PrivacyRules(PrivacySettings.model_validate(given), TrainingSettings(steps=1), 3, 3, 1)
    attempts = count()
    attempt = (lambda: f"-{next(attempts)}") if real else str
    return PrivacyAccounts(rules, Ledger(folder / "privacy.jsonl"), lambda client: 10, attempt)


def test_a_round_that_a_simulation_repeats_costs_once(tmp_path: Path) -> None:
    for _ in range(2):
        books = accounts(tmp_path)
        for number in (1, 2):
            books.charge(number, CLIENTS[:2], CLIENTS)
    assert books.record(2, CLIENTS).epsilon == [epsilon([Release(8.0, 2)], 1e-5)] * 2 + [0.0]
    assert books.record(1, CLIENTS).epsilon == [epsilon([Release(8.0)], 1e-5)] * 2 + [0.0]


def test_a_round_that_real_clients_repeat_costs_again(tmp_path: Path) -> None:
    books = accounts(tmp_path, real=True)
    for _ in range(2):
        books.charge(1, CLIENTS[:1], CLIENTS)
    assert books.record(1, CLIENTS).epsilon == [epsilon([Release(8.0, 2)], 1e-5), 0.0, 0.0]


@pytest.mark.parametrize("real", [False, True])
def test_a_budget_reaches_for_whole_rounds(tmp_path: Path, real: bool) -> None:
    books = accounts(tmp_path, real=real, max_epsilon=epsilon([Release(8.0, 2)], 1e-5))
    for number in (1, 2):
        assert books.affords(CLIENTS[0], number)
        books.charge(number, CLIENTS[:1], CLIENTS)
    assert not books.affords(CLIENTS[0], 3)
    assert books.affords(CLIENTS[1], 3)
    assert books.record(2, CLIENTS).stopped == [0]


@pytest.mark.parametrize(("real", "noise", "paid"), [(True, "local", 2), (True, "central", 1), (False, "local", 1)])
def test_a_further_attempt_is_paid_before_it_begins(tmp_path: Path, real: bool, noise: str, paid: int) -> None:
    books = accounts(tmp_path, real=real, trust_model=noise)
    books.charge(1, CLIENTS[:2], CLIENTS)
    assert books.again(1, CLIENTS[:1]) == CLIENTS[:1]
    assert [sum(each.times for each in books.ledger.releases(client.name).values()) for client in CLIENTS] == [
        paid,
        1,
        0,
    ]


def test_who_cannot_afford_a_further_attempt_is_not_asked(tmp_path: Path) -> None:
    books = accounts(tmp_path, real=True, trust_model="local", max_epsilon=epsilon([Release(4.0, 2)], 1e-5))
    books.charge(1, CLIENTS, CLIENTS)
    books.charge(1, CLIENTS[:1], CLIENTS)
    assert books.again(1, CLIENTS) == CLIENTS[1:]
    assert books.record(1, CLIENTS).stopped == [0, 1, 2]


def test_where_nobody_knows_who_took_part_all_pay(tmp_path: Path) -> None:
    books = accounts(tmp_path, sampling="secret")
    books.charge(1, CLIENTS[:1], CLIENTS)
    assert books.record(1, CLIENTS).epsilon == [epsilon([Release(4.0, drawn=1, drawn_from=3)], 1e-5)] * 3
