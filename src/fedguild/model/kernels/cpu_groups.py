"""Products of rows sorted by group with each group's own small matrices on a CPU, in Numba.

torch's `grouped_mm` multiplies group by group on a CPU, and a group costs microseconds however small it is: with 64
experts and 10 slots a layer has 640. Here a group costs what its rows cost (docs/decisions/0019).

All is for fp32. A row's products do not depend on the other rows of its group, and nothing on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import carray, njit
from torch import Tensor

from fedguild.model.kernels.threads import EVERYTHING, Kernel, floats, in_order, integers, next_piece

LEAST_ROWS = 64
"""Rows that are worth a piece of their own."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group.

    Attributes:
        ends: [G] int32, where each group's rows end.
    """

    ends: Tensor

    def rows(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """Returns [n, p·out], the rows [n, in] times their group's matrix of each of p projections.

        Args:
            rows: [n, in], common to the projections, or [n, p·in], theirs side by side.
            matrices: [G, in, out] of each projection; the fastest are stored as [G, out, in].
        """
        _, inner, outer = matrices[0].shape
        out = rows.new_empty(rows.shape[0], outer * len(matrices))
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        own = rows.chunk(len(matrices), dim=1) if rows.shape[1] != inner else [rows] * len(matrices)
        for part, of_part, matrix in zip(out.split(outer, dim=1), own, matrices, strict=True):
            if matrix.stride(1) == 1 and inner > 1:
                self._run(_dots, of_part, matrix, matrix.stride(2), part)
            else:
                matrix = matrix.contiguous()
                self._run(_sums, of_part, matrix, matrix.stride(1), part.zero_())
        return out

    def add(self, total: Tensor, rows: Tensor, matrices: Sequence[Tensor], *, summed: bool = False) -> None:
        """Adds the rows times their group's matrix, of each of p projections, to a total, in place.

        Args:
            total: [n, p·out]; [n, out] for the sum of all.
            rows: [n, p·in], the projections' side by side.
            matrices: [G, in, out] of each projection.
            summed: Whether the projections' products are added up.
        """
        totals = [total] * len(matrices) if summed else total.chunk(len(matrices), dim=1)
        for one, part, matrix in zip(totals, rows.chunk(len(matrices), dim=1), matrices, strict=True):
            matrix = matrix if matrix.stride(2) == 1 else matrix.contiguous()
            self._run(_sums, part if part.stride(1) == 1 else part.contiguous(), matrix, matrix.stride(1), one)

    def _run(self, kernel: Kernel, rows: Tensor, matrix: Tensor, step: int, out: Tensor) -> None:
        """Runs a kernel of rows [n, in] and matrices [G, in, out], whose stored vectors are `step` elements apart."""
        assert out.stride(1) == 1
        numbers = (
            *_place(rows),
            matrix.data_ptr(),
            matrix.stride(0),
            step,
            *_place(out),
            self.ends.data_ptr(),
            *matrix.shape,
            rows.shape[0],
        )
        kernel.run(numbers, most_pieces=-(-rows.shape[0] // LEAST_ROWS))

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b]."""
        left = left if left.stride(1) == 1 else left.contiguous()
        right = right if right.stride(1) == 1 else right.contiguous()
        out = left.new_empty(self.ends.shape[0], left.shape[1], right.shape[1])
        numbers = (*_place(left), *_place(right), out.data_ptr(), self.ends.data_ptr(), *out.shape)
        _outer.run(numbers, most_pieces=out.shape[0])
        return out


def _place(rows: Tensor) -> tuple[int, int]:
    """Returns where rows begin, and the elements from one to the next."""
    return rows.data_ptr(), rows.stride(0)


@njit(inline="always")
def _first_group(ends, groups, row):
    """Returns the group of a row."""
    low, high = 0, groups
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= row:
            low = middle + 1
        else:
            high = middle
    return low


