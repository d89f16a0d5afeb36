"""Peers, their recommendation and the adjustment of a client's sets: against loops, by hand, and at the edges."""

from __future__ import annotations

import pytest
import torch

from fedguild.methods.fedmoe.adjusting import adjusted_sets, recommendation, similarities, top_peers
from fedguild.methods.fedmoe.fitting import Limits, fitted_sets
from tests.methods.fedmoe.sets import as_sets, masks, random_shares
from tests.oracles import fedmoe as oracle


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
        found = adjusted_sets(masks(held, [3, 3]), wanted, peers, Limits([1, 1], [1, 1], 9))
        assert as_sets(found) == expected, peers
    tight = adjusted_sets(masks(held, [3, 3]), wanted, (9,), Limits([1, 2], [1, 1], 6))
    assert as_sets(tight) == [{0, 1}, {0, 2}]  # the best would need 2, the second best fits


@pytest.mark.parametrize("seed", range(8))
def test_adjustments_against_the_loop(seed: int) -> None:
    experts, sizes, least, limit = [6, 4], [2, 3], [2, 1], 18
    wanted = random_shares(experts, seed)
    start = random_shares(experts, seed + 50)
    held = as_sets(fitted_sets(start, Limits(sizes, least, 9 + seed))[0])
    for peers in ([1], [3, 4], [5, 6], [8], [10, 9]):
        found = adjusted_sets(masks(held, experts), wanted, peers, Limits(sizes, least, limit))
        expected = oracle.adjusted(held, [own.tolist() for own in wanted], peers, sizes, least, limit)
        assert as_sets(found) == expected
