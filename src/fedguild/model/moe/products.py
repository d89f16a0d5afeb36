"""Grouped matrix products: rows sorted by group, one matrix for each group.

torch's `grouped_mm` does them in one call. On a CPU it multiplies group by group with the BLAS that
torch was built with; where a group is large enough, oneDNN's kernels are up to twice as fast on
fp32 (docs/decisions/0004, benchmarks/grouped_products.py), so those take such groups.
"""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

_GROUP_LIMIT_CUDA = 1023
"""Most groups that a CUDA kernel of `grouped_mm` takes."""
_ONEDNN_WORK = 2_000_000
"""Multiplications per group from which oneDNN's greater cost per call pays."""


def grouped_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns [n, out], the rows [n, in] times their group's matrix [G, in, out].

    Args:
        rows: [n, in], sorted by group.
        matrices: [G, in, out].
        ends: [G] int32, where each group's rows end; the last equals n.
    """
    groups, inner, outer = matrices.shape
    if rows.is_cuda:
        return _in_chunks(rows, matrices, ends)
    large = rows.shape[0] * inner * outer >= _ONEDNN_WORK * groups
    onednn = large and rows.dtype is torch.float32 and _has_onednn()
    if not onednn and rows.dtype is not torch.float64:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], outer)
    for group, start, end in _filled(ends):
        matrix = matrices[group]
        out[start:end] = _onednn(rows, start, end, matrix) if onednn else rows[start:end] @ matrix
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

    A group without rows gives zeros.
    """
    groups = ends.shape[0]
    if left.dtype is not torch.float64 and not (left.is_cuda and groups > _GROUP_LIMIT_CUDA):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros(groups, left.shape[1], right.shape[1])
    for group, start, end in _filled(ends):
        torch.mm(left[start:end].t(), right[start:end], out=out[group])
    return out


def _filled(ends: Tensor) -> list[tuple[int, int, int]]:
    """Returns (group, start, end) of every group with rows."""
    bounds = enumerate(pairwise([0, *ends.tolist()]))
    return [(group, start, end) for group, (start, end) in bounds if end > start]


@cache
def _has_onednn() -> bool:
    return torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def _onednn(rows: Tensor, start: int, end: int, matrix: Tensor) -> Tensor:
    """Returns rows[start:end] times matrix [in, out] by oneDNN, as `torch.compile` calls it.

    oneDNN compiles a kernel for every number of rows that it meets, so some of the neighbours' rows
    are multiplied too and thrown away: eight sizes between a power of two and the next.
    """
    step = max(8, 1 << max(0, (end - start).bit_length() - 4))
    size = min(-(-(end - start) // step) * step, rows.shape[0])
    first = min(start, rows.shape[0] - size)
    product: Tensor = torch.ops.mkldnn._linear_pointwise(rows[first : first + size], matrix.t(), None, "none", [], "")
    return product[start - first : end - first]


def _in_chunks(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """One product; in several calls where there are more groups than a CUDA kernel takes."""
    groups = matrices.shape[0]
    if groups <= _GROUP_LIMIT_CUDA:
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    parts, start = [], 0
    for first in range(0, groups, _GROUP_LIMIT_CUDA):
        last = min(first + _GROUP_LIMIT_CUDA, groups)
        stop = int(ends[last - 1])
        parts.append(
            torch.nn.functional.grouped_mm(rows[start:stop], matrices[first:last], offs=ends[first:last] - start)
        )
        start = stop
    return torch.cat(parts)
