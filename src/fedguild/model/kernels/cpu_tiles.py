"""The inner loop of the CPU's products, and the copying before it: LLVM's vectors, for kernels in Numba.

Numba's own loops cannot keep a tile of sums in registers; these functions name the vectors explicitly. Addresses are
integers, steps are in bytes, and all values are fp32.
"""

from __future__ import annotations

from typing import Any

import llvmlite.binding
import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LONG, FLOAT, INDEX, BIT = ir.IntType(64), ir.FloatType(), ir.IntType(32), ir.IntType(1)
PLACE = types.int64
"""An address, or a number of bytes or of values."""
ROWS = 6
"""Rows of a tile, whose sums are in registers at the same time."""
DEPTH = 1024
"""Rows of a panel: the values that a sum takes before it is put down, and taken up again for the next panel."""
LINE = 64
"""Bytes of a cache line."""
NOTHING_IN_TURN = 62
"""The logarithm of a number of rows that is larger than any: no row is asked for twice."""


def registers() -> tuple[int, int]:
    """Returns the fp32 values of a vector register of this CPU, and the most registers that a row of a tile uses."""
    known = features()
    if "avx512f" in known:
        return 16, 4
    if "avx2" in known:
        return 8, 2
    return 4, 4 if "neon" in known else 2


def features() -> frozenset[str]:
    """Returns the features of the CPU that Numba compiles for, by LLVM's names."""
    if numba.config.CPU_NAME or numba.config.CPU_FEATURES:
        given = str(numba.config.CPU_FEATURES or "").split(",")
        return frozenset(name[1:] for name in given if name.startswith("+"))
    try:
        return frozenset(name for name, has in llvmlite.binding.get_host_cpu_features().items() if has)
    except RuntimeError:  # LLVM does not know this CPU
        return frozenset()


LANES, VECTORS = registers()
IS_FUSED = bool(features() & {"fma", "avx512f", "neon"})
"""Whether the CPU multiplies and adds in one instruction, without which these tiles are slower than a library."""
VECTOR, MASK = ir.VectorType(FLOAT, LANES), ir.VectorType(BIT, LANES)
WIDTH = LANES * VECTORS
"""Columns of the widest tile."""


@intrinsic
def turn(
    context: Any, source: Any, other: Any, step: Any, column: Any, each: Any, depth: Any, goal: Any, goal_step: Any
) -> Any:
    """Transposes the first values of LANES columns to rows of LANES values; pads with rows of 0 to a multiple of LANES.

    Args:
        source: The first value of column 0.
        other: The first value of column `each`; columns from 2 · `each` on repeat the last.
        step: From one column to the next.
        column: The number of the first column to copy.
        each: Number of columns at `source`.
        depth: Number of values copied of a column.
        goal: Address of the first row.
        goal_step: From one row to the next.
    """

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, other, step, column, each, depth, goal, goal_step = arguments
        last = builder.sub(builder.mul(each, LONG(2)), LONG(1))
        columns = []
        for number in range(LANES):
            own = _least(builder, builder.add(column, LONG(number)), last)
            is_first = builder.icmp_signed("<", own, each)
            place = builder.select(is_first, own, builder.sub(own, each))
            columns.append(builder.add(builder.select(is_first, source, other), builder.mul(place, step)))
        before, loop, done = builder.block, builder.append_basic_block("turn"), builder.append_basic_block("turned")
        builder.branch(loop)

        builder.position_at_end(loop)
        row = builder.phi(LONG)
        valid, place = _first_lanes(builder, builder.sub(depth, row)), builder.mul(row, LONG(4))
        rows = [_load(builder, builder.add(address, place), 0, valid) for address in columns]
        for number, values in enumerate(_transposed(builder, rows)):
            to = builder.add(goal, builder.mul(builder.add(row, LONG(number)), goal_step))
            _store(builder, values, to)
        after = builder.add(row, LONG(LANES))
        row.add_incoming(LONG(0), before)
        row.add_incoming(after, loop)
        builder.cbranch(builder.icmp_signed("<", after, depth), loop, done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*[PLACE] * 8), build


def _transposed(builder: Any, rows: list[Any]) -> list[Any]:
    """Transposes LANES vectors of LANES values."""
    rows, width = list(rows), 1
    while width < LANES:  # swap the off-diagonal blocks of `width` of all blocks of twice that
        upper = [lane if not lane & width else LANES + lane - width for lane in range(LANES)]
        lower = [lane + width if not lane & width else LANES + lane for lane in range(LANES)]
        for row in (row for row in range(LANES) if not row & width):
            pair = rows[row], rows[row + width]
            rows[row], rows[row + width] = (
                builder.shuffle_vector(*pair, ir.Constant(ir.VectorType(INDEX, LANES), order))
                for order in (upper, lower)
            )
        width *= 2
    return rows


