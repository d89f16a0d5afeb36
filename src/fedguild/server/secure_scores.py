"""Secure sums of the scores of the clients' own models: the server sees their mean and deviation, and no client's."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fedguild.core.errors import QuorumError
from fedguild.core.payload import Payload
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from fedguild.privacy.secure_sum.graph import FEWEST_CLIENTS
from fedguild.privacy.secure_sum.session import Session
from fedguild.server.secure_round import Peers, SecureAggregation, through_steps

SCORE, SQUARE, ONE, SCORED = "scores/score", "scores/square", "scores/one", "scores/clients"
MEASURED, MEASURES = "scores/measured", 3
FORM = Form(
    {
        **{name: LinearMean((), SCORED, range="scores") for name in (SCORE, SQUARE, ONE)},
        MEASURED: LinearMean((MEASURES,), SCORED, range="scores"),
    },
    {SCORED: 1},
)
"""The means of the score, from 0 to 1, of its square, and of 1 for each metric that it is of, over the clients that
have held-out examples. A metric is known by its place among the `MEASURES` that a run can have; it is 0 for the others.

The sum of the largest magnitudes is opened whatever the counts; as one of each client's numbers is 1, it tells nothing.
"""


@dataclass(frozen=True)
class SummedScores:
    """The score of the clients' own models.

    Attributes:
        mean: Its mean over them.
        deviation: The sample standard deviation over them; None for fewer than two.
        measures: The places of the metrics that some client's score is of.
    """

    mean: float
    deviation: float | None
    measures: tuple[int, ...] = ()


def scores_terms(score: float, examples: int, measures: Sequence[int]) -> Contribution:
    """Returns a client's numbers in `FORM`; a score of no example has no weight."""
    own = score if examples else 0.0
    values = {SCORE: np.array(own), SQUARE: np.array(own**2), ONE: np.array(1.0)}
    values[MEASURED] = np.array([float(place in measures) for place in range(MEASURES)])
    return Contribution(values, {SCORED: np.array([float(examples > 0)])})


def summed_scores(
    rules: SecureAggregation,
    round_index: int,
    peers: Peers,
    clients: Sequence[int],
    note: Callable[[Mapping[str, Any]], None],
) -> SummedScores:
    """Returns the clients' scores from a session of secure aggregation.

    Args:
        rules: The run's secure aggregation.
        clients: Those that have scored their model and keep the score.
        note: Called with the facts of the session once it has ended, well or not.

    Raises:
        QuorumError: too few clients are left, or fewer than `rules.fewest` have a score; only counts were opened.
    """
    from fedguild.privacy.secure_sum.server import ServerSession

    nonce = secrets.token_hex(16)
    session = Session(rules.run, round_index, nonce, FORM.digest(), rules.share, rules.fewest, rules.unheld)
    server = ServerSession(session, FORM, clients, peers.registered)
    try:
        if len(clients) < FEWEST_CLIENTS:
            raise QuorumError(f"{len(clients)} client(s) have scored, and at least {FEWEST_CLIENTS} have to be summed.")
        through_steps(server, peers, _in_the_clear)
        means = server.means()
    finally:
        note(server.facts())
    scored = round(float(means.weights[SCORED][0]))
    if not means.known[SCORE].all():
        raise QuorumError(f"{scored} client(s) have a score, and at least {rules.fewest} have to be behind a mean.")
    found = _bounded(float(means.values[SCORE]), float(means.values[SQUARE]), scored, means.bounds[SQUARE])
    some = np.rint(means.values[MEASURED] * scored) > 0
    return replace(found, measures=tuple(int(place) for place in np.flatnonzero(some)))


def _bounded(mean: float, square: float, scored: int, error: float) -> SummedScores:
    """Returns the scores, after a check that they can be; fixed point leaves `error` of a deviation of 0."""
    variance = square - mean**2
    if not (-1e-6 <= mean <= 1 + 1e-6 and -4 * error - 1e-6 <= variance <= 0.25 + 1e-6):
        raise QuorumError("The sums of the scores are not those of scores from 0 to 1: a client counts falsely.")
    spread = 0.0 if variance <= 4 * error else variance
    deviation = math.sqrt(spread * scored / (scored - 1)) if scored > 1 else None
    return SummedScores(min(1.0, max(0.0, mean)), deviation)


def _in_the_clear(sent: Mapping[int, Payload]) -> dict[int, str]:
    """Returns client -> what is wrong with what it disclosed: nothing is to be."""
    return {client: "it sent in the clear what is summed" for client, one in sent.items() if one.tensors}
