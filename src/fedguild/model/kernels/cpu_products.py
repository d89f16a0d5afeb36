"""Products of rows sorted by group with each group's own large matrix on a CPU, in Numba and LLVM's vectors.

The matrices are the experts' frozen weights. torch multiplies group by group, by oneDNN or the BLAS it was built with,
which divide every single product among the threads and write it where it has to be copied from. Here the threads share
the groups (docs/decisions/0021): a piece of work is some groups' columns, a panel of one group's matrix is copied to
where it stays in the cache, and six rows at once meet all of it, their sums in registers. While they do, the next panel
is fetched from memory.

All is for fp32. A row's products depend neither on the other rows of its group nor on the number of threads.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import carray, njit, types
from numba.core import cgutils
from numba.extending import intrinsic
from torch import Tensor

from fedguild.model.kernels.threads import EVERYTHING, Kernel, integers, next_piece

LONG, FLOAT, INDEX = ir.IntType(64), ir.FloatType(), ir.IntType(32)
PLACE = types.int64
"""An address, or a number of bytes or of values."""
ROWS = 6
"""Rows whose sums are in registers at the same time."""
DEPTH = 1024
"""Rows of a panel: the values that a sum takes before it is put down, and taken up again for the next panel."""
LINE = 64
"""Bytes of a cache line."""
PIECES_PER_THREAD = 8
"""Groups have unequal numbers of rows, so that the threads take more and smaller pieces than elsewhere."""


def _registers() -> tuple[int, int]:
    """Returns the fp32 values of a vector register of this CPU, and how many of them a row's sums take."""
    try:
        features = llvmlite.binding.get_host_cpu_features()
    except RuntimeError:  # LLVM does not know this CPU
        features = {}
    if features.get("avx512f"):
        return 16, 4
    if features.get("avx2"):
        return 8, 2
    return 4, 4 if features.get("neon") else 2


LANES, VECTORS = _registers()
VECTOR = ir.VectorType(FLOAT, LANES)
WIDTH = LANES * VECTORS
"""Columns of a panel."""


def takes(rows: Tensor, inner: int, outer: int) -> bool:
    """Whether `products` computes rows [n, in] times matrices [G, in, out] of these sizes."""
    return rows.shape[0] > 0 and rows.stride(1) == 1 and inner % LANES == 0 and outer % LANES == 0


def products(rows: Tensor, matrices: Tensor, ends: Tensor, total: Tensor | None = None) -> Tensor:
    """Returns [n, out], the rows times their group's matrix; with a total, that is added up in it.

    Args:
        rows: [n, in], sorted by group, as `takes` says.
        matrices: [G, in, out], the values of one side adjacent.
        ends: [G] int32, where each group's rows end.
        total: [n, out], its columns adjacent.
    """
    groups, inner, outer = matrices.shape
    if 1 not in matrices.stride()[1:]:
        matrices = matrices.contiguous()
    out = rows.new_empty(rows.shape[0], outer) if total is None else total
    assert out.stride(1) == 1
    kernel, width = (_wide, WIDTH) if outer % WIDTH == 0 else (_narrow, LANES)
    tasks = groups * (outer // width)
    numbers = (
        rows.data_ptr(),
        rows.stride(0),
        matrices.data_ptr(),
        *matrices.stride(),
        out.data_ptr(),
        out.stride(0),
        ends.data_ptr(),
        inner,
        outer,
        int(total is not None),
        tasks,
    )
    kernel.run(numbers, most_pieces=tasks, pieces_per_thread=PIECES_PER_THREAD)
    return out


@intrinsic(prefer_literal=True)
def _panel_memory(context: Any, vectors: Any) -> Any:
    """Returns the address of a thread's own memory for a panel [DEPTH, vectors · LANES]."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        with builder.goto_entry_block():
            place = builder.alloca(ir.ArrayType(FLOAT, DEPTH * LANES * vectors.literal_value))
            place.align = LINE
        return builder.ptrtoint(place, LONG)

    return PLACE(vectors), build


@intrinsic
def _turn(context: Any, source: Any, source_step: Any, goal: Any, goal_step: Any) -> Any:
    """Copies LANES rows of LANES values, `source_step` bytes apart, as columns to rows `goal_step` bytes apart."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, source_step, goal, goal_step = arguments
        rows = [_load(builder, _at(builder, source, source_step, row)) for row in range(LANES)]
        width = 1
        while width < LANES:  # swap the off-diagonal blocks of `width` of all blocks of twice that
            upper = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
            lower = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
            for row in (row for row in range(LANES) if not row & width):
                pair = rows[row], rows[row + width]
                rows[row], rows[row + width] = (
                    builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(INDEX, LANES), mask))
                    for mask in (upper, lower)
                )
            width *= 2
        for number, row in enumerate(rows):
            _store(builder, row, _at(builder, goal, goal_step, number))
        return context.get_dummy_value()

    return types.void(PLACE, PLACE, PLACE, PLACE), build