@intrinsic(prefer_literal=True)
def copy(context: Any, vectors: Any, source: Any, goal: Any) -> Any:
    """Copies `vectors` vectors."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, source, goal = arguments
        for number in range(vectors.literal_value):
            _store(builder, _load(builder, source, number), goal, number)
        return context.get_dummy_value()

    return types.void(vectors, PLACE, PLACE), build


@intrinsic(prefer_literal=True)
def tile(
    context: Any,
    vectors: Any,
    masked: Any,
    first: Any,
    last: Any,
    places: Any,
    x: Any,
    x_step: Any,
    x_next: Any,
    panel: Any,
    panel_step: Any,
    depth: Any,
    out: Any,
    out_step: Any,
    columns: Any,
    adds: Any,
    ahead: Any,
    ahead_step: Any,
    ahead_shift: Any,
) -> Any:
    """out[i, c] (+)= Σ_k x[place[i], k] panel[k, c], k in order, of ROWS rows and at most vectors · LANES columns.

    Rows beyond the last repeat the last, and write the same values. Meanwhile cache lines are prefetched: of some rows
    in turn, as many bytes of each as the tile is wide.

    Args:
        vectors: A row's vectors, a constant.
        masked: Whether there are fewer columns, so that only they are read and written; a constant.
        first: The number i of the first row.
        last: The number of the last row.
        places: Address of the rows' 64-bit places in x; 0 if row i is at place i.
        x: The first value of place 0.
        x_step: From one place to the next.
        x_next: From one k to the next.
        panel: The first value of [depth, columns].
        panel_step: From one row of it to the next.
        depth: The number of k, at least 1.
        out: The first value of row 0.
        out_step: From one row to the next.
        columns: Number of columns.
        adds: Not 0: the product is added to `out`.
        ahead: Address of the rows to prefetch.
        ahead_step: From one of them to the next.
        ahead_shift: The logarithm of their number.
    """
    wide = vectors.literal_value

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        _, _, first, last, places, x, x_step, x_next, panel, panel_step, depth, out, out_step, *others = arguments
        columns, adds, ahead, ahead_step, ahead_shift = others
        rows = [_least(builder, builder.add(first, LONG(row)), last) for row in range(ROWS)]
        to_rows = [builder.add(out, builder.mul(out_step, row)) for row in rows]
        from_rows = [builder.add(x, builder.mul(x_step, place)) for place in _places(builder, places, rows)]
        masks = [
            _first_lanes(builder, builder.sub(columns, LONG(LANES * number))) if masked.literal_value else None
            for number in range(wide)
        ]
        before, loop, ended, added, written = (
            builder.block,
            *map(builder.append_basic_block, ("tile", "ended", "add", "write")),
        )
        builder.branch(loop)

        builder.position_at_end(loop)
        k = builder.phi(LONG)
        sums = [[builder.phi(VECTOR) for _ in range(wide)] for _ in range(ROWS)]
        row = builder.add(panel, builder.mul(k, panel_step))
        values = [_load(builder, row, number, mask) for number, mask in enumerate(masks)]
        place, products = builder.mul(k, x_next), []
        for own, address in zip(sums, from_rows, strict=True):
            factor = _everywhere(builder, builder.load(_pointer(builder, builder.add(address, place), FLOAT)))
            products.append([_fused(builder, factor, value, total) for value, total in zip(values, own, strict=True)])
        _ask(builder, k, ahead, ahead_step, ahead_shift, 4 * LANES * wide)
        after = builder.add(k, LONG(1))
        k.add_incoming(LONG(0), before)
        k.add_incoming(after, loop)
        for own, product in zip(sums, products, strict=True):
            for phi, new in zip(own, product, strict=True):
                phi.add_incoming(ir.Constant(VECTOR, [0.0] * LANES), before)
                phi.add_incoming(new, loop)
        builder.cbranch(builder.icmp_signed("<", after, depth), loop, ended)

        builder.position_at_end(ended)
        builder.cbranch(builder.icmp_signed("!=", adds, LONG(0)), added, written)
        builder.position_at_end(added)
        totals = [
            [builder.fadd(_load(builder, to, number, masks[number]), new) for number, new in enumerate(product)]
            for to, product in zip(to_rows, products, strict=True)
        ]
        builder.branch(written)
        builder.position_at_end(written)
        results = []
        for product, total_row in zip(products, totals, strict=True):
            for new, total in zip(product, total_row, strict=True):
                phi = builder.phi(VECTOR)
                phi.add_incoming(new, ended)
                phi.add_incoming(total, added)
                results.append(phi)
        for number, result in enumerate(results):
            _store(builder, result, to_rows[number // wide], number % wide, masks[number % wide])
        return context.get_dummy_value()

    return types.void(vectors, masked, *[PLACE] * 16), build


def _places(builder: Any, places: Any, rows: list[Any]) -> list[Any]:
    """Returns the places of rows: those at the address, or the rows' own numbers if it is 0."""
    with builder.goto_entry_block():
        nothing = builder.ptrtoint(builder.alloca(LONG), LONG)
    given = builder.icmp_signed("!=", places, LONG(0))
    found = []
    for row in rows:
        address = builder.select(given, builder.add(places, builder.mul(row, LONG(8))), nothing)
        found.append(builder.select(given, builder.load(_pointer(builder, address, LONG)), row))
    return found


