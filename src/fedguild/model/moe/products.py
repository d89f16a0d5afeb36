"""Grouped matrix products: rows sorted by group, one matrix for each group.

torch's `grouped_mm` does them in one call for fp32, bf16 and fp16; a plain loop does them in
fp64, which makes it the reference path of the tests.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor

_GROUP_LIMIT_CUDA = 1023


def grouped_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Returns [n, out], the rows [n, in] times their group's matrix [G, in, out].

    Args:
        rows: [n, in], sorted by group.
        matrices: [G, in, out].
        ends: [G] int32, where each group's rows end; the last equals n.
    """
    if rows.dtype is torch.float64:
        return _loop_rows(rows, matrices, ends)
    if rows.is_cuda and matrices.shape[0] > _GROUP_LIMIT_CUDA:
        return _in_chunks(rows, matrices, ends)
    return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

    A group without rows gives zeros.
    """
    if left.dtype is torch.float64:
        return _loop_outer(left, right, ends)
    if left.is_cuda and ends.shape[0] > _GROUP_LIMIT_CUDA:
        return _loop_outer(left, right, ends)
    return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)


def _bounds(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise([0, *ends.tolist()]))


def _loop_rows(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    out = rows.new_zeros(rows.shape[0], matrices.shape[2])
    for group, (start, end) in enumerate(_bounds(ends)):
        if end > start:
            out[start:end] = rows[start:end] @ matrices[group]
    return out


def _loop_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    out = left.new_zeros(ends.shape[0], left.shape[1], right.shape[1])
    for group, (start, end) in enumerate(_bounds(ends)):
        if end > start:
            out[group] = left[start:end].t() @ right[start:end]
    return out


def _in_chunks(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """Splits a product of more groups than a CUDA kernel takes into several calls."""
    parts, start = [], 0
    for first in range(0, matrices.shape[0], _GROUP_LIMIT_CUDA):
        last = min(first + _GROUP_LIMIT_CUDA, matrices.shape[0])
        stop = int(ends[last - 1])
        parts.append(
            torch.nn.functional.grouped_mm(rows[start:stop], matrices[first:last], offs=ends[first:last] - start)
        )
        start = stop
    return torch.cat(parts)