@intrinsic(prefer_literal=True)
def _copy(context: Any, vectors: Any, source: Any, goal: Any) -> Any:
    """Copies `vectors` vectors."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, goal = arguments
        for number in range(vectors.literal_value):
            _store(builder, _load(builder, source, number), goal, number)
        return context.get_dummy_value()

    return types.void(vectors, PLACE, PLACE), build


@intrinsic(prefer_literal=True)
def _tile(
    context: Any,
    vectors: Any,
    x: Any,
    x_step: Any,
    x_last: Any,
    panel: Any,
    depth: Any,
    out: Any,
    out_step: Any,
    out_last: Any,
    adds: Any,
    ahead: Any,
    ahead_step: Any,
    ahead_rows: Any,
) -> Any:
    """Multiplies ROWS rows x with a panel [depth, vectors · LANES]; addresses and steps are in bytes.

    Rows beyond the last are the last once more, and written with the same values. With `adds` the product is added to
    what is there. Meanwhile the cache lines of the next panel are asked for: `ahead_rows` (a power of 2) of its rows
    in turn, as many bytes of one as a panel is wide.
    """
    vectors = vectors.literal_value

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, x, x_step, x_last, panel, depth, out, out_step, out_last, adds, ahead, ahead_step, ahead_rows = arguments
        from_rows = [_no_later(builder, _at(builder, x, x_step, row), x_last) for row in range(ROWS)]
        to_rows = [_no_later(builder, _at(builder, out, out_step, row), out_last) for row in range(ROWS)]
        zero = ir.Constant(VECTOR, [0.0] * LANES)
        before, loop, added, written = builder.block, *map(builder.append_basic_block, ("tile", "add", "write"))
        builder.branch(loop)

        builder.position_at_end(loop)
        k = builder.phi(LONG)
        sums = [[builder.phi(VECTOR) for _ in range(vectors)] for _ in range(ROWS)]
        row = builder.add(panel, builder.mul(k, LONG(4 * LANES * vectors)))
        values = [_load(builder, row, number) for number in range(vectors)]
        place = builder.mul(k, LONG(4))
        products = []
        for own, address in zip(sums, from_rows, strict=True):
            factor = _everywhere(builder, builder.load(_pointer(builder, builder.add(address, place), FLOAT)))
            products.append([_fused(builder, factor, value, total) for value, total in zip(values, own, strict=True)])
        _ask(builder, k, ahead, ahead_step, ahead_rows, 4 * LANES * vectors)
        after = builder.add(k, LONG(1))
        k.add_incoming(LONG(0), before)
        k.add_incoming(after, loop)
        for own, row in zip(sums, products, strict=True):
            for phi, new in zip(own, row, strict=True):
                phi.add_incoming(zero, before)
                phi.add_incoming(new, loop)
        ended = builder.append_basic_block("ended")
        builder.cbranch(builder.icmp_signed("<", after, depth), loop, ended)

        builder.position_at_end(ended)
        builder.cbranch(builder.icmp_signed("!=", adds, LONG(0)), added, written)
        builder.position_at_end(added)
        totals = [
            [builder.fadd(_load(builder, to, number), new) for number, new in enumerate(row)]
            for to, row in zip(to_rows, products, strict=True)
        ]
        builder.branch(written)
        builder.position_at_end(written)
        results = []
        for row, total_row in zip(products, totals, strict=True):
            for new, total in zip(row, total_row, strict=True):
                phi = builder.phi(VECTOR)
                phi.add_incoming(new, ended)
                phi.add_incoming(total, added)
                results.append(phi)
        for number, result in enumerate(results):
            _store(builder, result, to_rows[number // vectors], number % vectors)
        return context.get_dummy_value()

    return types.void(types.IntegerLiteral(vectors), *[PLACE] * 12), build


def _at(builder: Any, base: Any, step: Any, number: int) -> Any:
    """Returns an address `number` steps beyond the base."""
    return builder.add(base, builder.mul(step, LONG(number)))


def _no_later(builder: Any, address: Any, last: Any) -> Any:
    return builder.select(builder.icmp_signed("<", address, last), address, last)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _load(builder: Any, address: Any, number: int = 0) -> Any:
    """Returns the vector that is `number` vectors beyond an address."""
    value = builder.load(_pointer(builder, builder.add(address, LONG(4 * LANES * number)), VECTOR))
    value.align = 4
    return value


def _store(builder: Any, value: Any, address: Any, number: int = 0) -> None:
    """Writes a vector `number` vectors beyond an address."""
    builder.store(value, _pointer(builder, builder.add(address, LONG(4 * LANES * number)), VECTOR)).align = 4


def _everywhere(builder: Any, value: Any) -> Any:
    """Returns a vector whose values are all the same."""
    nothing = ir.Constant(VECTOR, ir.Undefined)
    first = builder.insert_element(nothing, value, INDEX(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INDEX, LANES), [0] * LANES))


def _fused(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Returns left · right + total, rounded once."""
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [left, right, total])


