"""Products of rows sorted by group with each group's own matrix on a CPU, in Numba.

torch multiplies group by group on a CPU, by oneDNN or the BLAS it was built with, and a group costs microseconds
however small it is: with 64 experts and 10 slots a layer has 640. Here a group costs what its rows cost
(docs/decisions/0019), and the experts' frozen products are faster too (docs/decisions/0021). A piece of work is some
columns of some groups. A panel of one group's matrix is copied so that it stays in the cache, and six rows at once are
multiplied with all of it, their sums in registers. Meanwhile the next panel is fetched from memory.

Everything is fp32, without autograd. A row's products do not depend on the other rows of its group, and nothing depends
on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from numba import carray, njit, types
from torch import Tensor

from fedguild.model.kernels.cpu_tiles import DEPTH, LANES, NOTHING_IN_TURN, ROWS, VECTORS, WIDTH, copy, tile, turn
from fedguild.model.kernels.threads import EVERYTHING, Kernel, count_up, floats, integers, next_piece

PIECES_PER_THREAD = 8
"""Groups have unequal numbers of rows, so that the threads take more and smaller pieces than elsewhere."""
SHALLOW = 64
"""Rows of a matrix up to which they stay in the cache and are read where they are."""
LEAST_ROWS = 64
"""Rows that are worth a piece of their own."""
_OWN = threading.local()


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group.

    Attributes:
        ends: [G] int32, where each group's rows end.

    Raises:
        ValueError: the ends have another dtype, or are not adjacent.
    """

    ends: Tensor

    def __post_init__(self) -> None:
        _require(self.ends.dtype is torch.int32 and self.ends.is_contiguous(), "the ends are adjacent and int32")

    def rows(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """Returns [n, p·out], the rows [n, in] times their group's matrix of each of p projections.

        Args:
            rows: [n, in], common to the projections, or [n, p·in], one for each side by side.
            matrices: [G, in, out] of each projection.

        Raises:
            ValueError: sizes do not fit, as in all methods.
        """
        _, inner, outer = matrices[0].shape
        out = rows.new_empty(rows.shape[0], outer * len(matrices))
        matrices = [_adjacent(matrix) for matrix in matrices]
        strides = {matrix.stride() for matrix in matrices}
        if len(matrices) == 2 and rows.shape[1] == inner and len(strides) == 1 and matrices[0].stride(1) == 1:
            self._multiply(rows, matrices, out)
            return out
        own = rows.chunk(len(matrices), dim=1) if rows.shape[1] != inner else [rows] * len(matrices)
        for part, of_part, matrix in zip(out.split(outer, dim=1), own, matrices, strict=True):
            self._multiply(of_part, [matrix], part)
        return out

    def gathered(self, tokens: Tensor, places: Tensor, matrices: Tensor) -> Tensor:
        """Returns [n, out], the rows tokens[places] times their group's matrix, without forming the rows.

        Args:
            tokens: [N, in].
            places: [n] int64, the token of each row.
            matrices: [G, in, out].
        """
        out = tokens.new_empty(places.shape[0], matrices.shape[2])
        self._multiply(tokens, [_adjacent(matrices)], out, places=places)
        return out

    def add(self, total: Tensor, rows: Tensor, matrices: Sequence[Tensor], *, summed: bool = False) -> None:
        """Adds the rows times their group's matrix, of each of p projections, to a total, in place.

        Args:
            total: [n, p·out], its columns adjacent; [n, out] for the sum of all.
            rows: [n, p·in], the projections side by side.
            matrices: [G, in, out] of each projection.
            summed: Whether the projections' products are added up.
        """
        totals = [total] * len(matrices) if summed else total.chunk(len(matrices), dim=1)
        for one, part, matrix in zip(totals, rows.chunk(len(matrices), dim=1), matrices, strict=True):
            matrix = _adjacent(matrix)
            if matrix.stride(2) == 1 and matrix.shape[1] <= SHALLOW:
                self._add_shallow(part, matrix, one)
            else:
                self._multiply(part, [matrix], one, adds=True)

    def add_to_frozen(self, rows: Tensor, frozen: Tensor, ends: Tensor, low_rank: LowRankProduct) -> Tensor:
        """Returns [n, out], the rows times their expert's frozen matrix, plus a product of low rank of these groups.

        Args:
            rows: [n, in].
            frozen: [M, in, out], an expert's groups being G / M successive ones.
            ends: [M] int32, where each expert's rows end.
        """
        out = rows.new_empty(rows.shape[0], frozen.shape[2])
        _require(low_rank.suits(frozen.shape[2]), "the low-rank matrices suit the frozen one")
        fits = self.ends.shape[0] == low_rank.matrices[0].shape[0] and low_rank.low.shape[0] == rows.shape[0]
        _require(fits and self.ends.shape[0] % max(1, frozen.shape[0]) == 0, "groups and rows are the experts'")
        Groups(ends)._multiply(rows, [_adjacent(frozen)], out, low_rank=low_rank, small=self)
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b]."""
        right = _with_adjacent_columns(right)
        self._require_rows(left.shape[0])
        _require(left.shape[0] == right.shape[0], "left and right have as many rows")
        out = left.new_empty(self.ends.shape[0], left.shape[1], right.shape[1])
        tasks = out.shape[0] * -(-out.shape[2] // WIDTH)
        numbers = (
            left.data_ptr(),
            *left.stride(),
            right.data_ptr(),
            right.stride(0),
            out.data_ptr(),
            self.ends.data_ptr(),
            *out.shape[1:],
            tasks,
        )
        _outer.run(numbers, most_pieces=tasks, pieces_per_thread=PIECES_PER_THREAD)
        return out

    def _multiply(
        self,
        rows: Tensor,
        matrices: Sequence[Tensor],
        out: Tensor,
        *,
        adds: bool = False,
        places: Tensor | None = None,
        low_rank: LowRankProduct | None = None,
        small: Groups | None = None,
    ) -> None:
        """Writes the rows [n, in] times the matrices, one or two that are stored transposed, to [n, out], or adds them.

        Args:
            rows: [n, in].
            matrices: [G, in, out / p] of p projections.
            out: [n, out], its columns adjacent.
            adds: Whether to add to `out` instead of overwriting it.
            places: [n] int64, the place of each row; None if the rows are in order.
            low_rank: Added to the products; None for nothing.
            small: The groups of `low_rank`, within these.
        """
        rows = _with_adjacent_columns(rows)
        groups, inner, columns = matrices[0].shape
        outer, count = columns * len(matrices), out.shape[0]
        self._require_rows(count)
        if places is not None:
            _require(places.dtype is torch.int64 and places.is_contiguous(), "the places are adjacent and int64")
        _require((rows.shape[0] if places is None else places.shape[0]) == count, "there are as many rows as results")
        _require(groups == self.ends.shape[0] and rows.shape[1] == inner, "the matrices are the groups' and the rows'")
        _require(out.shape[1] == outer and _has_adjacent_columns(out), "the results are as wide as the matrices")
        if outer == 0 or count == 0:
            return
        if inner == 0:  # a tile has at least one value to sum
            rows, inner, columns = rows.new_zeros(1, 1).expand(rows.shape[0], 1), 1, outer
            matrices = [rows.new_zeros(1, 1, outer).expand(groups, 1, outer)]
        vectors = _vectors(outer)
        tasks = groups * -(-outer // (vectors * LANES))
        numbers = (
            rows.data_ptr(),
            rows.stride(0),
            matrices[0].data_ptr(),
            matrices[-1].data_ptr(),
            *matrices[0].stride(),
            out.data_ptr(),
            out.stride(0),
            self.ends.data_ptr(),
            inner,
            outer,
            columns,
            int(adds),
            tasks,
            (vectors * LANES - 1).bit_length(),
            0 if places is None else places.data_ptr(),
            _panels().data_ptr(),
            0,  # the threads that have taken a panel
            *(low_rank.numbers(small, groups, outer) if low_rank is not None and small is not None else (0,) * 11),
        )
        _PRODUCTS[vectors - 1].run(numbers, most_pieces=tasks, pieces_per_thread=PIECES_PER_THREAD)

    def _add_shallow(self, rows: Tensor, matrix: Tensor, total: Tensor) -> None:
        """Adds the rows [n, in] times their group's matrix [G, in, out], whose rows are few, to the total [n, out]."""
        rows = _with_adjacent_columns(rows)
        self._require_rows(total.shape[0])
        _require(matrix.shape[0] == self.ends.shape[0], "the matrices are the groups'")
        _require(rows.shape == (total.shape[0], matrix.shape[1]), "the rows are the matrices'")
        _require(total.shape[1] == matrix.shape[2] and _has_adjacent_columns(total), "the total is as wide")
        if 0 in matrix.shape or total.shape[0] == 0:
            return
        numbers = (
            rows.data_ptr(),
            rows.stride(0),
            matrix.data_ptr(),
            *matrix.stride()[:2],
            total.data_ptr(),
            total.stride(0),
            self.ends.data_ptr(),
            *matrix.shape,
            rows.shape[0],
        )
        _sums.run(numbers, most_pieces=-(-rows.shape[0] // LEAST_ROWS))

    def _require_rows(self, count: int) -> None:
        last = int(self.ends[-1]) if self.ends.shape[0] else 0
        _require(last == count, "the last group ends with the last row")


class LowRankProduct:
    """A low-rank product of p projections that is added to a frozen one: `low` times its group's matrix.

    Args:
        low: [n, p·r], the projections side by side.
        matrices: [G, r, out / p] of each projection, or [G, r, out] if they are added up.
        summed: Whether the projections' products are added up.
    """

    def __init__(self, low: Tensor, matrices: Sequence[Tensor], *, summed: bool = False) -> None:
        self.low, self.matrices, self.summed = _with_adjacent_columns(low), tuple(matrices), summed

    def suits(self, columns: int) -> bool:
        """Whether it can be added to a frozen product with this number of columns while that is in the cache."""
        first, count = self.matrices[0], len(self.matrices)
        alike = all(one.shape == first.shape and one.stride() == first.stride() for one in self.matrices)
        width = first.shape[2] * (1 if self.summed else count)
        whole = self.summed or count == 1 or first.shape[2] % (LANES * _vectors(columns)) == 0
        fits = width == columns and self.low.shape[1] == count * first.shape[1]
        return count <= 2 and alike and fits and whole and _has_adjacent_columns(first[0])

    def numbers(self, groups: Groups, experts: int, columns: int) -> tuple[int, ...]:
        """Returns the numbers of `_products` that describe it; the rank is the first."""
        first = self.matrices[0]
        return (
            first.shape[1],
            self.low.data_ptr(),
            self.low.stride(0),
            first.data_ptr(),
            self.matrices[-1].data_ptr(),
            *first.stride()[:2],
            groups.ends.data_ptr(),
            first.shape[0] // experts,
            columns if self.summed else first.shape[2],
            len(self.matrices) if self.summed else 1,
        )


def _require(holds: bool, what: str) -> None:
    """Raises an error if a kernel's precondition does not hold: it would read or write outside its tensors."""
    if not holds:
        raise ValueError(f"A product of groups needs that {what}.")


def _panels() -> Tensor:
    """Returns the memory for each thread's panel; always the same buffer."""
    size = torch.get_num_threads() * DEPTH * WIDTH
    if getattr(_OWN, "panels", None) is None or _OWN.panels.numel() < size:
        with torch.inference_mode(mode=False):
            _OWN.panels = torch.empty(size)
    panels: Tensor = _OWN.panels
    return panels


def _vectors(columns: int) -> int:
    """Returns the vectors in a row of a tile, for a product with this number of columns."""
    return max(1, min(VECTORS, -(-columns // LANES)))


def _adjacent(matrix: Tensor) -> Tensor:
    """Returns matrices [G, in, out] with one of the last two axes contiguous."""
    return matrix if 1 in matrix.stride()[1:] else matrix.contiguous()


def _has_adjacent_columns(rows: Tensor) -> bool:
    return rows.stride(1) == 1 or rows.shape[1] <= 1


def _with_adjacent_columns(rows: Tensor) -> Tensor:
    return rows if _has_adjacent_columns(rows) else rows.contiguous()


@njit(inline="always")
def _first_row(ends, group):
    first = types.int64(0)
    if group > 0:
        first = types.int64(ends[group - 1])
    return first


@njit(inline="always")
def _products(numbers, vectors):
    """out[i, o] (+)= Σ_k x[i, k] m[g, k, o], in order of k."""
    given = carray(numbers, 32)
    pieces = given[1]
    x, x_row = given[2], given[3]
    m, other, m_group, m_row, m_column = given[4], given[5], given[6], given[7], given[8]
    out, out_row = given[9], given[10]
    ends = carray(integers(given[11]), EVERYTHING)
    inner, outer, each, adds, tasks, shift = given[12], given[13], given[14], given[15], given[16], given[17]
    places = given[18]
    memory = given[19] + 4 * DEPTH * WIDTH * count_up(numbers, 20)
    rank, low, low_row, up, other_up = given[21], given[22], given[23], given[24], given[25]
    up_group, up_row, small_ends = given[26], given[27], carray(integers(given[28]), EVERYTHING)
    small, up_columns, parts = given[29], given[30], given[31]
    width = vectors * LANES
    blocks = (outer + width - 1) // width
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        last_task = tasks * (piece + 1) // pieces
        for task in range(tasks * piece // pieces, last_task):
            group, block = task // blocks, task % blocks
            first, end = _first_row(ends, group), types.int64(ends[group])
            if first == end:
                continue
            columns = min(width, outer - block * width)
            following = task + 1
            while following < last_task and following % blocks == 0 and _is_empty(ends, following // blocks):
                following += blocks
            if following >= last_task:
                following = task
            own = 4 * group * m_group
            at = m + own + 4 * block * width * m_column
            next_group = m + 4 * (following // blocks * m_group + following % blocks * width * m_column)
            to = out + 4 * block * width
            for k in range(0, inner, DEPTH):
                depth = min(DEPTH, inner - k)
                panel, panel_step = memory, types.int64(4 * width)
                ahead, ahead_step, ahead_shift = next_group, 4 * m_row, types.int64(NOTHING_IN_TURN)
                if k + DEPTH < inner:
                    ahead = at + 4 * (k + DEPTH) * m_row
                if m_row == 1:
                    ahead_step, ahead_shift = 4 * m_column, shift
                    for column in range(0, columns, LANES):
                        source = own + 4 * k
                        turn(
                            m + source,
                            other + source,
                            4 * m_column,
                            block * width + column,
                            each,
                            depth,
                            memory + 4 * column,
                            4 * width,
                        )
                elif columns < width:
                    panel, panel_step = at + 4 * k * m_row, 4 * m_row
                else:
                    for row in range(depth):
                        copy(vectors, at + 4 * (k + row) * m_row, memory + 4 * row * width)
                for i in range(first, end, ROWS):
                    _whole_or_part(
                        vectors, i, end - 1, places, x + 4 * k, 4 * x_row, 4, panel, panel_step, depth,
                        to, 4 * out_row, columns, adds + k, ahead, ahead_step, ahead_shift,
                    )  # fmt: skip
                    ahead, ahead_step = panel, types.int64(0)  # asked for once
            if rank == 0:
                continue
            for part in range(parts):
                number = part + block * width // up_columns
                factor = up
                if number == 1:
                    factor = other_up
                for one in range(group * small, (group + 1) * small):
                    first, end = _first_row(small_ends, one), types.int64(small_ends[one])
                    panel = factor + 4 * (one * up_group + block * width % up_columns)
                    for i in range(first, end, ROWS):
                        _whole_or_part(
                            vectors, i, end - 1, 0, low + 4 * number * rank, 4 * low_row, 4, panel, 4 * up_row, rank,
                            to, 4 * out_row, columns, 1, panel, types.int64(0), types.int64(NOTHING_IN_TURN),
                        )  # fmt: skip


@njit(inline="always")
def _whole_or_part(
    vectors, first, last, places, x, x_step, x_next, panel, panel_step, depth,
    out, out_step, columns, adds, ahead, step, shift,
):  # fmt: skip
    """Multiplies a tile, with masks if it is narrower than its vectors."""
    if columns == vectors * LANES:
        tile(
            vectors, 0, first, last, places, x, x_step, x_next, panel, panel_step, depth,
            out, out_step, columns, adds, ahead, step, shift,
        )  # fmt: skip
    else:
        tile(
            vectors, 1, first, last, places, x, x_step, x_next, panel, panel_step, depth,
            out, out_step, columns, adds, ahead, step, shift,
        )  # fmt: skip


@njit(inline="always")
def _is_empty(ends, group):
    return ends[group] == ends[group - 1]


@Kernel
def _products_1(numbers):
    _products(numbers, 1)


@Kernel
def _products_2(numbers):
    _products(numbers, 2)


@Kernel
def _products_3(numbers):
    _products(numbers, 3)


@Kernel
def _products_4(numbers):
    _products(numbers, 4)


_PRODUCTS = (_products_1, _products_2, _products_3, _products_4)
"""By the vectors of a row of a tile."""


@njit(inline="always")
def _group_of(ends, groups, row):
    low, high = 0, groups
    while low < high:
        middle = (low + high) // 2
        if ends[middle] <= row:
            low = middle + 1
        else:
            high = middle
    return low


@Kernel
def _sums(numbers):
    """out[i, o] += Σ_k x[i, k] m[g, k, o], all columns of a row before the next row."""
    given = carray(numbers, 14)
    pieces = given[1]
    x, x_row, m, m_group, m_row, out, out_row = given[2], given[3], given[4], given[5], given[6], given[7], given[8]
    ends = carray(integers(given[9]), EVERYTHING)
    groups, inner, outer, n = given[10], given[11], given[12], given[13]
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        i, last = n * piece // pieces, n * (piece + 1) // pieces
        group = _group_of(ends, groups, i)
        while i < last:
            while ends[group] <= i:
                group += 1
            end = min(types.int64(ends[group]), last)
            while i < end:
                for column in range(0, outer, WIDTH):
                    panel, columns = m + 4 * (group * m_group + column), min(WIDTH, outer - column)
                    _whole_or_part(
                        VECTORS, i, end - 1, 0, x, 4 * x_row, 4, panel, 4 * m_row, inner,
                        out + 4 * column, 4 * out_row, columns, 1, panel, types.int64(0), types.int64(NOTHING_IN_TURN),
                    )  # fmt: skip
                i += ROWS
            i = end


@Kernel
def _outer(numbers):
    """out[g, a, b] = Σ_i left[i, a] right[i, b], in the rows' order."""
    given = carray(numbers, 12)
    pieces = given[1]
    left, left_row, left_column = given[2], given[3], given[4]
    right, right_row, out = given[5], given[6], given[7]
    ends = carray(integers(given[8]), EVERYTHING)
    rows_out, outer, tasks = given[9], given[10], given[11]
    blocks = (outer + WIDTH - 1) // WIDTH
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        for task in range(tasks * piece // pieces, tasks * (piece + 1) // pieces):
            group, block = task // blocks, task % blocks
            first, end = _first_row(ends, group), types.int64(ends[group])
            columns = min(WIDTH, outer - block * WIDTH)
            to = out + 4 * (group * rows_out * outer + block * WIDTH)
            if first == end:
                nothing = carray(floats(to), EVERYTHING)
                for a in range(rows_out):
                    for b in range(columns):
                        nothing[a * outer + b] = 0
                continue
            at, panel = left + 4 * first * left_row, right + 4 * (first * right_row + block * WIDTH)
            for a in range(0, rows_out, ROWS):
                _whole_or_part(
                    VECTORS, a, rows_out - 1, 0, at, 4 * left_column, 4 * left_row, panel, 4 * right_row, end - first,
                    to, 4 * outer, columns, 0, panel, 0, NOTHING_IN_TURN,
                )  # fmt: skip
