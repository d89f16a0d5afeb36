"""Products of each slot's rows with that slot's matrix.

On a CPU, large enough fp32 products run in oneDNN, slot by slot (docs/decisions/0004). Otherwise slots with equal
numbers of rows share one batched product. Slots with unequal numbers, as packed rows have, get a product each on a CPU,
and share a grouped one elsewhere. If the Numba kernel is installed, it computes a CPU's low-rank fp32 products of
unequal slots in one call (docs/decisions/0020).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedguild.model import kernels
from fedguild.model.frozen_linear import WORTHWHILE, has_onednn, onednn_linear
from fedguild.model.moe.products import ROW_BYTES, grouped_outer, grouped_rows

if TYPE_CHECKING:
    from fedguild.model.kernels.cpu_groups import Groups

LOW_RANK = 32
"""The largest rank whose products on a CPU are our kernel's, which is faster at 20; larger ones are left to oneDNN."""


def slot_rows(rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Returns [N, a], the rows [N, c] times their slot's transposed matrix.

    Args:
        rows: [N, c], slot-major.
        matrices: [S, a, c].
        counts: Rows of each slot, in any unit; N is a multiple of their sum.
    """
    product: Tensor = _SlotRows.apply(None, rows, matrices, counts)  # type: ignore[no-untyped-call]
    return product


def add_slot_rows(total: Tensor, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Returns the total [N, a] plus `slot_rows(rows, matrices, counts)`."""
    product: Tensor = _SlotRows.apply(total, rows, matrices, counts)  # type: ignore[no-untyped-call]
    return product


def add_slot_rows_in_place(total: Tensor, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Adds the rows […, c] times their slot's transposed matrix to the total […, a], in place, and returns it.

    Args:
        total: Contiguous; nothing else may read its old values.
        matrices: [S, a, c].
        counts: As in `slot_rows`.
    """
    flat = rows.reshape(-1, rows.shape[-1])
    sum_of_both: Tensor = _AddSlotRows.apply(total, flat, matrices, counts)  # type: ignore[no-untyped-call]
    return sum_of_both


class _AddSlotRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
        add_to_slot_rows(total.view(-1, total.shape[-1]), rows, matrices, counts)
        ctx.mark_dirty(total)
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        flat = grads[0].reshape(-1, grads[0].shape[-1])
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[1]:
            grad_rows = rows_of_slots(flat, matrices.transpose(1, 2), ctx.counts)
        if ctx.needs_input_grad[2]:
            grad_matrices = outer_of_slots(flat, rows, ctx.counts)
        return grads[0], grad_rows, grad_matrices, None


class _SlotRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, total: Tensor | None, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.save_for_backward(rows, matrices)
        ctx.counts = counts
        return rows_of_slots(rows, matrices, counts, total)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, matrices = ctx.saved_tensors
        grad_rows = grad_matrices = None
        if ctx.needs_input_grad[1]:
            grad_rows = rows_of_slots(grads[0], matrices.transpose(1, 2), ctx.counts)
        if ctx.needs_input_grad[2]:
            grad_matrices = outer_of_slots(grads[0], rows, ctx.counts)
        return grads[0] if ctx.needs_input_grad[0] else None, grad_rows, grad_matrices, None


def rows_of_slots(rows: Tensor, matrices: Tensor, counts: tuple[int, ...], total: Tensor | None = None) -> Tensor:
    """As `slot_rows`, plus the total if there is one; not for autograd."""
    if (groups := _groups(rows, matrices, counts)) is not None:
        product = groups.rows(rows, [_laid_out(matrices.transpose(1, 2))])
        return product if total is None else product.add_(total)
    if len(counts) == 1:
        return _product(rows, matrices[0], total)
    if len(set(counts)) == 1 and not _suits_onednn(rows, rows.numel() // len(counts) * matrices.shape[1]):
        grouped, transposed = rows.unflatten(0, (len(counts), -1)), matrices.transpose(1, 2)
        if total is None:
            return torch.bmm(grouped, transposed).flatten(0, 1)
        return torch.baddbmm(total.unflatten(0, (len(counts), -1)), grouped, transposed).flatten(0, 1)
    if _suits_grouped(rows, matrices.shape[1], matrices.shape[2]):
        product = grouped_rows(rows, matrices.transpose(1, 2), _ends(counts, rows.shape[0], rows.device))
        return product if total is None else product.add_(total)
    totals = [None] * len(counts) if total is None else _split(total, counts)
    parts = zip(_split(rows, counts), matrices, totals, strict=True)
    return torch.cat([_product(part, matrix, own) for part, matrix, own in parts])


def add_to_slot_rows(total: Tensor, rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> None:
    """Adds `slot_rows(rows, matrices, counts)` to the total [N, a] in place; not for autograd.

    The product is formed separately only if slots have unequal numbers of rows and torch's grouped product computes it.
    """
    if (groups := _groups(rows, matrices, counts)) is not None:
        groups.add(total, rows, [matrices.transpose(1, 2)])
    elif len(counts) == 1:
        total.addmm_(rows, matrices[0].t())
    elif len(set(counts)) == 1:
        grouped = rows.unflatten(0, (len(counts), -1))
        total.unflatten(0, (len(counts), -1)).baddbmm_(grouped, matrices.transpose(1, 2))
    elif kernels.runs("grouped", rows.device) and kernels.language(rows.device) == "triton":
        from fedguild.model.kernels.segmented import Segments, segmented_rows

        segments = Segments.of(_ends(counts, rows.shape[0], rows.device), rows.shape[0], rows.dtype)
        segmented_rows(rows, [matrices.transpose(1, 2)], segments, total=total)
    elif _suits_grouped(rows, matrices.shape[1], matrices.shape[2]):
        total += grouped_rows(rows, matrices.transpose(1, 2), _ends(counts, rows.shape[0], rows.device))
    else:
        for own, part, matrix in zip(_split(total, counts), _split(rows, counts), matrices, strict=True):
            own.addmm_(part, matrix.t())


def outer_of_slots(left: Tensor, right: Tensor, counts: tuple[int, ...]) -> Tensor:
    """Returns [S, a, b], every slot's left rows [N, a] transposed times its right rows [N, b]; not for autograd."""
    low_rank = min(left.shape[1], right.shape[1]) <= LOW_RANK
    if low_rank and left.dtype is right.dtype and prefers_kernel(left, counts):
        groups = _groups_of(counts, left)
        if left.shape[1] <= right.shape[1]:
            return groups.outer(left, right)
        return groups.outer(right, left).transpose(1, 2)
    if len(counts) == 1:
        return _product(left.t(), right.t())[None]
    if len(set(counts)) == 1 and not _suits_onednn(left, left.numel() // len(counts) * right.shape[1]):
        grouped = left.unflatten(0, (len(counts), -1)).transpose(1, 2)
        return torch.bmm(grouped, right.unflatten(0, (len(counts), -1)))
    if _suits_grouped(left, left.shape[1], right.shape[1]):
        return grouped_outer(left, right, _ends(counts, left.shape[0], left.device))
    pairs = zip(_split(left, counts), _split(right, counts), strict=True)
    return torch.stack([_product(a.t(), b.t()) for a, b in pairs])


def _product(left: Tensor, right: Tensor, total: Tensor | None = None) -> Tensor:
    if _suits_onednn(left, left.numel() * right.shape[0]):
        product = onednn_linear(left, right)
        return product if total is None else product.add_(total)
    return left @ right.t() if total is None else torch.addmm(total, left, right.t())


def _suits_onednn(rows: Tensor, multiplications: int) -> bool:
    """Whether oneDNN's higher cost per call pays off."""
    return multiplications >= WORTHWHILE and rows.dtype is torch.float32 and rows.device.type == "cpu" and has_onednn()


def prefers_kernel(rows: Tensor, counts: tuple[int, ...]) -> bool:
    """Whether the CPU kernel computes low-rank products with such rows: not for slots with equal numbers of rows.

    It does for a single slot, so that a slot gets the same bits alone and in a cohort.
    """
    batched = len(counts) > 1 and len(set(counts)) == 1
    return not batched and kernels.computes("low-rank", rows)


def _groups(rows: Tensor, matrices: Tensor, counts: tuple[int, ...]) -> Groups | None:
    """Returns the slots as the groups of the CPU kernel; None if it is not to be used."""
    suits = (
        min(matrices.shape[1:]) <= LOW_RANK and kernels.computes("low-rank", matrices) and prefers_kernel(rows, counts)
    )
    return _groups_of(counts, rows) if suits else None


def _groups_of(counts: tuple[int, ...], rows: Tensor) -> Groups:
    from fedguild.model.kernels.cpu_groups import Groups

    return Groups(_ends(counts, rows.shape[0], rows.device))


def _laid_out(matrices: Tensor) -> Tensor:
    """Returns the matrices [S, c, a] in the kernel's fastest layout: the longer side contiguous."""
    if matrices.shape[1] > matrices.shape[2]:
        return matrices.transpose(1, 2).contiguous().transpose(1, 2)
    return matrices.contiguous()


def _suits_grouped(rows: Tensor, *widths: int) -> bool:
    """Whether a device other than a CPU computes slots with unequal numbers of rows in one grouped product."""
    if kernels.runs("grouped", rows.device) and kernels.language(rows.device) == "triton":
        return True
    low_precision = rows.dtype in (torch.bfloat16, torch.float16)
    aligned = all(width * rows.element_size() % ROW_BYTES == 0 for width in widths)
    return rows.device.type != "cpu" and low_precision and aligned


@lru_cache(maxsize=64)
def _ends(counts: tuple[int, ...], rows: int, device: torch.device) -> Tensor:
    """Returns [S] int32, where each slot's rows end; cached on the device for all layers of a pass after the first."""
    unit = rows // max(1, sum(counts))
    ends = torch.tensor([unit * end for end in accumulate(counts)], dtype=torch.int32)
    return ends.to(device, non_blocking=True)


def _split(rows: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
    unit = rows.shape[0] // max(1, sum(counts))
    parts: tuple[Tensor, ...] = rows.split([count * unit for count in counts])
    return parts
