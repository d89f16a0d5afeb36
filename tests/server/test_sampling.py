from collections import Counter

import pytest

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config.federation import FederationSettings
from fedguild.core.errors import QuorumError
from fedguild.server.sampling import fastest, quorum_count, require_quorum, sample


def clients(count: int) -> list[ClientInfo]:
    return [ClientInfo(index, Budget("b", 8, 20), 10) for index in range(count)]


def indices(drawn) -> list[int]:
    return [client.index for client in drawn]


def test_everybody_takes_part_at_one():
    assert indices(sample(1, clients(7), 1.0, seed=0)) == list(range(7))


@pytest.mark.parametrize(
    ("total", "participation", "expected"),
    [(4, 0.25, 1), (40, 0.25, 10), (5, 0.5, 3), (5, 0.49, 2), (10, 0.01, 1), (3, 0.1, 1)],
)
def test_the_number_is_rounded_half_up_and_never_below_one(total, participation, expected):
    drawn = indices(sample(1, clients(total), participation, seed=3))
    assert len(drawn) == len(set(drawn)) == expected
    assert drawn == sorted(drawn)


def test_no_fewer_are_drawn_than_are_needed():
    assert len(sample(1, clients(8), 0.25, seed=3, least=4)) == 4
    assert len(sample(1, clients(8), 0.75, seed=3, least=4)) == 6
    assert len(sample(1, clients(3), 0.25, seed=3, over_selection=0.5, least=4)) == 3


def test_the_draw_repeats_whatever_the_order_and_differs_by_round_and_seed():
    drawn = indices(sample(3, clients(40), 0.25, seed=5))
    assert indices(sample(3, clients(40)[::-1], 0.25, seed=5)) == drawn
    assert indices(sample(4, clients(40), 0.25, seed=5)) != drawn
    assert indices(sample(3, clients(40), 0.25, seed=6)) != drawn


def test_every_client_is_drawn_about_equally_often():
    counts = Counter(index for round in range(800) for index in indices(sample(round, clients(8), 0.25, seed=1)))
    assert sorted(counts) == list(range(8))
    assert max(abs(count - 200) for count in counts.values()) < 50


@pytest.mark.parametrize(
    ("asked", "quorum", "expected"),
    [(10, 0.5, 5), (9, 0.5, 5), (100, 0.07, 7), (10, 1.0, 10), (10, 1e-12, 1)],
)
def test_a_quorum_is_a_share_rounded_up_and_at_least_one(asked, quorum, expected):
    assert quorum_count(asked, quorum) == expected


def test_too_few_valid_uploads_raise_with_counts_and_reasons():
    with pytest.raises(QuorumError) as caught:
        require_quorum(1, 4, 2, {"client-003": "no reply", "client-001": "NaN in 'adapter/x'"})
    assert caught.value.message == (
        "1 of 4 clients delivered a valid upload, but the quorum is 2."
        "\n  client-001: NaN in 'adapter/x'\n  client-003: no reply"
    )


@pytest.mark.parametrize(
    ("participation", "over_selection", "asked"),
    [(0.5, 0.0, 5), (0.5, 0.2, 6), (0.5, 0.3, 7), (0.2, 0.5, 3), (0.5, 3.0, 10), (1.0, 0.5, 10), (0.01, 0.3, 2)],
)
def test_over_selection_asks_more_rounded_up_and_at_most_all(participation, over_selection, asked):
    assert len(sample(1, clients(10), participation, 0, over_selection=over_selection)) == asked
    wanted = FederationSettings(clients=10, client_fraction=participation).wanted_uploads
    assert wanted == len(sample(1, clients(10), participation, 0))


def test_the_fastest_are_drawn_by_round_and_not_by_order():
    members = clients(20)
    drawn = [fastest(members, 5, 0, round) for round in range(40)]
    assert all(len(chosen) == 5 for chosen in drawn)
    assert drawn[3] == fastest(members[::-1], 5, 0, 3)
    assert len(set(drawn)) > 30
    counts = [sum(client.index in chosen for chosen in drawn) for client in members]
    assert min(counts) >= 2, "over-selection favours nobody"
