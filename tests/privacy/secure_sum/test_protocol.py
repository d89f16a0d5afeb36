"""The protocol: exact sums with and without dropouts, uniform masks, and nothing opened below the threshold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedguild.core.errors import FedGuildError, QuorumError, UploadError
from fedguild.federation.site_policy import SitePolicy
from fedguild.federation.sum_log import SumLog
from fedguild.privacy.secure_sum import fixed_point
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from fedguild.privacy.secure_sum.graph import degree_of, neighbours, threshold_of
from fedguild.privacy.secure_sum.keys import load_peers, load_private, load_public, new_identity, sign, verify
from fedguild.privacy.secure_sum.levels import MOST_LEVELS, capacities, chain, levels_of, lowest_open
from fedguild.privacy.secure_sum.masks import add_mask
from fedguild.privacy.secure_sum.server import ServerSession, disputed
from fedguild.privacy.secure_sum.session import STEPS, Roster
from fedguild.privacy.secure_sum.shares import recover, seal, split, unseal
from fedguild.privacy.secure_sum.sizes import SIGNATURE_BYTES
from tests.oracles.secure import fixed_point_sums, weighted_means
from tests.privacy.secure_sum.federation import EQUAL, FORM, Federation, contributions, session_of


def many_zeros(clients: int, **options) -> Federation:
    """Clients that upload 100,000 zeros, so that what is not uniform shows no mask."""
    form = Form({"x": LinearMean((100_000,), "w")}, {"w": 1})
    zeros = {client: Contribution({"x": np.zeros(100_000)}, {"w": np.ones(1)}) for client in range(clients)}
    return Federation(zeros, form, **options)


def looks_uniform(words: np.ndarray) -> bool:
    return bool(stats.chisquare(np.bincount(words >> np.uint32(24), minlength=256)).pvalue > 1e-6)


@pytest.mark.parametrize("step", ["share", "check", "weigh", "open_weights", "send", "agree", "open"])
@pytest.mark.parametrize("dropouts", [0, 1, 2])
def test_the_unmasked_sums_are_those_of_fixed_point_bit_for_bit(step, dropouts):
    """Of 7 clients 5 have to be left, so that 2 may be missing, whenever they stop."""
    numbers = contributions(7)
    silent = dict.fromkeys((5, 2)[:dropouts], step)
    federation = Federation(numbers, silent=silent)
    federation.run()
    weighed = [client for client in numbers if client not in silent or STEPS.index(step) > STEPS.index("weigh")]
    left = [client for client in numbers if client not in silent or step in ("agree", "open")]
    expected = fixed_point_sums(EQUAL, {client: numbers[client] for client in weighed}, left, 3)
    server = federation.server
    assert server.contributors == tuple(left)
    assert (server._words.tolist(), server._values.tolist(), server._value_words.tolist()) == tuple(expected)


@pytest.mark.parametrize(
    ("of_weights", "reason"),
    [(True, "a smaller sum of the weights than this client's own weight"), (False, "a smaller range of the values")],
    ids=["weights", "ranges"],
)
def test_nobody_sends_values_for_a_sum_that_is_smaller_than_its_own_part(of_weights, reason):
    """Else its share would stop at 1 where those of others still grow: several sums would tell the clients apart."""
    federation = Federation(contributions(4, FORM), FORM)

    def told(client, step, request):
        if step != "send":
            return request
        words, count = request["sums"].copy(), FORM.weight_count
        if of_weights:
            words[: 2 * count] = 1
            words[2 * count : 3 * count] &= np.uint64(2**64 - 2**fixed_point.COUNT_BIT)  # the counts stay
        else:
            words[3 * count :] = 1
        return {**request, "sums": words}

    federation.told = told
    with pytest.raises(QuorumError, match=reason):
        federation.run()


def test_a_third_dropout_of_seven_is_too_many_and_opens_nothing():
    federation = many_zeros(7, silent={1: "send", 3: "send", 5: "send"})
    with pytest.raises(QuorumError, match="4 of 7 clients are left after 'send', but 5 are needed"):
        federation.run()
    assert not [sent for sent in federation.sent if sent[1] == "open"]
    assert looks_uniform(federation.server._values), "the server has no share of any of the values' masks"


@pytest.mark.parametrize("step", STEPS[:-1])
def test_the_round_fails_at_every_step_below_the_threshold(step):
    federation = Federation(contributions(5), silent=dict.fromkeys((0, 1, 2), step))
    with pytest.raises(QuorumError):
        federation.run()
    opened = {sent[1] for sent in federation.sent} & {"open_weights", "open"}
    assert opened == ({"open_weights"} if step in ("open_weights", "send", "agree") else set())


def test_too_few_shares_leave_the_masks_where_they_are():
    federation = many_zeros(5, silent=dict.fromkeys((0, 1), "open"))
    with pytest.raises(QuorumError, match="share"):
        federation.run()
    assert looks_uniform(federation.server._values)


@pytest.mark.parametrize("clients", [16, *(pytest.param(count, marks=pytest.mark.long) for count in (33, 40, 64, 100))])
def test_many_clients_of_whom_as_many_drop_out_as_may_and_as_many_collude_as_may(clients):
    """The sum is exact; a league one below the threshold learns the others' sum, and no secret of one of them."""
    form = Form({"x": LinearMean((40,), "w")}, {"w": 1})
    numbers, threshold = contributions(clients, form), threshold_of(clients, 2 / 3)
    rng = np.random.default_rng(clients)
    gone = rng.permutation(clients)[: clients - threshold].tolist()
    silent = {client: STEPS[3 + place % 5] for place, client in enumerate(gone)}
    federation = Federation(numbers, form, silent)
    federation.run()
    weighed = {client: own for client, own in numbers.items() if silent.get(client) != "weigh"}
    left = [client for client in weighed if silent.get(client) not in ("weigh", "open_weights", "send")]
    words, values, shares = fixed_point_sums(form, weighed, left, 3)
    server = federation.server
    assert (server._words.tolist(), server._values.tolist(), server._value_words.tolist()) == (words, values, shares)
    victim, *league = [client for client in numbers if client not in silent]
    holders, secrets = federation.clients[victim]._holders, federation.clients[victim]._seeds
    assert len(holders) == clients, "nobody chooses whom a client shares its secrets with"
    assert len(league) == threshold - 1
    for place, secret in enumerate((secrets[0], *secrets[2:])):
        known = {peer: federation.clients[peer]._held_shares[victim][place] for peer in league}
        with pytest.raises(UploadError, match=f"{threshold - 1} share"):
            recover(known, holders, threshold)
        assert recover(known, holders, threshold - 1) != secret
        one_more = {**known, victim: federation.clients[victim]._held_shares[victim][place]}
        assert recover(one_more, holders, threshold) == secret


