"""Poisson sampling of a client's steps, and keys that no two trainings share."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import numpy as np
from scipy import stats

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config.privacy import PrivacySettings
from fedguild.config.training import TrainingSettings
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.ledger import Ledger
from fedguild.privacy.dp.noise import Noise
from fedguild.runs.guarantee import Privacy
from fedguild.runs.privacy_accounts import PrivacyAccounts

STEPS, EXAMPLES, PROBABILITY = 400, 60, 0.3
DP = DpSgd(1.0, 1.0, PROBABILITY, STEPS, 1.0, Noise(b"key"))


def test_every_example_enters_every_step_independently() -> None:
    """Its number of steps, and every step's number of examples, are binomial; neighbouring steps are uncorrelated."""
    drawn = np.zeros((STEPS, EXAMPLES))
    for step in range(STEPS):
        drawn[step, DP.batch(step, EXAMPLES)] = 1
    for axis, count in ((0, STEPS), (1, EXAMPLES)):
        totals = drawn.sum(axis)
        low, high = stats.binom.ppf([1e-6, 1 - 1e-6], count, PROBABILITY)
        assert low <= totals.min() < totals.max() <= high
        expected = count * PROBABILITY * (1 - PROBABILITY)
        assert 0.5 * expected < totals.var() < 2 * expected
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.04


def test_no_two_trainings_of_a_run_share_a_key(tmp_path: Path) -> None:
    settings = PrivacySettings(unit="client", noise_multiplier=1.0)
    rules = PrivacyRules(settings, TrainingSettings(steps=1), 3, 3, 3)
    accounts = PrivacyAccounts(rules, Ledger(tmp_path / "privacy.jsonl"), lambda client: 10)
    privacy = Privacy(rules, accounts, Noise(b"key"), lambda client: 10, is_simulation=True)
    clients = [ClientInfo(index, Budget("all", 0, 2), 10) for index in range(4)]
    keys = {privacy.of_round(client, number).key for client, number in product(clients, range(1, 5))}
    masks = {DP.mask_seed(step, example) for step, example in product(range(4), range(4))}
    assert (len(keys), len(masks)) == (16, 16)