@Kernel
def _dots(numbers):
    """out[i, o] = Σ_k x[i, k] m[g, o, k]: four rows and four columns at once."""
    given = carray(numbers, 14)
    pieces = given[1]
    x, x_row = carray(floats(given[2]), EVERYTHING), given[3]
    m, m_group, m_column = carray(floats(given[4]), EVERYTHING), given[5], given[6]
    out, out_row = carray(floats(given[7]), EVERYTHING), given[8]
    ends, groups = carray(integers(given[9]), EVERYTHING), given[10]
    inner, outer, n = np.uint64(given[11]), given[12], given[13]
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        i, last = n * piece // pieces, n * (piece + 1) // pieces
        group = _first_group(ends, groups, i)
        while i < last:
            while ends[group] <= i:
                group += 1
            end = min(np.int64(ends[group]), last)
            while i < end:
                x0, x1 = np.uint64(i * x_row), np.uint64(min(i + 1, end - 1) * x_row)
                x2, x3 = np.uint64(min(i + 2, end - 1) * x_row), np.uint64(min(i + 3, end - 1) * x_row)
                for c in range(0, outer, 4):
                    at = group * m_group
                    m0, m1 = np.uint64(at + c * m_column), np.uint64(at + min(c + 1, outer - 1) * m_column)
                    m2 = np.uint64(at + min(c + 2, outer - 1) * m_column)
                    m3 = np.uint64(at + min(c + 3, outer - 1) * m_column)
                    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = np.float32(0)
                    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = np.float32(0)
                    for k in range(inner):
                        a0, a1, a2, a3 = x[x0 + k], x[x1 + k], x[x2 + k], x[x3 + k]
                        b0, b1, b2, b3 = m[m0 + k], m[m1 + k], m[m2 + k], m[m3 + k]
                        s00 += a0 * b0
                        s01 += a0 * b1
                        s02 += a0 * b2
                        s03 += a0 * b3
                        s10 += a1 * b0
                        s11 += a1 * b1
                        s12 += a1 * b2
                        s13 += a1 * b3
                        s20 += a2 * b0
                        s21 += a2 * b1
                        s22 += a2 * b2
                        s23 += a2 * b3
                        s30 += a3 * b0
                        s31 += a3 * b1
                        s32 += a3 * b2
                        s33 += a3 * b3
                    o0, o1, o2, o3 = c, min(c + 1, outer - 1), min(c + 2, outer - 1), min(c + 3, outer - 1)
                    to = min(i + 3, end - 1) * out_row  # where rows or columns are fewer, the last is written again
                    out[to + o0], out[to + o1], out[to + o2], out[to + o3] = s30, s31, s32, s33
                    to = min(i + 2, end - 1) * out_row
                    out[to + o0], out[to + o1], out[to + o2], out[to + o3] = s20, s21, s22, s23
                    to = min(i + 1, end - 1) * out_row
                    out[to + o0], out[to + o1], out[to + o2], out[to + o3] = s10, s11, s12, s13
                    to = i * out_row
                    out[to + o0], out[to + o1], out[to + o2], out[to + o3] = s00, s01, s02, s03
                i += 4
            i = end


@njit(inline="always")
def _eight(x, at):
    """Returns eight neighbouring values."""
    return x[at], x[at + 1], x[at + 2], x[at + 3], x[at + 4], x[at + 5], x[at + 6], x[at + 7]


@in_order
def _sums(numbers):
    """out[i, o] += Σ_k x[i, k] m[g, k, o]: eight k at once, of up to three rows."""
    given = carray(numbers, 14)
    pieces = given[1]
    x, x_row = carray(floats(given[2]), EVERYTHING), given[3]
    m, m_group, m_row = carray(floats(given[4]), EVERYTHING), given[5], given[6]
    out, out_row = carray(floats(given[7]), EVERYTHING), given[8]
    ends, groups = carray(integers(given[9]), EVERYTHING), given[10]
    inner, outer, n = given[11], np.uint64(given[12]), given[13]
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        i, last = n * piece // pieces, n * (piece + 1) // pieces
        group = _first_group(ends, groups, i)
        while i < last:
            while ends[group] <= i:
                group += 1
            end = min(np.int64(ends[group]), last)
            base = group * m_group
            while i < end:
                three = i + 3 <= end
                at, to = i * x_row, np.uint64(i * out_row)
                to1, to2 = to + np.uint64(out_row), to + np.uint64(2 * out_row)
                k = 0
                while k + 8 <= inner:
                    a0, a1, a2, a3, a4, a5, a6, a7 = _eight(x, at + k)
                    m0, m1 = np.uint64(base + k * m_row), np.uint64(base + (k + 1) * m_row)
                    m2, m3 = np.uint64(base + (k + 2) * m_row), np.uint64(base + (k + 3) * m_row)
                    m4, m5 = np.uint64(base + (k + 4) * m_row), np.uint64(base + (k + 5) * m_row)
                    m6, m7 = np.uint64(base + (k + 6) * m_row), np.uint64(base + (k + 7) * m_row)
                    if three:
                        b0, b1, b2, b3, b4, b5, b6, b7 = _eight(x, at + x_row + k)
                        c0, c1, c2, c3, c4, c5, c6, c7 = _eight(x, at + 2 * x_row + k)
                        for o in range(outer):
                            v0, v1, v2, v3 = m[m0 + o], m[m1 + o], m[m2 + o], m[m3 + o]
                            v4, v5, v6, v7 = m[m4 + o], m[m5 + o], m[m6 + o], m[m7 + o]
                            sum0 = a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3 + a4 * v4 + a5 * v5 + a6 * v6 + a7 * v7
                            sum1 = b0 * v0 + b1 * v1 + b2 * v2 + b3 * v3 + b4 * v4 + b5 * v5 + b6 * v6 + b7 * v7
                            sum2 = c0 * v0 + c1 * v1 + c2 * v2 + c3 * v3 + c4 * v4 + c5 * v5 + c6 * v6 + c7 * v7
                            out[to + o] += sum0
                            out[to1 + o] += sum1
                            out[to2 + o] += sum2
                    else:
                        for o in range(outer):
                            v0, v1, v2, v3 = m[m0 + o], m[m1 + o], m[m2 + o], m[m3 + o]
                            v4, v5, v6, v7 = m[m4 + o], m[m5 + o], m[m6 + o], m[m7 + o]
                            sum0 = a0 * v0 + a1 * v1 + a2 * v2 + a3 * v3 + a4 * v4 + a5 * v5 + a6 * v6 + a7 * v7
                            out[to + o] += sum0
                    k += 8
                while k < inner:
                    a0, m0 = x[at + k], np.uint64(base + k * m_row)
                    for o in range(outer):
                        out[to + o] += a0 * m[m0 + o]
                    if three:
                        b0, c0 = x[at + x_row + k], x[at + 2 * x_row + k]
                        for o in range(outer):
                            out[to1 + o] += b0 * m[m0 + o]
                            out[to2 + o] += c0 * m[m0 + o]
                    k += 1
                i += 3 if three else 1