def _least(builder: Any, left: Any, right: Any) -> Any:
    return builder.select(builder.icmp_signed("<", left, right), left, right)


def _pointer(builder: Any, address: Any, kind: Any) -> Any:
    return builder.inttoptr(address, kind.as_pointer())


def _first_lanes(builder: Any, count: Any) -> Any:
    """Returns the mask of the first `count` lanes; empty if negative."""
    lanes = ir.Constant(ir.VectorType(LONG, LANES), list(range(LANES)))
    return builder.icmp_signed("<", lanes, _everywhere(builder, count, LONG))


def _load(builder: Any, address: Any, number: int = 0, mask: Any = None) -> Any:
    """Returns the vector `number` vectors after an address; masked-out lanes are 0 and are not read."""
    pointer = _pointer(builder, builder.add(address, LONG(4 * LANES * number)), VECTOR)
    if mask is None:
        value = builder.load(pointer)
        value.align = 4
        return value
    kind = ir.FunctionType(VECTOR, [VECTOR.as_pointer(), INDEX, MASK, VECTOR])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.load.v{LANES}f32.p0")
    return builder.call(function, [pointer, INDEX(4), mask, ir.Constant(VECTOR, [0.0] * LANES)])


def _store(builder: Any, value: Any, address: Any, number: int = 0, mask: Any = None) -> None:
    """Writes a vector `number` vectors after an address, except for masked-out lanes."""
    pointer = _pointer(builder, builder.add(address, LONG(4 * LANES * number)), VECTOR)
    if mask is None:
        builder.store(value, pointer).align = 4
        return
    kind = ir.FunctionType(ir.VoidType(), [VECTOR, VECTOR.as_pointer(), INDEX, MASK])
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.masked.store.v{LANES}f32.p0")
    builder.call(function, [value, pointer, INDEX(4), mask])


def _everywhere(builder: Any, value: Any, kind: Any = FLOAT) -> Any:
    nothing = ir.Constant(ir.VectorType(kind, LANES), ir.Undefined)
    first = builder.insert_element(nothing, value, INDEX(0))
    return builder.shuffle_vector(first, nothing, ir.Constant(ir.VectorType(INDEX, LANES), [0] * LANES))


def _fused(builder: Any, left: Any, right: Any, total: Any) -> Any:
    """Returns left · right + total, rounded once if the CPU has an instruction for it."""
    if not IS_FUSED:
        return builder.fadd(builder.fmul(left, right), total)
    kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
    function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{LANES}f32")
    return builder.call(function, [left, right, total])


def _ask(builder: Any, k: Any, ahead: Any, step: Any, shift: Any, width: int) -> None:
    """Prefetches `width` bytes of row k % 2^shift, from byte k // 2^shift · width on."""
    byte = ir.IntType(8).as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [byte, INDEX, INDEX, INDEX])
    ask = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
    row = builder.and_(k, builder.sub(builder.shl(LONG(1), shift), LONG(1)))
    place = builder.mul(builder.lshr(k, shift), LONG(width))
    first = builder.add(builder.add(ahead, builder.mul(row, step)), place)
    for line in range(0, width, LINE):
        address = builder.inttoptr(builder.add(first, LONG(line)), byte)
        builder.call(ask, [address, INDEX(0), INDEX(2), INDEX(1)])