def test_along_a_sparse_graph_the_sum_is_as_exact(monkeypatch):
    """Each of 12 clients masks with 6 others; of a client and its neighbours 5 of 7 have to be left."""
    monkeypatch.setattr("fedguild.privacy.secure_sum.session.degree_of", lambda clients: 6)
    form = Form({"x": LinearMean((40,), "w")}, {"w": 1})
    numbers = contributions(12, form)
    silent = {3: "weigh", 9: "send"}
    federation = Federation(numbers, form, silent)
    federation.run()
    assert {len(peers) for peers in federation.server._graph.values()} == {6}
    weighed = {client: own for client, own in numbers.items() if client != 3}
    words, values, shares = fixed_point_sums(form, weighed, [c for c in weighed if c not in silent], 3)
    assert federation.server._words.tolist() == words
    assert federation.server._values.tolist() == values
    assert federation.server._value_words.tolist() == shares


def test_with_unequal_holdings_everybody_masks_with_everybody(monkeypatch):
    monkeypatch.setattr("fedguild.privacy.secure_sum.session.degree_of", lambda clients: 4)
    federation = Federation(unequal(7), FORM)
    federation.run()
    assert {len(peers) for peers in federation.server._graph.values()} == {6}


@pytest.mark.parametrize("unheld", ["omit", "zeros"])
def test_unequal_holdings_sum_over_their_holders(unheld):
    numbers = unequal(7)
    federation = Federation(numbers, FORM, {6: "send"}, session_of(FORM, unheld=unheld))
    means = federation.run()
    sent = {client: federation.sent[(client, "send")]["values"].size for client in range(6)}
    small = FORM.value_count - 6  # column 3 has two holders, too few: nobody sends it
    assert sent == (
        {c: small - (0 if c < 4 else 6) for c in range(6)} if unheld == "omit" else dict.fromkeys(range(6), small)
    )
    assert not means.known["rows"][:, 3].any()
    assert means.known["rows"][:, :3].all()
    # Column 2 is held by the clients 0 to 3 (client 6 dropped out): its weights are everybody's, the others give zeros.
    weights = np.array([float(numbers[c].weights["examples"][0]) for c in range(6)])
    held = np.array([numbers[c].held["rows"][2] for c in range(6)])
    values = np.stack([numbers[c].values["rows"][:, 2] for c in range(6)])
    expected = (weights[:, None] * values * held[:, None]).sum(0) / weights.sum()
    assert np.abs(means.values["rows"][:, 2] - expected).max() <= means.bounds["rows"]