@Kernel
def _outer(numbers):
    """out[g, a, b] = Σ_i left[i, a] right[i, b]: four rows and two a at once, in the rows' order."""
    given = carray(numbers, 11)
    pieces = given[1]
    left, left_row = carray(floats(given[2]), EVERYTHING), given[3]
    right, right_row = carray(floats(given[4]), EVERYTHING), given[5]
    out, ends, groups = carray(floats(given[6]), EVERYTHING), carray(integers(given[7]), EVERYTHING), given[8]
    rows_out, columns = given[9], np.uint64(given[10])
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for group in range(groups * piece // pieces, groups * (piece + 1) // pieces):
            i = np.int64(0)
            if group > 0:
                i = np.int64(ends[group - 1])
            end = np.int64(ends[group])
            base = group * rows_out
            for a in range(rows_out):
                to = np.uint64(base + a) * columns
                for b in range(columns):
                    out[to + b] = 0
            while i + 4 <= end:
                r0, r1 = np.uint64(i * right_row), np.uint64((i + 1) * right_row)
                r2, r3 = np.uint64((i + 2) * right_row), np.uint64((i + 3) * right_row)
                l0, l1, l2, l3 = i * left_row, (i + 1) * left_row, (i + 2) * left_row, (i + 3) * left_row
                a = 0
                while a + 2 <= rows_out:
                    p0, p1, p2, p3 = left[l0 + a], left[l1 + a], left[l2 + a], left[l3 + a]
                    q0, q1, q2, q3 = left[l0 + a + 1], left[l1 + a + 1], left[l2 + a + 1], left[l3 + a + 1]
                    to = np.uint64(base + a) * columns
                    under = to + columns
                    for b in range(columns):
                        v0, v1, v2, v3 = right[r0 + b], right[r1 + b], right[r2 + b], right[r3 + b]
                        out[to + b] += p0 * v0 + p1 * v1 + p2 * v2 + p3 * v3
                        out[under + b] += q0 * v0 + q1 * v1 + q2 * v2 + q3 * v3
                    a += 2
                if a < rows_out:
                    p0, p1, p2, p3 = left[l0 + a], left[l1 + a], left[l2 + a], left[l3 + a]
                    to = np.uint64(base + a) * columns
                    for b in range(columns):
                        out[to + b] += p0 * right[r0 + b] + p1 * right[r1 + b] + p2 * right[r2 + b] + p3 * right[r3 + b]
                i += 4
            while i < end:
                r0 = np.uint64(i * right_row)
                for a in range(rows_out):
                    p0, to = left[i * left_row + a], np.uint64(base + a) * columns
                    for b in range(columns):
                        out[to + b] += p0 * right[r0 + b]
                i += 1