def _ask(builder: Any, k: Any, ahead: Any, step: Any, rows: Any, width: int) -> None:
    """Asks for the cache lines of `width` bytes of row k % rows, from byte k // rows · width of it on."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INDEX, INDEX, INDEX])
    ask = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    row, place = builder.and_(k, builder.sub(rows, LONG(1))), builder.udiv(k, rows)
    first = builder.add(builder.add(ahead, builder.mul(row, step)), builder.mul(place, LONG(width)))
    for line in range(0, width, LINE):
        address = builder.inttoptr(builder.add(first, LONG(line)), byte)
        builder.call(ask, [address, INDEX(0), INDEX(2), INDEX(1)])


@njit(inline="always")
def _work(numbers, vectors):
    """out[i, o] = Σ_k x[i, k] m[g, k, o], in order of k."""
    given = carray(numbers, 15)
    pieces = given[1]
    x, x_row = given[2], given[3]
    m, m_group, m_row, m_column = given[4], given[5], given[6], given[7]
    out, out_row = given[8], given[9]
    ends = carray(integers(given[10]), EVERYTHING)
    inner, outer, adds, tasks = given[11], given[12], given[13], given[14]
    width = vectors * LANES
    blocks = outer // width
    panel = _panel_memory(vectors)
    while True:
        piece = next_piece(numbers)
        if piece >= pieces:
            break
        last_task = tasks * (piece + 1) // pieces
        for task in range(tasks * piece // pieces, last_task):
            group, block = task // blocks, task % blocks
            first, end = types.int64(0), types.int64(ends[group])
            if group > 0:
                first = types.int64(ends[group - 1])
            if first == end:
                continue
            following = task + 1
            while following < last_task and following % blocks == 0 and _is_empty(ends, following // blocks):
                following += blocks
            if following >= last_task:
                following = task
            own = m + 4 * (group * m_group + block * width * m_column)
            following_group = m + 4 * (following // blocks * m_group + following % blocks * width * m_column)
            for k in range(0, inner, DEPTH):
                depth = min(DEPTH, inner - k)
                if m_row == 1:
                    for column in range(0, width, LANES):
                        for row in range(0, depth, LANES):
                            at = own + 4 * (k + row + column * m_column)
                            _turn(at, 4 * m_column, panel + 4 * (row * width + column), 4 * width)
                else:
                    for row in range(depth):
                        _copy(vectors, own + 4 * (k + row) * m_row, panel + 4 * row * width)
                ahead, ahead_step, ahead_rows = following_group, 4 * m_row, DEPTH
                if k + DEPTH < inner:
                    ahead = own + 4 * (k + DEPTH) * m_row
                if m_row == 1:
                    ahead_step, ahead_rows = 4 * m_column, width
                to = out + 4 * block * width
                for i in range(first, end, ROWS):
                    _tile(
                        vectors,
                        x + 4 * (i * x_row + k),
                        4 * x_row,
                        x + 4 * ((end - 1) * x_row + k),
                        panel,
                        depth,
                        to + 4 * i * out_row,
                        4 * out_row,
                        to + 4 * (end - 1) * out_row,
                        adds + k,
                        ahead,
                        ahead_step,
                        ahead_rows,
                    )
                    ahead, ahead_step, ahead_rows = panel, 0, DEPTH  # asked for once; the panel is there


@njit(inline="always")
def _is_empty(ends, group):
    """Returns whether a group after the first has no rows."""
    return ends[group] == ends[group - 1]


@Kernel
def _wide(numbers):
    """All vectors of a panel."""
    _work(numbers, VECTORS)


@Kernel
def _narrow(numbers):
    """One vector, where the columns are no multiple of more."""
    _work(numbers, 1)