@pytest.mark.parametrize(("gone", "open_columns"), [((), 3), ((1,), 2), ((4, 5), 2)])
def test_a_group_that_dropouts_may_leave_with_too_few_stays_closed_alone(gone, open_columns):
    """Three clients hold column 2: any dropout may be one of them, so that its masks stay; the round goes on."""
    numbers = unequal(7)
    for client in (3, 6):
        numbers[client].held["rows"][2] = False
        numbers[client].values["rows"][:, 2] = 0
    federation = Federation(numbers, FORM, dict.fromkeys(gone, "send"), session_of(FORM, fewest=3))
    means = federation.run()
    known = means.known["rows"]
    assert known[:, :open_columns].all()
    assert not known[:, open_columns:].any()
    column = federation.server._values[FORM.slices["rows"]].reshape(6, 4)[:, 2].view(np.int32)
    sums = fixed_point_sums(FORM, numbers, [client for client in numbers if client not in gone], 3)
    expected = np.array(sums[1], np.uint32)[FORM.slices["rows"]].reshape(6, 4)[:, 2].view(np.int32)
    assert np.array_equal(column, expected) == (open_columns == 3)


@pytest.mark.parametrize("gone", [(), (4,), (0,), (4, 5)])
def test_a_weight_that_dropouts_may_leave_with_too_few_stays_closed_alone(gone):
    """Clients 0, 1 and 2 have a weight for expert 1, and 0 to 3 for expert 2; all have the others."""
    numbers = contributions(7)
    for client in range(3, 7):
        numbers[client].weights["experts"][1] = 0
        numbers[client].weights["experts"][2] *= client == 3
    federation = Federation(numbers, silent=dict.fromkeys(gone, "send"))
    means = federation.run()
    left = [client for client in numbers if client not in gone]
    assert federation.server.contributors == tuple(left)
    opened = [True, not gone, len(gone) < 2, True]
    assert means.known["experts"].all(axis=1).tolist() == opened == means.known["experts"].any(axis=1).tolist()
    assert means.known["dense"].all()
    exact = weighted_means(EQUAL, numbers, left)
    for name in ("dense", "experts"):
        assert np.abs(means.values[name] - exact[name])[means.known[name]].max() <= means.bounds[name]
    words, values, shares = fixed_point_sums(EQUAL, numbers, left, 3)
    experts, places = EQUAL.places["experts"], EQUAL.slices["experts"]
    bare = federation.server._value_words[experts] == np.array(shares, np.uint64)[experts]
    assert bare.tolist() == opened
    same = federation.server._values[places] == np.array(values, np.uint32)[places]
    assert (same.reshape(4, 5).mean(axis=1) > 0.5).tolist() == opened
    assert federation.server._words.tolist() == words


def test_levels_survive_what_they_say():
    for dropouts in range(40):
        survived = capacities(dropouts)
        assert survived[0] == 0
        assert survived[-1] == dropouts
        assert len(survived) <= MOST_LEVELS
        levels = levels_of(np.arange(60), 3, survived)
        for dropped in range(dropouts + 1):
            opened = np.arange(60)[levels >= lowest_open(dropped, survived)]
            assert dropped == 0 or opened.min() - dropped >= 3
            assert 59 in opened
    assert chain(bytes(16), 5)[1:] == chain(bytes(16), 4)
    assert len(set(chain(bytes(16), MOST_LEVELS))) == MOST_LEVELS


