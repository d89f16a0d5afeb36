"""Products of rows sorted by group with each group's own matrix on a CPU, in Numba.

torch multiplies group by group on a CPU, by oneDNN or the BLAS it was built with, and a group costs microseconds
however small it is: with 64 experts and 10 slots a layer has 640. Here a group costs what its rows cost
(docs/decisions/0019), and the experts' frozen products are a third to six times as fast (docs/decisions/0021): a piece
of work is some columns of some groups, a panel of one group's matrix is copied to where it stays in the cache, and six
rows at once meet all of it, their sums in registers. While they do, the next panel is fetched from memory.

All is for fp32. A row's products do not depend on the other rows of its group, and nothing on the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from numba import carray, njit, types
from torch import Tensor

from fedguild.model.kernels.cpu_tiles import DEPTH, LANES, ROWS, VECTORS, WIDTH, copy, panel_memory, tile, turn
from fedguild.model.kernels.threads import EVERYTHING, Kernel, floats, integers, next_piece

PIECES_PER_THREAD = 8
"""Groups have unequal numbers of rows, so that the threads take more and smaller pieces than elsewhere."""
SHALLOW = 64
"""Rows of a matrix up to which they stay in the cache and are read where they are."""
LEAST_ROWS = 64
"""Rows that are worth a piece of their own."""


@dataclass(frozen=True)
class Groups:
    """Rows sorted by group.

    Attributes:
        ends: [G] int32, where each group's rows end.
    """

    ends: Tensor

    def gathered(self, tokens: Tensor, places: Tensor, matrices: Tensor) -> Tensor:
        """Returns [n, out], the rows tokens[places] times their group's matrix, without the rows themselves.

        Args:
            tokens: [N, in].
            places: [n] int64, where each row is in the tokens.
            matrices: [G, in, out].
        """
        out = tokens.new_empty(places.shape[0], matrices.shape[2])
        self._multiply(tokens, [_adjacent(matrices)], out, places=places)
        return out

    def rows(self, rows: Tensor, matrices: Sequence[Tensor]) -> Tensor:
        """Returns [n, p·out], the rows [n, in] times their group's matrix of each of p projections.

        Args:
            rows: [n, in], common to the projections, or [n, p·in], theirs side by side.
            matrices: [G, in, out] of each projection.
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
            matrix = _adjacent(matrix)
            if matrix.stride(2) == 1 and matrix.shape[1] <= SHALLOW:
                self._add_shallow(part, matrix, one)
            else:
                self._multiply(part, [matrix], one, adds=True)

    def add_to_frozen(
        self,
        rows: Tensor,
        frozen: Tensor,
        ends: Tensor,
        low: Tensor,
        matrices: Sequence[Tensor],
        *,
        summed: bool = False,
    ) -> Tensor:
        """Returns [n, out], the rows times their expert's frozen matrix, with what `add` adds to it from `low`.

        Args:
            rows: [n, in].
            frozen: [M, in, out], an expert's groups being G / M successive ones.
            ends: [M] int32, where each expert's rows end.
            low: [n, p·r], the projections' side by side.
            matrices: [G, r, out / p] of each projection, or [G, r, out] if they are added up.
            summed: Whether the projections' products are added up.
        """
        out = rows.new_empty(rows.shape[0], frozen.shape[2])
        Groups(ends)._multiply(rows, [_adjacent(frozen)], out, low_rank=(self.ends, low, matrices, summed))
        return out

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b]."""
        right = _contiguous_rows(right)
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
        low_rank: tuple[Tensor, Tensor, Sequence[Tensor], bool] | None = None,
        places: Tensor | None = None,
    ) -> None:
        """Writes the rows [n, in] times the matrices, one or two that are stored transposed, to [n, out], or adds them.

        Args:
            rows: [n, in].
            matrices: [G, in, out / p] of p projections.
            out: [n, out], its columns adjacent.
            adds: Whether the products are added to what is there.
            low_rank: What `add_to_frozen` adds to them: the ends of the smaller groups, low, matrices, and summed.
            places: [n] int64, where each row is; None where the rows are in their order.
        """
        assert out.stride(1) == 1
        rows = _contiguous_rows(rows)
        groups, inner, each = matrices[0].shape
        outer = each * len(matrices)
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
            each,
            int(adds),
            tasks,
            (vectors * LANES - 1).bit_length(),
            *_low_rank_numbers(groups, outer, low_rank),
            0 if places is None else places.data_ptr(),
        )
        _PRODUCTS[vectors - 1].run(numbers, most_pieces=tasks, pieces_per_thread=PIECES_PER_THREAD)

    def _add_shallow(self, rows: Tensor, matrix: Tensor, total: Tensor) -> None:
        """Adds the rows [n, in] times their group's matrix [G, in, out], whose rows are few, to the total [n, out]."""
        assert total.stride(1) == 1
        rows = _contiguous_rows(rows)
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


