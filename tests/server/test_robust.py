"""Robust estimates of each value, over all clients and over those that hold it."""

from __future__ import annotations

from typing import Literal

import pytest
import torch

from fedguild.core.errors import UploadError
from fedguild.server.robust import centre_of_holders, robust_centre
from tests.oracles import robust as oracle


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 9])
@pytest.mark.parametrize("trim", [0.1, 0.2, 0.45])
def test_robust_centres_are_those_of_the_definitions(count: int, trim: float) -> None:
    values = [torch.randn(3, 4, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]
    torch.testing.assert_close(robust_centre(values, "median", trim).double(), oracle.median(values))
    found = robust_centre(values, "trimmed_mean", trim).double()
    torch.testing.assert_close(found, oracle.trimmed_mean(values, trim))


def test_tensors_of_unequal_shapes_have_no_robust_centre() -> None:
    with pytest.raises(UploadError, match="differ in shape"):
        robust_centre([torch.ones(2), torch.ones(3)], "median", 0.2)


@pytest.mark.parametrize("robust", ["median", "trimmed_mean"])
@pytest.mark.parametrize("shapes", [[3, 1, 1], [1, 4, 1], [1, 1, 2], [3, 4, 2]])
def test_a_centre_over_the_holders_leaves_out_all_others(
    shapes: list[int], robust: Literal["trimmed_mean", "median"]
) -> None:
    """Experts, ranks and single values; where nobody is a holder the value stays."""
    rng = torch.Generator().manual_seed(0)
    values = [torch.randn(3, 4, 2, generator=rng) for _ in range(6)]
    holders = [torch.rand(shapes, generator=rng) < 0.6 for _ in values]
    for each in holders:
        each.view(-1)[0] = False
    spoilt = [value.where(held.expand(value.shape), torch.nan) for value, held in zip(values, holders, strict=True)]
    before = torch.randn(3, 4, 2, generator=rng)
    found = centre_of_holders(spoilt, holders, before, robust, 0.2)
    torch.testing.assert_close(found.double(), oracle.over_holders(values, holders, before, robust, 0.2))
    assert torch.equal(found.view(-1)[0], before.view(-1)[0])