def test_a_holder_that_lies_is_named_and_the_round_goes_on():
    """Of 7 clients 5 shares give a secret, so that the false one of client 1 is found by leaving it out."""
    numbers = contributions(7)
    federation = Federation(numbers, silent={3: "send"})
    federation.said = changed(1, "open", lambda said: {"shares": said["shares"] ^ 1})
    means = federation.run()
    assert set(federation.server.faults) == {1}
    exact = weighted_means(EQUAL, numbers, [0, 1, 2, 4, 5, 6])
    assert np.abs(means.values["dense"] - exact["dense"]).max() <= means.bounds["dense"]


def test_a_masked_upload_of_zeros_is_uniform():
    """Chi-square over the 256 values of every byte, of one client's upload of 200,000 zeros."""
    form = Form({"x": LinearMean((200_000,), "w")}, {"w": 1})
    zeros = {client: Contribution({"x": np.zeros(200_000)}, {"w": np.ones(1)}) for client in range(3)}
    federation = Federation(zeros, form)
    federation.run()
    values = federation.sent[(1, "send")]["values"]
    for place in range(4):
        observed = np.bincount((values >> np.uint32(8 * place)) & np.uint32(255), minlength=256)
        assert stats.chisquare(observed).pvalue > 1e-6
    assert np.abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.02
    assert not federation.server._values.any()


def test_the_sum_of_two_clients_masks_tells_nothing_of_the_third():
    """Whatever two of three clients uploaded, the server's sum of the two is uniform until the masks are opened."""
    federation = many_zeros(3)
    federation.run()
    assert looks_uniform(federation.sent[(0, "send")]["values"] + federation.sent[(1, "send")]["values"])


def test_two_sessions_with_the_same_numbers_have_nothing_in_common():
    numbers = contributions(3)
    one, other = Federation(numbers), Federation(numbers)
    one.run()
    other.run()
    same = one.sent[(0, "send")]["values"] == other.sent[(0, "send")]["values"]
    assert same.mean() < 0.2


