"""Products of rows sorted by group with each group's own small matrices on a CPU, in Numba.

torch's `grouped_mm` multiplies group by group on a CPU, at some ten microseconds a group whatever its size: with 64
experts and 10 slots, a layer's low-rank products cost more than its frozen ones. Here a group costs what its rows cost.
The interface is that of the kernels for a GPU (`segmented`): `Groups.rows` multiplies, scales and adds; `Groups.outer` is for
the gradients of A and B. `scatter_add` adds rows of experts to their tokens.

All are for fp32. A row's result does not depend on the other rows of its group, nor on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numba import carray, njit
from torch import Tensor

from fedguild.model.kernels.threads import Kernel, floats, integers, next_piece

EVERYTHING = 1 << 40
"""More elements than an array has: a kernel is given no sizes of arrays, and keeps within them."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group.

    Attributes:
        ends: [G] int32, where each group's rows end.
    """

    ends: Tensor

    def rows(
        self,
        rows: Tensor,
        matrices: Sequence[Tensor],
        *,
        total: Tensor | None = None,
        scale: Tensor | None = None,
        summed: bool = False,
    ) -> Tensor:
        """Returns the rows times their group's matrix, of each of p projections.

        Args:
            rows: [n, in], common to the projections, or [n, p·in], theirs side by side.
            matrices: [G, in, out] of each projection, stored as that or as [G, out, in].
            total: [n, p·out] that the product is added to in place; None for zeros.
            scale: [S, out] factor on the columns, for group expert · S + slot that of its slot; 0 masks a column.
            summed: Whether the projections' products are added up; `total` and the result are then [n, out].

        Returns:
            `total`, or a new tensor.
        """
        groups, inner, outer = matrices[0].shape
        columns = outer if summed else outer * len(matrices)
        by_columns = matrices[0].stride(1) == 1 and inner > 1
        if total is None:
            out = rows.new_empty(rows.shape[0], columns) if by_columns else rows.new_zeros(rows.shape[0], columns)
        else:
            out = total
        rows = rows if rows.stride(1) == 1 else rows.contiguous()
        factor = None if scale is None else scale.contiguous()
        own_rows = rows.shape[1] != inner
        for part, matrix in enumerate(matrices):
            matrix = _dense(matrix)
            along, across = (matrix.stride(1), matrix.stride(2)) if by_columns else (matrix.stride(2), matrix.stride(1))
            assert along == 1 or by_columns or outer == 1
            adds = total is not None or (summed and part > 0)
            numbers = (
                rows.data_ptr() + part * own_rows * inner * 4,
                rows.stride(0),
                matrix.data_ptr(),
                matrix.stride(0),
                across,
                out.data_ptr() + (0 if summed else part * outer * out.stride(1) * 4),
                out.stride(0),
                self.ends.data_ptr(),
                groups,
                inner,
                outer,
                rows.shape[0],
                0 if factor is None else factor.data_ptr(),
                1 if factor is None else factor.shape[0],
                adds,
            )
            (_dots if by_columns else _sums).run(numbers, most_pieces=-(-rows.shape[0] // 64))
        if factor is not None and not by_columns:
            raise NotImplementedError("a scale goes with matrices stored as [G, out, in]")
        return out

    def outer(self, left: Tensor, right: Tensor, *, weight: Tensor | None = None) -> Tensor:
        """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b].

        Args:
            left: [n, a].
            right: [n, b].
            weight: [n, 1] factor on each row.
        """
        groups, a, b = self.ends.shape[0], left.shape[1], right.shape[1]
        left = left * weight if weight is not None else left if left.stride(1) == 1 else left.contiguous()
        right = right if right.stride(1) == 1 else right.contiguous()
        out = left.new_empty(groups, a, b)
        numbers = (
            left.data_ptr(),
            left.stride(0),
            right.data_ptr(),
            right.stride(0),
            out.data_ptr(),
            self.ends.data_ptr(),
            groups,
            a,
            b,
        )
        _outer.run(numbers, most_pieces=groups)
        return out


def scatter_add(total: Tensor, rows: Tensor, at: Tensor, weight: Tensor | None = None) -> None:
    """Adds rows [n, b], times their weight [n], to the rows of the total [N, b] that `at` [n] names, in their order."""
    total_rows, columns = total.shape
    assert total.stride(1) == rows.stride(1) == 1
    at = at.to(torch.int32)
    factor = None if weight is None else weight.contiguous()
    numbers = (
        total.data_ptr(),
        total.stride(0),
        rows.data_ptr(),
        rows.stride(0),
        at.data_ptr(),
        rows.shape[0],
        columns,
        0 if factor is None else factor.data_ptr(),
    )
    _scatter.run(numbers, most_pieces=-(-columns // 64))


def _dense(matrix: Tensor) -> Tensor:
    """Returns the matrices [G, a, b] with one of their two inner axes contiguous."""
    return matrix if 1 in matrix.stride()[1:] else matrix.contiguous()


@njit(inline="always")  # type: ignore[untyped-decorator]
def _first_group(ends, groups, row):  # type: ignore[no-untyped-def]
    """Returns the group of a row."""
    low, high = 0, groups
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= row:
            low = middle + 1
        else:
            high = middle
    return low


@njit  # type: ignore[untyped-decorator]
def _put(out, at, columns, factors, factor, adds, s0, s1, s2, s3):  # type: ignore[no-untyped-def]
    """Writes up to four neighbouring values of a row, scaled; a factor of 0 masks whatever the value is."""
    if factor >= 0:
        s0 = s0 * factors[factor] if factors[factor] != 0 else np.float32(0)
        if columns > 1:
            s1 = s1 * factors[factor + 1] if factors[factor + 1] != 0 else np.float32(0)
        if columns > 2:
            s2 = s2 * factors[factor + 2] if factors[factor + 2] != 0 else np.float32(0)
        if columns > 3:
            s3 = s3 * factors[factor + 3] if factors[factor + 3] != 0 else np.float32(0)
    if adds:
        s0 += out[at]
        if columns > 1:
            s1 += out[at + 1]
        if columns > 2:
            s2 += out[at + 2]
        if columns > 3:
            s3 += out[at + 3]
    out[at] = s0
    if columns > 1:
        out[at + 1] = s1
    if columns > 2:
        out[at + 2] = s2
    if columns > 3:
        out[at + 3] = s3


@Kernel
def _dots(numbers):  # type: ignore[no-untyped-def]
    """out[i, o] (+)= scale[slot, o] · Σ_k x[i, k] m[g, o, k]: four rows and four columns at once."""
    given = carray(numbers, 17)
    pieces = given[1]
    x, x_row = carray(floats(given[2]), EVERYTHING), given[3]
    m, m_group, m_column = carray(floats(given[4]), EVERYTHING), given[5], given[6]
    out, out_row = carray(floats(given[7]), EVERYTHING), given[8]
    ends, groups = carray(integers(given[9]), EVERYTHING), given[10]
    inner, outer, n = np.uint64(given[11]), given[12], given[13]
    factors, slots, adds = carray(floats(given[14]), EVERYTHING), given[15], given[16] != 0
    scaled = given[14] != 0
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
                rows = end - i
                x0, x1 = np.uint64(i * x_row), np.uint64(min(i + 1, end - 1) * x_row)
                x2, x3 = np.uint64(min(i + 2, end - 1) * x_row), np.uint64(min(i + 3, end - 1) * x_row)
                for c in range(0, outer, 4):
                    columns, at = outer - c, group * m_group
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
                    to, factor = i * out_row + c, (group % slots) * outer + c if scaled else -1
                    _put(out, to, columns, factors, factor, adds, s00, s01, s02, s03)
                    if rows > 1:
                        _put(out, to + out_row, columns, factors, factor, adds, s10, s11, s12, s13)
                    if rows > 2:
                        _put(out, to + 2 * out_row, columns, factors, factor, adds, s20, s21, s22, s23)
                    if rows > 3:
                        _put(out, to + 3 * out_row, columns, factors, factor, adds, s30, s31, s32, s33)
                i += 4
            i = end


@Kernel
def _sums(numbers):  # type: ignore[no-untyped-def]
    """out[i, o] += Σ_k x[i, k] m[g, k, o]: eight k at once."""
    given = carray(numbers, 17)
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
            to, at = np.uint64(i * out_row), i * x_row
            k = 0
            while k + 8 <= inner:
                a0, a1, a2, a3 = x[at + k], x[at + k + 1], x[at + k + 2], x[at + k + 3]
                a4, a5, a6, a7 = x[at + k + 4], x[at + k + 5], x[at + k + 6], x[at + k + 7]
                m0 = np.uint64(group * m_group + k * m_row)
                step = np.uint64(m_row)
                m1, m2, m3 = m0 + step, m0 + np.uint64(2) * step, m0 + np.uint64(3) * step
                m4, m5 = m0 + np.uint64(4) * step, m0 + np.uint64(5) * step
                m6, m7 = m0 + np.uint64(6) * step, m0 + np.uint64(7) * step
                for o in range(outer):
                    low = a0 * m[m0 + o] + a1 * m[m1 + o] + a2 * m[m2 + o] + a3 * m[m3 + o]
                    high = a4 * m[m4 + o] + a5 * m[m5 + o] + a6 * m[m6 + o] + a7 * m[m7 + o]
                    out[to + o] += low + high
                k += 8
            while k < inner:
                a0, m0 = x[at + k], np.uint64(group * m_group + k * m_row)
                for o in range(outer):
                    out[to + o] += a0 * m[m0 + o]
                k += 1
            i += 1


@Kernel
def _outer(numbers):  # type: ignore[no-untyped-def]
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


@Kernel
def _scatter(numbers):  # type: ignore[no-untyped-def]
    """total[at[i], b] += weight[i] · rows[i, b]; a piece is a range of columns."""
    given = carray(numbers, 10)
    pieces = given[1]
    total, total_row = carray(floats(given[2]), EVERYTHING), given[3]
    rows, row_step = carray(floats(given[4]), EVERYTHING), given[5]
    at, n, columns = carray(integers(given[6]), EVERYTHING), given[7], given[8]
    weight, weighted = carray(floats(given[9]), EVERYTHING), given[9] != 0
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        first = columns * piece // pieces
        width = np.uint64(columns * (piece + 1) // pieces - first)
        for i in range(n):
            to, source = np.uint64(at[i] * total_row + first), np.uint64(i * row_step + first)
            factor = weight[i] if weighted else np.float32(1)
            for b in range(width):
                total[to + b] += factor * rows[source + b]
