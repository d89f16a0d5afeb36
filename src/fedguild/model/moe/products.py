"""Grouped matrix products: rows sorted by group, one matrix for each group.

torch's `grouped_mm` computes them in one call. On a CPU it multiplies group by group with the BLAS that torch was built
with. In fp32 FedGuild's kernel is faster there (docs/decisions/0021, benchmarks/grouped_products.py); without Numba,
large groups go to oneDNN (docs/decisions/0004). On a GPU torch has a kernel for bf16 on Hopper and Blackwell. Elsewhere
its `grouped_mm` reads the groups' ends back to the host and multiplies group by group, so FedGuild's kernel runs
instead, as it does for more groups than torch's takes (docs/decisions/0016). What neither supports is multiplied group
by group.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from fedguild.model import kernels
from fedguild.model.frozen_linear import WORTHWHILE, has_onednn, onednn_linear

GROUP_LIMIT = 1023
"""Largest number of groups that a kernel of `grouped_mm` takes at once on a GPU."""
ROW_BYTES = 16
"""Rows that a grouped product of torch reads and writes must be a multiple of it."""
BF16_KERNELS = (9, 10)
"""Major compute capabilities of the GPUs that `grouped_mm` has a kernel for."""


def grouped_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns [n, out], the rows [n, in] times their group's matrix [G, in, out].

    Args:
        rows: [n, in], sorted by group.
        matrices: [G, in, out].
        ends: [G] int32, where each group's rows end; the last equals n.
    """
    groups, inner, outer = matrices.shape
    if _suits_kernel(rows, groups, inner, outer):
        from fedguild.model.kernels.segmented import Segments, segmented_rows

        return segmented_rows(rows, [matrices], Segments.of(ends, rows.shape[0], rows.dtype))
    if _suits_cpu_kernel(rows, matrices):
        from fedguild.model.kernels.cpu_groups import Groups

        return Groups(ends).rows(rows, [matrices])
    by_torch = _suits_torch(rows, inner, outer)
    if by_torch and rows.device.type != "cpu":
        return _in_chunks(rows, matrices, ends)
    large = rows.shape[0] * inner * outer >= WORTHWHILE * groups
    onednn = large and rows.dtype is torch.float32 and has_onednn()
    if by_torch and not onednn:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    bounds = pairwise([0, *ends.tolist()])
    weights = matrices.transpose(1, 2).unbind()
    product = rows.new_empty(rows.shape[0], outer)
    for (start, end), weight in zip(bounds, weights, strict=True):
        if end > start:  # copied while it is in the cache
            product[start:end] = _onednn(rows, start, end, weight) if onednn else rows[start:end] @ weight.t()
    return product


@dataclass(frozen=True)
class FrozenProduct:
    """A frozen grouped product to which trained parts are added: computed alone, or together with the first of them.

    Attributes:
        rows: [n, in], sorted by group; [N, in] the tokens, if there are places.
        matrices: [G, in, out].
        ends: [G] int32, where each group's rows end.
        places: [n] int64, the token of each row; None if `rows` are the rows.
    """

    rows: Tensor
    matrices: Tensor
    ends: Tensor
    places: Tensor | None = None

    def suits_kernel(self) -> bool:
        return _suits_cpu_kernel(self.rows, self.matrices)

    def computed(self) -> Tensor:
        if self.places is None:
            return grouped_rows(self.rows, self.matrices, self.ends)
        if self.suits_kernel():
            from fedguild.model.kernels.cpu_groups import Groups

            return Groups(self.ends).gathered(self.rows, self.places, self.matrices)
        return grouped_rows(self.rows.index_select(0, self.places), self.matrices, self.ends)


def computed(product: Tensor | FrozenProduct) -> Tensor:
    return product.computed() if isinstance(product, FrozenProduct) else product


def add_grouped_rows(total: Tensor, rows: Tensor, matrices: Tensor, ends: Tensor) -> None:
    """Adds what `grouped_rows` returns to the total [n, out] in place."""
    groups, inner, outer = matrices.shape
    if _suits_kernel(rows, groups, inner, outer):
        from fedguild.model.kernels.segmented import Segments, segmented_rows

        segmented_rows(rows, [matrices], Segments.of(ends, rows.shape[0], rows.dtype), total=total)
    elif _suits_cpu_kernel(rows, matrices) and kernels.computes("grouped", total) and total.stride(1) == 1:
        from fedguild.model.kernels.cpu_groups import Groups

        Groups(ends).add(total, rows, [matrices])
    else:
        total += grouped_rows(rows, matrices, ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

    A group without rows gives zeros.
    """
    groups = ends.shape[0]
    if _suits_kernel(left, groups, left.shape[1], right.shape[1]):
        from fedguild.model.kernels.segmented import Segments, segmented_outer

        return segmented_outer(left, right, Segments.of(ends, left.shape[0], left.dtype))
    few = left.device.type == "cpu" or groups <= GROUP_LIMIT
    if few and _suits_torch(left, left.shape[1], right.shape[1]):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.stack([a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])


def _suits_kernel(rows: Tensor, groups: int, *widths: int) -> bool:
    """Whether the GPU kernel takes a product: if it runs, and torch has none of its own."""
    if not kernels.runs("grouped", rows.device) or kernels.language(rows.device) != "triton":
        return False
    by_torch = rows.dtype is torch.bfloat16 and groups <= GROUP_LIMIT and _suits_torch(rows, *widths)
    return not (by_torch and rows.is_cuda and torch.cuda.get_device_capability(rows.device)[0] in BF16_KERNELS)


def runs_on_cpu(values: Tensor) -> bool:
    """Whether the CPU kernel computes grouped products with values of this dtype and device."""
    if not kernels.computes("grouped", values):
        return False
    from fedguild.model.kernels.cpu_tiles import IS_FUSED

    return IS_FUSED


def _suits_cpu_kernel(rows: Tensor, matrices: Tensor) -> bool:
    return kernels.computes("grouped", matrices) and runs_on_cpu(rows)


def _suits_torch(rows: Tensor, *widths: int) -> bool:
    """Whether torch's grouped product takes rows and matrices of these widths, on any device."""
    aligned = all(width * rows.element_size() % ROW_BYTES == 0 for width in widths)
    return aligned and rows.dtype is not torch.float64


def _onednn(rows: Tensor, start: int, end: int, weight: Tensor) -> Tensor:
    """Returns rows[start:end] times the transposed weight [out, in] by oneDNN.

    oneDNN compiles a kernel for every number of rows, so the number is rounded up to one of sixteen sizes between
    consecutive powers of two; the extra products of neighbouring rows are discarded.
    """
    count = end - start
    step = max(8, 1 << max(0, count.bit_length() - 5))
    size = min(-(-count // step) * step, rows.shape[0])
    first = min(start, rows.shape[0] - size)
    product = onednn_linear(rows[first : first + size], weight)
    return product if size == count else product[start - first : end - first]


def _in_chunks(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns the product, in several calls if there are more groups than a CUDA kernel takes."""
    groups = matrices.shape[0]
    if groups <= GROUP_LIMIT:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    parts, start = [], 0
    for first in range(0, groups, GROUP_LIMIT):
        last = min(first + GROUP_LIMIT, groups)
        stop = int(ends[last - 1])
        parts.append(
            torch.nn.functional.grouped_mm(rows[start:stop], matrices[first:last], offs=ends[first:last] - start)
        )
        start = stop
    return torch.cat(parts)