class TestTheServerInTheMiddle:
    def test_another_key_is_not_accepted(self):
        federation = Federation(contributions(4))
        requests = federation.server.requests("join")
        answers = {client: federation.clients[client].answer("join", requests[client]) for client in range(4)}
        foreign = Federation(contributions(4), session=federation.session)
        answers[2] = foreign.clients[2].answer("join", {})
        federation.server.receive("join", answers, {})
        requests = federation.server.requests("share")
        for client in (0, 1, 3):
            with pytest.raises(UploadError, match="the key of client 2 is not signed by the key that is registered"):
                federation.clients[client].answer("share", requests[client])

    def test_another_list_of_own_keys_is_not_accepted(self):
        federation = until(4, "join")
        request = dict(federation.server.requests("share")[0])
        request["keys"] = request["keys"].copy()
        request["keys"][0, 0] ^= 1
        with pytest.raises(UploadError, match="not the one that this client joined"):
            federation.clients[0].answer("share", request)

    def test_no_step_is_answered_twice_nor_out_of_turn(self):
        federation = until(4, "join")
        request = federation.server.requests("share")[0]
        federation.clients[0].answer("share", request)
        with pytest.raises(UploadError, match="'share' is not what comes next"):
            federation.clients[0].answer("share", request)
        with pytest.raises(UploadError, match="'weigh' is not what comes next"):
            federation.clients[0].answer("weigh", {})

    def test_clients_that_were_told_different_sums_open_nothing(self):
        """A server that gives one client another sum of the weights could read its numbers from the high bits."""
        federation = Federation(contributions(4))
        federation.told = changed(1, "send", lambda told: {"sums": told["sums"] + np.uint64(7)})
        with pytest.raises(QuorumError, match="what client 1 was told about the weights is not signed"):
            federation.run()

    @pytest.mark.parametrize("step", ["join", "send", "agree"])
    def test_a_server_that_knows_the_keys_leaves_out_who_signs_wrongly(self, step):
        """Without them one client ends the round for all, since its neighbours refuse to go on."""
        numbers = contributions(4)
        ended = {}
        for knows in (True, False):
            federation = Federation(numbers, knows_keys=knows)
            federation.said = changed(2, step, lambda said: {"signature": said["signature"][::-1].copy()})
            if knows:
                federation.run()
                ended = federation.server.dropped
                weighed = {client: own for client, own in numbers.items() if client != 2 or step != "join"}
                left = [client for client in weighed if client != 2 or step == "agree"]
                expected = fixed_point_sums(EQUAL, weighed, left, 3)
                assert federation.server._values.tolist() == expected[1]
            else:
                with pytest.raises(QuorumError, match="client 2"):
                    federation.run()
        assert ended.keys() == {2}
        assert "is not signed by the key that is registered for it" in ended[2]

    @pytest.mark.parametrize("degree", [9, 6])
    def test_clients_that_were_told_different_survivors_open_nothing(self, degree, monkeypatch):
        """Half of ten clients are told that client 0 is gone, the others that client 1 is: no list has 7 signatures."""
        monkeypatch.setattr("fedguild.privacy.secure_sum.session.degree_of", lambda clients: degree)
        federation = Federation(contributions(10))
        told = {}

        def without(rows, client, gone):
            return rows[np.array([one != gone for one in client])]

        def tell(client, step, request):
            if step in ("agree", "open"):
                gone = 0 if client % 2 else 1
                changed = {name: without(rows, request["clients"], gone) for name, rows in request.items()}
                if step == "open":
                    changed["signatures"] = without(request["signatures"], request["agreed"], gone)
                    changed["agreed"] = without(request["agreed"], request["agreed"], gone)
                told[client, step] = request = changed
            return request

        federation.told = tell
        with pytest.raises(QuorumError, match=r"whom client \d was told is left is not signed"):
            federation.run()
        assert (2, "agree") in told
        assert (2, "open") in told
        assert not [sent for sent in federation.sent if sent[1] == "open"]

    def test_a_list_that_too_few_have_signed_opens_nothing(self):
        federation = Federation(contributions(5))
        federation.told = changed(
            None, "open", lambda told: {name: told[name][:3] for name in ("agreed", "signatures")}
        )
        with pytest.raises(QuorumError, match="only 3 of 5 clients agree on who is left"):
            federation.run()

    def test_one_that_says_it_was_told_something_else_is_left_out(self):
        numbers = contributions(5)
        federation = Federation(numbers, trained={2: bytes([1] * 32)})
        federation.run()
        assert federation.server.contributors == (0, 1, 3, 4)
        assert "told to train something else than the others" in federation.server.dropped[2]

    def test_clients_that_were_told_to_train_different_things_do_not_share(self, monkeypatch):
        """Of clients whose training changes nothing and one other the sum would be that one's upload."""
        monkeypatch.setattr(ServerSession, "_leave_out_the_odd_ones", lambda self: None)
        with pytest.raises(QuorumError, match="client 2 was told to train something else than this client"):
            Federation(contributions(5), trained={2: bytes([1] * 32)}).run()

    def test_a_digest_of_the_training_that_the_server_changed_is_not_signed(self):
        federation = until(4, "join")
        request = dict(federation.server.requests("share")[0])
        request["trained"] = request["trained"].copy()
        request["trained"][2] ^= 1
        with pytest.raises(UploadError, match="the key of client 2 is not signed by the key that is registered"):
            federation.clients[0].answer("share", request)

    def test_one_training_opens_no_second_sum_over_other_clients(self, tmp_path):
        logs = {client: SumLog(tmp_path / f"{client}.jsonl", 3) for client in range(7)}
        numbers = contributions(7)
        for _ in range(2):  # as after a server's crash, with the same clients
            assert Federation(numbers, silent={3: "send"}, logs=logs).run().known["dense"].all()
        with pytest.raises(QuorumError, match="the values of the same training were summed over other clients"):
            Federation(numbers, logs=logs).run()
        with pytest.raises(QuorumError, match="the weights of the same training were summed over other clients"):
            Federation(numbers, silent={3: "weigh"}, logs=logs).run()
        (tmp_path / "0.jsonl").write_text("[]\n")
        with pytest.raises(FedGuildError, match=r"0\.jsonl cannot be read"):
            SumLog(tmp_path / "0.jsonl", 3)

    def test_a_site_has_limits_of_its_own(self):
        policy = SitePolicy(secure_clients=4, secure_share=0.7)
        assert "below accept.secure_clients of 4" in policy.session_refusal(3, 0.8)
        assert "below accept.secure_share of 0.7" in policy.session_refusal(4, 2 / 3)
        assert not policy.session_refusal(4, 0.7)

    def test_a_client_that_is_said_to_be_gone_answers_no_more(self):
        federation = until(5, "weigh")
        with pytest.raises(UploadError, match="not one of those before"):
            federation.clients[4].answer("open_weights", {"clients": np.array([0, 1, 2, 3], np.int32)})

    def test_no_client_opens_a_sum_over_too_few(self):
        federation = until(5, "weigh")
        with pytest.raises(UploadError, match="only 3 of 5 clients are left, but the sum of at least 4 may be opened"):
            federation.clients[0].answer("open_weights", {"clients": np.array([0, 1, 2], np.int32)})

    def test_no_client_hides_among_fewer_than_it_wants(self):
        with pytest.raises(QuorumError, match="5 clients are not enough to hide among: at least 6 are"):
            Federation(contributions(5), least=6).run()
        with pytest.raises(QuorumError, match="only 5 of 6 clients are left, but the sum of at least 6 may be opened"):
            Federation(contributions(6), silent={0: "weigh"}, least=6).run()

    @pytest.mark.parametrize("wish", [{"share": 0.5}, {"fewest": 2}, {"unheld": "all"}])
    def test_a_session_that_protects_too_little_is_refused(self, wish):
        with pytest.raises(UploadError, match="protects too little"):
            Federation(contributions(4), session=replace(session_of(EQUAL), **wish))

    def test_a_form_that_is_not_the_methods_is_refused(self):
        with pytest.raises(UploadError, match="something else than this client's method"):
            Federation(contributions(4), session=session_of(FORM))


