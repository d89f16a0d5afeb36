"""False counts and ranges in a secure aggregation, and clients in league with the server at the threshold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from fedguild.core.errors import QuorumError
from fedguild.privacy.secure_sum import client, fixed_point
from fedguild.privacy.secure_sum.client import ClientSession, part_levels
from fedguild.privacy.secure_sum.fixed_point import COUNT_BIT
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from fedguild.privacy.secure_sum.server import ServerSession
from fedguild.privacy.secure_sum.sizes import SEED_BYTES, TAG_BYTES
from tests.privacy.secure_sum import federation
from tests.privacy.secure_sum.federation import EQUAL, Federation, contributions, session_of

REFUSED = "the server states other numbers of clients with a weight"
VICTIM, EXPERT = 4, 1


class Lying(ServerSession):
    """Says that three more clients have a weight wherever fewer than three do, and opens what is sent then."""

    def _weights_opened(self, answers: Mapping[int, Any]) -> None:
        super()._weights_opened(answers)
        few = (self._sums.counts > 0) & (self._sums.counts < self.session.fewest)
        high = self._words[2 * self.form.weight_count : 3 * self.form.weight_count]
        high += few.astype(np.uint64) * np.uint64(3) << np.uint64(COUNT_BIT)
        self._sums = fixed_point.weight_sums(self.form, self._words)
        held = np.full(self.form.group_count, len(self.weighers))
        self._weight_levels, self._value_levels = part_levels(
            self.form, self._sums.counts, held, self.session.fewest, self._survived
        )


def numbers_of(clients: int) -> dict[int, Contribution]:
    """Returns the numbers of clients, one of which alone has a weight for one of the experts."""
    numbers = contributions(clients)
    for index, own in numbers.items():
        own.weights["experts"][EXPERT] *= index == VICTIM
    return numbers


def lied_to(monkeypatch: pytest.MonkeyPatch, numbers: Mapping[int, Contribution], form: Form = EQUAL) -> Federation:
    monkeypatch.setattr(federation, "ServerSession", Lying)
    return Federation(numbers, form)


def seen(attacked: Federation) -> np.ndarray:
    """Returns what the server makes of the expert's values after the last step."""
    server = attacked.server
    scale = fixed_point.scales(server._sums, len(server.weighers))[EQUAL.names.index("experts")]
    return server._values[EQUAL.slices["experts"]].view(np.int32).reshape(4, 5)[EXPERT] / scale


def test_what_one_client_has_a_weight_for_is_open_to_a_server_that_lies_about_counts(monkeypatch):
    """The attack, on clients that believe what they are told, as those of 0.3 did: the victim's values to 1e-7."""
    monkeypatch.setattr(ClientSession, "_require_true_counts", lambda self, counts: None, raising=False)
    numbers = numbers_of(7)
    attacked = lied_to(monkeypatch, numbers)
    attacked.run()
    np.testing.assert_allclose(seen(attacked), numbers[VICTIM].values["experts"][EXPERT], atol=1e-7)


@pytest.mark.parametrize("gone", [(), (2,)])
def test_clients_refuse_counts_that_are_not_their_own(gone, monkeypatch):
    """Also after a dropout: clients count over those whose weights were opened, the list that they were told."""
    attacked = lied_to(monkeypatch, numbers_of(7))
    attacked.silent = dict.fromkeys(gone, "weigh")
    with pytest.raises(QuorumError, match=REFUSED):
        attacked.run()
    assert not [sent for sent in attacked.sent if sent[1] == "send"], "nobody has sent a value"


def test_what_clients_say_of_their_weights_cannot_be_changed_on_its_way():
    """A bit that the server turns is an envelope that its reader cannot open; the two leave, and the round goes on."""
    attacked = Federation(numbers_of(7))

    def turned(sender, step, answer):
        if (sender, step) == (VICTIM, "share"):
            answer["envelopes"][0, -TAG_BYTES - 1] ^= 1
        return answer

    attacked.said = turned
    attacked.run()
    assert attacked.server.dropped.keys() == {0, VICTIM}
    levels, bits = len(attacked.server._survived), EQUAL.weight_count
    assert attacked.sent[VICTIM, "share"]["envelopes"].shape[1] == (3 + levels) * SEED_BYTES + -(-bits // 8) + TAG_BYTES


def test_a_client_that_tells_its_peers_something_else_ends_the_round_before_values(monkeypatch):
    """Nobody can say who lied: it, or the server."""
    numbers, told = numbers_of(7), fixed_point.weighed
    monkeypatch.setattr(client.fixed_point, "weighed", lambda form, own: told(form, own) | (own is numbers[2]))
    with pytest.raises(QuorumError, match=REFUSED):
        Federation(numbers).run()


def test_unequal_weights_need_everybody_and_one_weight_the_neighbours(monkeypatch):
    """Along a sparse graph a weight that all clients have is checked with the neighbours; experts' weights are not."""
    monkeypatch.setattr("fedguild.privacy.secure_sum.session.degree_of", lambda clients: 6)
    one = Form({"x": LinearMean((40,), "w")}, {"w": 1})
    for form, near in ((one, 6), (EQUAL, 11)):
        honest = Federation(contributions(12, form), form)
        honest.run()
        assert {len(peers) for peers in honest.server._graph.values()} == {near}
    numbers = contributions(12, one)
    for index in range(2, 12):
        numbers[index].weights["w"][:] = 0
    with pytest.raises(QuorumError, match=REFUSED):
        lied_to(monkeypatch, numbers, one).run()


class Stretching(ServerSession):
    """Says that all ranges are a thousandth of what they are, so that the words of the values wrap around."""

    def _weights_opened(self, answers: Mapping[int, Any]) -> None:
        super()._weights_opened(answers)
        ranges = self._words[3 * self.form.weight_count :]
        ranges //= np.uint64(1000)
        self._sums = fixed_point.weight_sums(self.form, self._words)


def test_ranges_below_a_clients_own_get_no_values(monkeypatch):
    monkeypatch.setattr(federation, "ServerSession", Stretching)
    with pytest.raises(QuorumError, match="the server states a smaller range of the values than this client's own"):
        Federation(contributions(7)).run()


@pytest.mark.parametrize(("fewest", "is_open"), [(3, True), (4, False)])
def test_a_client_hides_among_the_fewest_less_those_in_league_with_the_server(fewest, is_open):
    """Two that send zeros for the victim's expert: with secure_clients 3 it stands alone, with 4 nothing is sent."""
    numbers, league = contributions(7), (5, 6)
    for index, own in numbers.items():
        own.weights["experts"][EXPERT] *= index == VICTIM or index in league
        own.values["experts"][EXPERT] *= index not in league
    attacked = Federation(numbers, session=session_of(EQUAL, fewest=fewest))
    means = attacked.run()
    assert means.known["experts"][EXPERT].all() == means.known["experts"][EXPERT].any() == is_open
    if is_open:
        total = means.weights["experts"][EXPERT]
        own = total - sum(numbers[index].weights["experts"][EXPERT] for index in league)
        found = means.values["experts"][EXPERT] * total / own
        np.testing.assert_allclose(found, numbers[VICTIM].values["experts"][EXPERT], atol=1e-5)