def suits_frozen(columns: int, matrices: Sequence[Tensor], *, summed: bool) -> bool:
    """Whether `add_to_frozen` takes low-rank matrices [G, r, a] beside a frozen one with so many columns."""
    ups = [matrix for matrix in matrices if matrix.stride(2) == 1 and matrix.stride() == matrices[0].stride()]
    whole = summed or len(matrices) == 1 or matrices[0].shape[2] % (LANES * _vectors(columns)) == 0
    return len(ups) == len(matrices) <= 2 and whole


def _low_rank_numbers(
    groups: int, outer: int, low_rank: tuple[Tensor, Tensor, Sequence[Tensor], bool] | None
) -> tuple[int, ...]:
    """Returns the numbers of `_products` that say what is added to them: the rank is 0 for nothing."""
    if low_rank is None:
        return (0,) * 11
    ends, low, matrices, summed = low_rank
    low = _contiguous_rows(low)
    size, rank, columns = matrices[0].shape
    return (
        rank,
        low.data_ptr(),
        low.stride(0),
        matrices[0].data_ptr(),
        matrices[-1].data_ptr(),
        *matrices[0].stride()[:2],
        ends.data_ptr(),
        size // groups,
        outer if summed else columns,
        len(matrices) if summed else 1,
    )


def _vectors(columns: int) -> int:
    """Returns the vectors of a row of a tile, of a product with so many columns."""
    return max(1, min(VECTORS, -(-columns // LANES)))


def _adjacent(matrix: Tensor) -> Tensor:
    """Returns matrices [G, in, out] with the values of one side adjacent, and the groups' alike."""
    return matrix if 1 in matrix.stride()[1:] else matrix.contiguous()


def _contiguous_rows(rows: Tensor) -> Tensor:
    return rows if rows.stride(1) == 1 else rows.contiguous()


@njit(inline="always")
def _first_row(ends, group):
    """Returns where a group's rows begin."""
    first = types.int64(0)
    if group > 0:
        first = types.int64(ends[group - 1])
    return first


@njit(inline="always")
def _products(numbers, vectors):
    """out[i, o] (+)= Σ_k x[i, k] m[g, k, o], in order of k."""
    given = carray(numbers, 30)
    pieces = given[1]
    x, x_row = given[2], given[3]
    m, other, m_group, m_row, m_column = given[4], given[5], given[6], given[7], given[8]
    out, out_row = given[9], given[10]
    ends = carray(integers(given[11]), EVERYTHING)
    inner, outer, each, adds, tasks, shift = given[12], given[13], given[14], given[15], given[16], given[17]
    rank, low, low_row, up, other_up, up_group, up_row = (
        given[18], given[19], given[20], given[21], given[22], given[23], given[24],
    )  # fmt: skip
    small_ends, small, up_columns, parts = carray(integers(given[25]), EVERYTHING), given[26], given[27], given[28]
    places = given[29]
    width = vectors * LANES
    blocks = (outer + width - 1) // width
    memory = panel_memory()
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
                ahead, ahead_step, ahead_shift = next_group, 4 * m_row, types.int64(62)
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
                            to, 4 * out_row, columns, 1, panel, types.int64(0), types.int64(62),
                        )  # fmt: skip


@njit(inline="always")
def _whole_or_part(
    vectors, first, last, places, x, x_step, x_next, panel, panel_step, depth,
    out, out_step, columns, adds, ahead, step, shift,
):  # fmt: skip
    """Multiplies a tile, with masks where it is not as wide as its vectors."""
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
    """Returns whether a group after the first has no rows."""
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
def _sums(numbers):
    """out[i, o] += Σ_k x[i, k] m[g, k, o], all columns of some rows after the other."""
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
                        out + 4 * column, 4 * out_row, columns, 1, panel, types.int64(0), types.int64(62),
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
                    to, 4 * outer, columns, 0, panel, 0, 62,
                )  # fmt: skip
