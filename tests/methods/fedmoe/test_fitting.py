"""The sets that fit a client's memory: by hand, against the halving of an interval, and at the edges."""

from __future__ import annotations

import pytest
import torch

from fedguild.methods.fedmoe.fitting import Limits, fitted_sets
from tests.methods.fedmoe.sets import as_sets, random_shares
from tests.oracles import fedmoe as oracle


@pytest.mark.parametrize("seed", range(6))
def test_the_search_is_the_halving_of_an_interval(seed: int) -> None:
    """Three layers of other sizes, every limit from the smallest to the whole."""
    experts, sizes, least = [8, 5, 8], [3, 7, 2], [2, 1, 3]
    p = random_shares(experts, seed)
    for limit in range(19, 76, 3):
        limits = Limits(sizes, least, limit)
        found, theta = fitted_sets(p, limits)
        sets, expected = oracle.fitted([own.double().tolist() for own in p], sizes, least, limit)
        assert as_sets(found) == sets
        assert theta == pytest.approx(expected, abs=1e-6) or oracle.parameters(sets, sizes) == limits.smallest
        assert oracle.parameters(as_sets(found), sizes) <= limit


def test_an_expert_without_activations_is_left_out_while_there_are_others() -> None:
    """Also where all would fit; a layer needs its active ones; a layer that saw nothing uses all alike."""
    p = [torch.tensor([0.0, 0.7, 0.0, 0.3]), torch.tensor([0.0, 0.0, 1.0, 0.0]), torch.zeros(4)]
    found, theta = fitted_sets(p, Limits([1, 1, 1], [2, 2, 2], 100))
    assert as_sets(found) == [{1, 3}, {0, 2}, {0, 1, 2, 3}]
    assert theta == 1.0


def test_sets_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="have 4 parameters, which do not fit into 3"):
        fitted_sets([torch.ones(4)], Limits([2], [2], 3))
    assert as_sets(fitted_sets([torch.ones(4)], Limits([2], [2], 4))[0]) == [{0, 1}]
