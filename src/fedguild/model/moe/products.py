"""Grouped matrix products: rows sorted by group, one matrix for each group.

torch's `grouped_mm` computes them in one call. On a CPU it multiplies group by group with the BLAS that torch was built
with. For large groups oneDNN's kernels are up to twice as fast in fp32 (docs/decisions/0004,
benchmarks/grouped_products.py), so they are used for those.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

from fedguild.model.frozen_linear import WORTHWHILE, has_onednn, onednn_linear

GROUP_LIMIT = 1023
"""Largest number of groups that a kernel of `grouped_mm` takes at once on a GPU."""


def grouped_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns [n, out], the rows [n, in] times their group's matrix [G, in, out].

    Args:
        rows: [n, in], sorted by group.
        matrices: [G, in, out].
        ends: [G] int32, where each group's rows end; the last equals n.
    """
    groups, inner, outer = matrices.shape
    if rows.device.type != "cpu" and rows.dtype is not torch.float64:
        return _in_chunks(rows, matrices, ends)
    large = rows.shape[0] * inner * outer >= WORTHWHILE * groups
    onednn = large and rows.dtype is torch.float32 and has_onednn()
    if not onednn and rows.dtype is not torch.float64:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    bounds = pairwise([0, *ends.tolist()])
    weights = matrices.transpose(1, 2).unbind()
    parts = [
        _onednn(rows, start, end, weight) if onednn else rows[start:end] @ weight.t()
        for (start, end), weight in zip(bounds, weights, strict=True)
        if end > start
    ]
    return torch.cat(parts) if parts else rows.new_empty(0, outer)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

    A group without rows gives zeros.
    """
    groups = ends.shape[0]
    if left.dtype is not torch.float64 and (left.device.type == "cpu" or groups <= GROUP_LIMIT):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1)).tolist()
    return torch.stack([a.t() @ b for a, b in zip(left.split(sizes), right.split(sizes), strict=True)])


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
