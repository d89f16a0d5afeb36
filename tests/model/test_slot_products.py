"""Products of every slot's rows with its own matrix, through oneDNN and without it."""

from __future__ import annotations

import pytest
import torch

from fedguild.model import kernels, slot_products
from fedguild.model.frozen_linear import WORTHWHILE
from fedguild.model.slot_products import add_slot_rows, add_slot_rows_in_place, slot_rows

SMALL, LARGE, DOWN, UP = (5, 6, 3), (256, 128, 64), (7, 70, 20), (7, 20, 70)


@pytest.mark.parametrize("counts", [(1,), (1, 1, 1), (2, 0, 1), (0, 3)], ids=str)
@pytest.mark.parametrize("adds", ["added", "added in place", "alone"])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(SMALL, torch.float64), (LARGE, torch.float32), (DOWN, torch.float32), (UP, torch.float32)],
    ids=["small", "large", "down to a rank", "up from a rank"],
)
@pytest.mark.parametrize("kernel", ["auto", "none"])
def test_values_and_gradients_against_a_product_for_each_row(counts, adds, sizes, dtype, kernel, monkeypatch):
    """Sizes are (rows in a unit, inputs, outputs); the large ones are worth oneDNN's price, a rank is our kernel's."""
    monkeypatch.setenv(kernels.VARIABLE, kernel)
    unit, inputs, outputs = sizes
    assert (unit * inputs * outputs >= WORTHWHILE) == (sizes is LARGE)
    rng = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype).requires_grad_()

    rows, matrices = leaf(unit * sum(counts), inputs), leaf(len(counts), outputs, inputs)
    total, upstream = leaf(unit * sum(counts), outputs), leaf(unit * sum(counts), outputs).detach()
    slots = [slot for slot, count in enumerate(counts) for _ in range(count * unit)]
    expected = torch.stack([matrices[slot] @ row for slot, row in zip(slots, rows, strict=True)])
    if adds != "alone":
        expected = expected + total
        leaves = [rows, matrices, total]
    if adds == "added":
        found = add_slot_rows(total, rows, matrices, counts)
    elif adds == "added in place":
        output = total * 1.0
        found = add_slot_rows_in_place(output, rows, matrices, counts)
        assert found.data_ptr() == output.data_ptr()
    else:
        found, leaves = slot_rows(rows, matrices, counts), [rows, matrices]
    tolerance = {"rtol": 1e-10, "atol": 1e-12} if dtype is torch.float64 else {"rtol": 1e-4, "atol": 2e-4}
    assert torch.allclose(found, expected, **tolerance)
    ours = torch.autograd.grad((found * upstream).sum(), leaves)
    theirs = torch.autograd.grad((expected * upstream).sum(), leaves)
    assert all(torch.allclose(mine, wanted, **tolerance) for mine, wanted in zip(ours, theirs, strict=True))


def test_products_of_low_rank_are_our_kernels(monkeypatch):
    from fedguild.model.kernels import cpu_groups

    monkeypatch.setenv(kernels.VARIABLE, "auto")
    calls = []
    for name in ("rows", "outer"):
        own = getattr(cpu_groups.Groups, name)
        counted = lambda self, *given, own=own, name=name: calls.append(name) or own(self, *given)  # noqa: E731
        monkeypatch.setattr(cpu_groups.Groups, name, counted)
    for sizes, dtype, expected in (
        (DOWN, torch.float32, ["rows", "rows", "outer"]),
        (UP, torch.float32, ["rows", "rows", "outer"]),
        (LARGE, torch.float32, []),
        (DOWN, torch.float64, []),
    ):
        unit, inputs, outputs = sizes
        rows = torch.ones(3 * unit, inputs, dtype=dtype, requires_grad=True)
        matrices = torch.ones(2, outputs, inputs, dtype=dtype, requires_grad=True)
        slot_rows(rows, matrices, (2, 1)).sum().backward()
        assert calls == expected
        calls.clear()
    slot_rows(torch.ones(8, 70), torch.ones(2, 20, 70), (1, 1))
    assert not calls, "slots of equal numbers of rows share a batched product"


def test_what_needs_no_gradient_gets_none():
    rows, matrices = torch.ones(4, 3), torch.ones(2, 5, 3, requires_grad=True)
    add_slot_rows(torch.zeros(4, 5), rows, matrices, (1, 1)).sum().backward()
    assert matrices.grad is not None
    assert matrices.grad.tolist() == [[[2.0] * 3] * 5] * 2
    assert rows.grad is None


@pytest.mark.parametrize("counts", [(2, 0, 1), (0, 3), (1, 4)], ids=str)
@pytest.mark.parametrize("adds", [True, False], ids=["added", "alone"])
def test_one_grouped_product_equals_a_product_for_each_slot(counts, adds, monkeypatch):
    """The way of other devices than a CPU, in fp32 on a CPU."""
    monkeypatch.setenv(kernels.VARIABLE, "none")
    rng = torch.Generator().manual_seed(0)
    rows, matrices = (torch.randn(shape, generator=rng) for shape in ((5 * sum(counts), 8), (len(counts), 16, 8)))
    total, upstream = (torch.randn(5 * sum(counts), 16, generator=rng) for _ in range(2))
    results = []
    for grouped in (False, True):
        monkeypatch.setattr(slot_products, "_suits_grouped", lambda *_, grouped=grouped: grouped)
        leaves = [leaf.clone().requires_grad_() for leaf in (rows, matrices, *([total] if adds else []))]
        out = add_slot_rows(leaves[2], *leaves[:2], counts) if adds else slot_rows(*leaves, counts)
        results.append([out.detach(), *torch.autograd.grad((out * upstream).sum(), leaves)])
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*results, strict=True))


def test_only_aligned_low_precision_off_the_cpu_is_grouped():
    def suits(device, dtype, *widths):
        return slot_products._suits_grouped(torch.empty(2, 8, device=device, dtype=dtype), *widths)

    assert suits("meta", torch.bfloat16, 8, 24)
    assert suits("meta", torch.float16, 8, 24)
    assert not suits("meta", torch.bfloat16, 8, 20)
    assert not suits("meta", torch.float32, 8, 24)
    assert not suits("cpu", torch.bfloat16, 8, 24)
