"""Which experts fit a client, and how its peers change them: against loops, by hand, and at the edges."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedguild.server.expert_sets import Room, adjusted_sets, fitted_sets, recommendation, similarities, top_peers
from tests.oracles import fedmoe as oracle


def as_sets(found: list[Tensor]) -> list[set[int]]:
    return [set(own.nonzero().flatten().tolist()) for own in found]


def masks(sets: list[set[int]], sizes: list[int]) -> list[Tensor]:
    return [torch.tensor([e in own for e in range(size)]) for own, size in zip(sets, sizes, strict=True)]


def random_shares(experts: list[int], seed: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return [(torch.randn(size, generator=rng) * 2).softmax(-1) for size in experts]


def test_two_layers_by_hand() -> None:
    """Sums .6, .9, 1 and .5, .8, 1 with sizes 1 and 2: theta .8 takes 2 + 2 · 2 = 6, theta .9 takes 2 + 3 · 2 = 8."""
    p = [torch.tensor([0.1, 0.6, 0.3]), torch.tensor([0.2, 0.3, 0.5])]
    expected = {
        9: (1.0, [{0, 1, 2}, {0, 1, 2}]),
        8: (0.9, [{1, 2}, {0, 1, 2}]),
        7: (0.8, [{1, 2}, {1, 2}]),
        6: (0.8, [{1, 2}, {1, 2}]),
        5: (0.6, [{1}, {1, 2}]),
        4: (0.5, [{1}, {2}]),
        3: (0.5, [{1}, {2}]),
    }
    for limit, (threshold, sets) in expected.items():
        found, theta = fitted_sets(p, Room([1, 2], [1, 1], limit))
        assert (round(theta, 6), as_sets(found)) == (threshold, sets), limit


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_the_halving_of_an_interval(seed: int) -> None:
    """Three layers of other sizes, every limit from the smallest to the whole."""
    experts, sizes, least = [8, 5, 8], [3, 7, 2], [2, 1, 3]
    p = random_shares(experts, seed)
    for limit in range(19, 76, 3):
        room = Room(sizes, least, limit)
        found, theta = fitted_sets(p, room)
        sets, expected = oracle.fitted([own.double().tolist() for own in p], sizes, least, limit)
        assert as_sets(found) == sets
        assert theta == pytest.approx(expected, abs=1e-6) or oracle.parameters(sets, sizes) == room.smallest
        assert oracle.parameters(as_sets(found), sizes) <= limit


def test_an_expert_without_activations_is_left_out_while_there_are_others() -> None:
    """Also where all would fit; a layer needs its active ones; a layer that saw nothing uses all alike."""
    p = [torch.tensor([0.0, 0.7, 0.0, 0.3]), torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.zeros(4)]
    found, theta = fitted_sets(p, Room([1, 1, 1], [2, 2, 2], 100))
    assert as_sets(found) == [{1, 3}, {0, 2}, {0, 1, 2, 3}]
    assert theta == 1.0


def test_sets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="have 4 parameters, which do not fit into 3"):
        fitted_sets([torch.ones(4)], Room([2], [2], 3))
    assert as_sets(fitted_sets([torch.ones(4)], Room([2], [2], 4))[0]) == [{0, 1}]


@pytest.mark.parametrize("seed", range(4))
def test_peers_and_what_they_recommend(seed: int) -> None:
    """Eq. 4 to 6 of every one of five clients."""
    p = torch.stack([torch.cat(random_shares([6, 4], 10 * seed + client)) for client in range(5)])
    rows = p.double().tolist()
    similarity = similarities(p)
    for a in range(5):
        for b in range(5):
            assert float(similarity[a, b]) == pytest.approx(oracle.cosine(rows[a], rows[b]), abs=1e-12)
        for count in (1, 3, 9):
            chosen = top_peers(similarity, a, torch.ones(5, dtype=torch.bool), count)
            assert chosen == oracle.peers(rows, a, count)
            wanted = recommendation(similarity[a, chosen], p[chosen])
            assert wanted is not None
            torch.testing.assert_close(wanted.tolist(), oracle.recommended(rows, a, chosen))


def test_peers_at_the_edges() -> None:
    """Who never measured is nobody's peer and is like nobody; without weight there is no recommendation."""
    p = torch.tensor([[1.0, 0.0], [0.0, 0.0], [0.0, 1.0]])
    similarity = similarities(p)
    assert similarity[1].tolist() == [0.0, 0.0, 0.0]
    assert bool(similarity.isfinite().all())
    known = torch.tensor([True, False, True])
    assert top_peers(similarity, 0, known, 3) == [2]
    assert recommendation(similarity[0, [2]], p[[2]]) is None
    assert top_peers(similarity[:1, :1], 0, known, 3) == []
    assert recommendation(similarity[0, []], p[[]]) is None


def test_adjustments_by_hand() -> None:
    """Two layers of 3 experts of size 1, n_k = 3, p-hat (.6, .4, 0) and (.1, .5, .4)."""
    held, wanted = [{0}, {0, 2}], [torch.tensor([0.6, 0.4, 0.0]), torch.tensor([0.1, 0.5, 0.4])]
    cases = {
        (4,): [{0}, {0, 1, 2}],  # n = 1: the best outside
        (4, 5): [{0, 1}, {0, 1, 2}],  # 4.5 rounds to 5
        (9,): [{0, 1}, {0, 1, 2}],  # nobody activated expert 2 of the first layer
        (3,): [{0}, {0, 2}],  # n = 0
        (2,): [{0}, {2}],  # the worst
        (1,): [{0}, {2}],  # every layer keeps an expert
    }
    for peers, expected in cases.items():
        found = adjusted_sets(masks(held, [3, 3]), wanted, peers, Room([1, 1], [1, 1], 9))
        assert as_sets(found) == expected, peers
    tight = adjusted_sets(masks(held, [3, 3]), wanted, (9,), Room([1, 2], [1, 1], 6))
    assert as_sets(tight) == [{0, 1}, {0, 2}]  # the best would need 2, the second best fits


@pytest.mark.parametrize("seed", range(8))
def test_adjustments_against_the_loop(seed: int) -> None:
    experts, sizes, least, limit = [6, 4], [2, 3], [2, 1], 18
    wanted = random_shares(experts, seed)
    start = random_shares(experts, seed + 50)
    held = as_sets(fitted_sets(start, Room(sizes, least, 9 + seed))[0])
    for peers in ([1], [3, 4], [5, 6], [8], [10, 9]):
        found = adjusted_sets(masks(held, experts), wanted, peers, Room(sizes, least, limit))
        expected = oracle.adjusted(held, [own.tolist() for own in wanted], peers, sizes, least, limit)
        assert as_sets(found) == expected
