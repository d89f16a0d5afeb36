"""Products of every slot's rows with its own matrix, through oneDNN and without it."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.frozen_linear import WORTHWHILE
from fedguild.model.slot_products import add_slot_rows, slot_rows

SMALL, LARGE = (5, 6, 3), (256, 128, 64)


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (2, 0, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("adds", [True, False], ids=["added", "alone"])
@pytest.mark.parametrize(("sizes", "dtype"), [(SMALL, torch.float64), (LARGE, torch.float32)], ids=["small", "large"])
def test_values_and_gradients_against_a_product_for_each_row(counts, adds, sizes, dtype):
    """Sizes are (rows in a unit, inputs, outputs); the large ones are worth oneDNN's price."""
    unit, inputs, outputs = sizes
    assert (unit * inputs * outputs >= WORTHWHILE) == (sizes is LARGE)
    rng = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype).requires_grad_()

    rows, matrices = leaf(unit * sum(counts), inputs), leaf(len(counts), outputs, inputs)
    total, upstream = leaf(unit * sum(counts), outputs), leaf(unit * sum(counts), outputs).detach()
    slots = [slot for slot, count in enumerate(counts) for _ in range(count * unit)]
    expected = torch.stack([matrices[slot] @ row for slot, row in zip(slots, rows, strict=True)])
    if adds:
        expected = expected + total
        found, leaves = add_slot_rows(total, rows, matrices, counts), [rows, matrices, total]
    else:
        found, leaves = slot_rows(rows, matrices, counts), [rows, matrices]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 2e-4}
    assert torch.allclose(found, expected, **tolerance)
    ours = torch.autograd.grad((found * upstream).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves)
    assert all(torch.allclose(mine, wanted, **tolerance) for mine, wanted in zip(ours, theirs, strict=True))


def test_what_needs_no_gradient_gets_none():
    rows, matrices = torch.ones(4, 3), torch.ones(2, 5, 3, requires_grad=True)
    add_slot_rows(torch.zeros(4, 5), rows, matrices, (1, 1)).sum().backward()
    assert matrices.grad is not None
    assert matrices.grad.tolist() == [[[2.0] * 3] * 5] * 2
    assert rows.grad is None