def test_a_client_that_shares_lies_ends_the_round_and_not_the_sum():
    federation = Federation(contributions(4), silent={3: "send"})
    federation.clients[3]._seeds = [bytes(16)] * 4  # it shares other secrets than it masks with
    with pytest.raises(QuorumError, match="the shares of its secret do not fit together"):
        federation.run()


class TestDisputesAboutEnvelopes:
    """Garbage in place of shares, and complaints about envelopes that are in order."""

    def test_whose_envelopes_nobody_can_open_is_left_out_alone(self):
        federation = garbling({2: {0, 1, 3, 4}})
        federation.run()
        assert federation.server.contributors == (0, 1, 3, 4)
        assert "in dispute with 4 other(s) about envelopes" in federation.server.dropped[2]

    def test_who_complains_about_all_is_left_out_alone(self):
        federation = complaining({2: {0, 1, 3, 4}})
        means = federation.run()
        assert federation.server.contributors == (0, 1, 3, 4)
        exact = weighted_means(EQUAL, contributions(5), (0, 1, 3, 4))
        assert np.abs(means.values["dense"] - exact["dense"]).max() <= means.bounds["dense"]

    @pytest.mark.parametrize("liars", [{5: {2}}, {5: {2, 3}}])
    def test_of_few_complaints_one_pair_is_left_out(self, liars):
        """Of 7 clients 2 may be missing: the liar and one honest client, with whoever it begins."""
        federation = complaining(liars, clients=7)
        federation.run()
        assert federation.server.contributors == (0, 1, 3, 4, 6)
        assert federation.server.dropped == dict.fromkeys(
            (2, 5), "client 5 says that it cannot open what client 2 shared: one of the two lies"
        )

    def test_a_pair_too_many_fails_the_round_before_a_site_has_noted_anything(self, tmp_path):
        """Of 4 clients 3 have to be left. Without the liar the same trainings are summed, as nobody has opened any."""
        logs = {client: SumLog(tmp_path / f"{client}.jsonl", 3) for client in range(4)}
        with pytest.raises(QuorumError, match=r"after 'check', but 3 are needed. Nothing was opened.") as caught:
            garbling({2: {0}}, clients=4, logs=logs).run()
        assert "client 2: client 0 says that it cannot open what client 2 shared" in str(caught.value)
        assert not list(tmp_path.iterdir())
        numbers = {client: own for client, own in contributions(4).items() if client != 2}
        assert Federation(numbers, logs=logs).run().known["dense"].all()

    def test_liars_take_no_more_than_as_many_with_them(self):
        """All complaints that a number of liars can make or cause, at random."""
        rng = np.random.default_rng(0)
        for _ in range(300):
            clients, liars = range(12), set(rng.choice(12, rng.integers(1, 5), replace=False).tolist())
            pairs = {(one, other) for one in clients for other in clients if one != other and {one, other} & liars}
            said = {one: {other for a, other in pairs if a == one and rng.random() < 0.3} for one in clients}
            told = disputed(said, clients, tolerated=4)
            assert len(told.keys() - liars) <= len(told.keys() & liars)
            assert not any(one not in told and accused - told.keys() for one, accused in said.items())

    def test_a_complaint_about_a_stranger_is_malformed(self):
        federation = complaining({2: {2}})
        federation.run()
        assert "complains about clients that have sent it nothing" in federation.server.dropped[2]


