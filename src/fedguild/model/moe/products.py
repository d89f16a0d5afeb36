"""Grouped matrix products: rows sorted by group, one matrix for each group.

On a GPU, torch's `grouped_mm` does them in one kernel. On a CPU it runs the groups one after the
other, each on all cores, which wastes most of them on small groups; there, threads of our own
take whole groups, each on one core (measured in benchmarks/grouped_products.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

_GROUP_LIMIT_CUDA = 1023
"""Most groups that a CUDA kernel of `grouped_mm` takes."""
_THREADED_WORK = 250_000
"""Multiplications per group from which own threads pay for themselves on a CPU."""


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
    if not _threaded(rows, rows.shape[0] * inner * outer, groups):
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    out = rows.new_empty(rows.shape[0], outer)

    def multiply(group: int, start: int, end: int) -> None:
        torch.mm(rows[start:end], matrices[group], out=out[start:end])

    _for_each_group(multiply, ends)
    return out


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

    A group without rows gives zeros.
    """
    groups = ends.shape[0]
    if left.is_cuda and groups <= _GROUP_LIMIT_CUDA:
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    if not left.is_cuda and not _threaded(left, left.shape[0] * left.shape[1] * right.shape[1], groups):
        return torch.nn.functional.grouped_mm(left.t(), right, offs=ends)
    out = left.new_zeros(groups, left.shape[1], right.shape[1])

    def multiply(group: int, start: int, end: int) -> None:
        torch.mm(left[start:end].t(), right[start:end], out=out[group])

    _for_each_group(multiply, ends)
    return out


def _threaded(rows: Tensor, work: int, groups: int) -> bool:
    """Whether to take the groups one by one; `grouped_mm` has no fp64."""
    return rows.dtype is torch.float64 or work >= _THREADED_WORK * groups


def _for_each_group(multiply: Callable[[int, int, int], None], ends: Tensor) -> None:
    """Calls `multiply(group, start, end)` for every group with rows, on all cores."""
    bounds = enumerate(pairwise([0, *ends.tolist()]))
    jobs = iter([(group, start, end) for group, (start, end) in bounds if end > start])
    threads, inference = torch.get_num_threads(), torch.is_inference_mode_enabled()
    if threads == 1 or ends.is_cuda:
        _work(multiply, jobs, inference)
        return
    helpers = [_pool(threads - 1).submit(_work, multiply, jobs, inference) for _ in range(threads - 1)]
    with _one_core():
        _work(multiply, jobs, inference)
        for helper in helpers:
            helper.result()


def _work(multiply: Callable[[int, int, int], None], jobs: Iterator[tuple[int, int, int]], inference: bool) -> None:
    """Takes jobs until there are none; several threads may share `jobs`. Torch's modes are each thread's own."""
    with torch.inference_mode(inference), torch.no_grad():
        for job in jobs:
            multiply(*job)


@lru_cache(maxsize=1)
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, "grouped-products", initializer=torch.set_num_threads, initargs=(1,))


class _one_core:  # noqa: N801 - reads as a statement: `with _one_core():`
    """Keeps torch's products in this thread on one core; the other threads have theirs."""

    def __enter__(self) -> None:
        self._threads = torch.get_num_threads()
        torch.set_num_threads(1)

    def __exit__(self, *_: object) -> None:
        torch.set_num_threads(self._threads)


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