def test_a_key_that_cannot_be_used_drops_its_owner_alone():
    federation = Federation(contributions(5))
    federation.said = changed(2, "join", lambda said: {"keys": np.zeros(96, np.uint8)})
    federation.run()
    assert federation.server.contributors == (0, 1, 3, 4)


def test_a_malformed_answer_is_one_clients_dropout():
    federation = Federation(contributions(5))
    federation.said = changed(2, "send", lambda said: {"values": said["values"][:3]})
    federation.run()
    assert federation.server.contributors == (0, 1, 3, 4)
    assert "'values' is uint32 [3], but uint32 [41] was expected" in federation.server.dropped[2]


def test_two_clients_are_too_few():
    with pytest.raises(QuorumError, match="at least 3 clients are needed"):
        Federation(contributions(2)).run()


class TestParts:
    def test_masks_cancel_and_need_their_own_place(self):
        words = np.arange(600_000, dtype=np.uint32)
        add_mask(words, b"secret", b"one")
        masked = words.copy()
        where = np.zeros(600_000, np.bool_)
        where[::3] = True
        add_mask(words, b"secret", b"one", subtract=True, where=where)
        assert np.array_equal(words[::3], np.arange(600_000, dtype=np.uint32)[::3])
        assert np.array_equal(words[1::3], masked[1::3])
        add_mask(masked, b"secret", b"two", subtract=True)
        assert not np.array_equal(masked, np.arange(600_000, dtype=np.uint32))

    def test_a_secret_needs_as_many_shares_as_its_threshold(self):
        holders, secret = (3, 5, 8, 9, 20), bytes(range(16))
        shares = split(secret, holders, 3)
        for chosen in ((3, 5, 8), (5, 9, 20), (3, 5, 8, 9, 20)):
            assert recover({holder: shares[holder] for holder in chosen}, holders, 3) == secret
        with pytest.raises(UploadError, match="2 share"):
            recover({holder: shares[holder] for holder in (3, 20)}, holders, 3)

    def test_an_envelope_is_for_one_reader(self):
        sealed = seal(b"k" * 32, b"content")
        assert unseal(b"k" * 32, sealed) == b"content"
        for key, content in ((b"j" * 32, sealed), (b"k" * 32, sealed[:-1] + b"\0")):
            with pytest.raises(UploadError):
                unseal(key, content)

    @pytest.mark.parametrize(("clients", "degree"), [(5, 4), (32, 31), (33, 32), (128, 127), (150, 44), (1000, 60)])
    def test_the_graph_is_symmetric_connected_and_of_one_degree(self, clients, degree):
        graph = neighbours(range(clients), degree_of(clients), b"seed")
        assert {len(peers) for peers in graph.values()} == {degree}
        assert all(client in graph[peer] for client, peers in graph.items() for peer in peers)
        reached, frontier = {0}, {0}
        while frontier:
            frontier = {peer for client in frontier for peer in graph[client]} - reached
            reached |= frontier
        assert len(reached) == clients
        if degree < clients - 1:
            assert graph != neighbours(range(clients), degree, b"another seed")

    def test_the_threshold_is_more_than_its_share_and_than_half(self):
        assert [threshold_of(n, 2 / 3) for n in (3, 4, 5, 6, 7, 9, 64)] == [3, 3, 4, 5, 5, 7, 43]
        assert [threshold_of(n, 0.1) for n in (2, 3, 4, 10)] == [2, 2, 3, 6]
        assert [threshold_of(n, 1.0) for n in (3, 4, 64)] == [3, 4, 64]
        assert all(2 * threshold_of(n, 2 / 3) > n + n // 3 for n in range(3, 300)), "a third of colluding holders"

    def test_a_third_that_colludes_does_not_reconstruct_both_secrets(self):
        """Each honest client opens one of the two, whichever it is told; colluders open both."""
        holders, colluders = tuple(range(6)), {4, 5}
        threshold = threshold_of(len(holders), 2 / 3)
        secrets = [bytes([kind]) * 16 for kind in range(2)]
        shares = [split(secret, holders, threshold) for secret in secrets]
        for told in range(2**4):
            opened = [
                {h: kept[h] for h in holders if h in colluders or bool(told >> h & 1) == bool(kind)}
                for kind, kept in enumerate(shares)
            ]
            assert sum(len(each) >= threshold for each in opened) <= 1

    def test_registered_keys_of_both_kinds_sign(self, tmp_path):
        from fedguild.federation.keys import write_key

        public = write_key(tmp_path / "client-001.key")
        private = load_private(tmp_path / "client-001.key")
        for key, peer in ((private, load_public(public)), (new_identity(), None)):
            signature = sign(key, b"message")
            assert len(signature) == SIGNATURE_BYTES
            verify(peer or key.public_key(), b"message", signature, "it")
            with pytest.raises(UploadError):
                verify(peer or key.public_key(), b"another", signature, "it")
        assert list(load_peers(tmp_path)) == [1]

    def test_a_roster_is_read_as_it_was_sent(self):
        federation = until(3, "join")
        roster = federation.server._roster
        assert Roster.from_arrays(federation.session, roster.to_arrays(), EQUAL.group_count) == roster


def changed(client: int | None, step: str, change):
    """What a client (None: each) says or is told at a step, with the changes."""
    return lambda one, at, content: {**content, **change(content)} if client in (one, None) and at == step else content


def garbling(liars: dict[int, set[int]], clients: int = 5, **options) -> Federation:
    """A federation some of whose clients send garbage to others in place of shares."""
    federation = Federation(contributions(clients), **options)

    def say(client, step, answered):
        if client not in liars or step != "share":
            return answered
        garbled = np.array([peer in liars[client] for peer in answered["clients"]], np.uint8)
        return {**answered, "envelopes": answered["envelopes"] ^ garbled[:, None]}

    federation.said = say
    return federation


def complaining(liars: dict[int, set[int]], clients: int = 5, **options) -> Federation:
    """A federation some of whose clients complain about envelopes that they can open."""
    federation = Federation(contributions(clients), **options)

    def say(client, step, answered):
        lies = client in liars and step == "check"
        return {"complaints": np.array(sorted(liars[client]), np.int32)} if lies else answered

    federation.said = say
    return federation


def until(count: int, last: str) -> Federation:
    federation = Federation(contributions(count))
    for step in STEPS[: STEPS.index(last) + 1]:
        requests = federation.server.requests(step)
        federation.server.receive(step, {c: federation.clients[c].answer(step, r) for c, r in requests.items()}, {})
    return federation


def unequal(count: int) -> dict[int, Contribution]:
    """The clients 0 to 3 and 6 hold column 2 of `rows`, the clients 0 and 6 column 3, all the other two."""
    numbers = contributions(count, FORM)
    for client, own in numbers.items():
        held = np.array([True, True, client < 4 or client == 6, client in (0, 6)])
        own.values["rows"][:, ~held] = 0
        own.held["rows"] = held
    return numbers
