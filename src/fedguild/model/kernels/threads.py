"""Runs Numba kernels on the threads that torch computes with.

A kernel is a C function of one array of integers: addresses, sizes, and the number of pieces that its work consists of.
Its threads take one piece after the other until none is left, so the result does not depend on the number of threads.
The threads are torch's: its wheels for Linux compute with GCC's OpenMP, whose entry point is looked up in the library
that torch has loaded. A second pool of threads would compete with the first, whose threads spin for a while after every
product. With another OpenMP, or none, a kernel runs on the calling thread alone.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from llvmlite import ir
from numba import cfunc, njit, types
from numba.extending import intrinsic

SIGNATURE = types.void(types.CPointer(types.int64))
FUSED = {"contract", "nsz"}
"""A product and a sum may be one operation."""
VECTORS = FUSED | {"reassoc"}
"""Sums may be taken in vectors: in another order than the code's, but always in the same."""
EVERYTHING = 1 << 40
"""More elements than an array has: a kernel is given no sizes of arrays, and keeps within them."""
PIECES_PER_THREAD = 4
"""Pieces of a kernel for each thread, where there are several, so that none waits long for the last."""


def in_order(function: Callable[[Any], None]) -> Kernel:
    """Makes a kernel whose sums are taken in the code's order."""
    return Kernel(function, in_order=True)


class Kernel:
    """A kernel: compiled when it first runs; the machine code is cached on disk.

    Args:
        function: Takes a pointer to the numbers: the next piece (for `next_piece`), the number of pieces, and its own.
        in_order: Whether its sums are taken in the code's order.
    """

    def __init__(self, function: Callable[[Any], None], *, in_order: bool = False) -> None:
        self._function, self._fastmath = function, FUSED if in_order else VECTORS
        self._compiled: Any = None

    def run(self, numbers: Sequence[int], *, most_pieces: int, pieces_per_thread: int = PIECES_PER_THREAD) -> None:
        """Runs the kernel; returns when all of its pieces are done.

        Args:
            most_pieces: The most pieces that its work can be cut into.
            pieces_per_thread: Number of pieces for each thread, if there are several threads.
        """
        if self._compiled is None:
            self._compiled = self._compile()
        threads = torch.get_num_threads()
        pieces = max(1, min(most_pieces, threads * pieces_per_thread if threads > 1 else 1))
        given = (ctypes.c_int64 * (len(numbers) + 2))(0, pieces, *numbers)
        parallel = _parallel() if pieces > 1 else None
        if parallel is None:
            ctypes.CFUNCTYPE(None, ctypes.c_void_p)(self._compiled.address)(ctypes.addressof(given))
        else:
            parallel(self._compiled.address, ctypes.addressof(given), threads, 0)

    def _compile(self) -> Any:
        """Returns the compiled function, from the disk cache if it is there."""
        # Numba keeps it under this name, and knows whether its own file has changed, but not those of what it calls.
        name = self._function.__qualname__.partition("-")[0]
        self._function.__qualname__ = f"{name}-{digest()}{'-in-order' if self._fastmath == FUSED else ''}"
        try:
            return cfunc(SIGNATURE, cache=True, fastmath=self._fastmath, error_model="numpy")(self._function)
        except RuntimeError:  # nothing can be written, neither beside this file nor in the user's cache
            return cfunc(SIGNATURE, fastmath=self._fastmath, error_model="numpy")(self._function)


@cache
def digest(folder: Path = Path(__file__).parent) -> str:
    """Returns a digest of the sources of all kernels."""
    sources = (path.read_bytes() for path in sorted(folder.glob("*.py")))
    return hashlib.sha256(b"".join(hashlib.sha256(source).digest() for source in sources)).hexdigest()[:16]


@cache
def _parallel() -> Any:
    """Returns the entry point of the OpenMP that torch has loaded, if it is GCC's or has GCC's interface; else None."""
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        found = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    found.argtypes, found.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint], None
    return found


def _to_pointer(kind: Any) -> Any:
    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

    return types.CPointer(kind)(types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def floats(context: Any, address: Any) -> Any:
    return _to_pointer(types.float32)


@intrinsic  # type: ignore[untyped-decorator]
def integers(context: Any, address: Any) -> Any:
    """Returns an address as a pointer to 32-bit integers."""
    return _to_pointer(types.int32)


@intrinsic  # type: ignore[untyped-decorator]
def long_integers(context: Any, address: Any) -> Any:
    """Returns an address as a pointer to 64-bit integers."""
    return _to_pointer(types.int64)


@intrinsic  # type: ignore[untyped-decorator]
def booleans(context: Any, address: Any) -> Any:
    """Returns an address as a pointer to bytes, 0 for False."""
    return _to_pointer(types.uint8)


@intrinsic  # type: ignore[untyped-decorator]
def pointer_like(context: Any, address: Any, example: Any) -> Any:
    """Returns an address as a pointer to values of an example's type."""
    signature, build = _to_pointer(example)
    return signature.return_type(types.int64, example), build


@intrinsic  # type: ignore[untyped-decorator]
def bits_as_float(context: Any, bits: Any) -> Any:
    """Returns the fp32 value that has the bits of a 32-bit integer."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], context.get_value_type(types.float32))

    return types.float32(types.int32), build


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(context: Any, pointer: Any, place: Any) -> Any:
    """Prefetches the cache line of an element."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        byte, number = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        asked = builder.module.declare_intrinsic("llvm.prefetch.p0", (), kind)
        line = builder.bitcast(builder.gep(arguments[0], [arguments[1]]), byte)
        builder.call(asked, [line, number(0), number(3), number(1)])
        return context.get_dummy_value()

    return types.void(pointer, types.int64), build


@intrinsic  # type: ignore[untyped-decorator]
def count_up(context: Any, numbers: Any, place: Any) -> Any:
    """Returns one of a kernel's numbers, and increments it atomically: no two threads get the same."""

    def build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        number = builder.gep(arguments[0], [arguments[1]])
        return builder.atomic_rmw("add", number, ir.Constant(ir.IntType(64), 1), "monotonic")

    return types.int64(types.CPointer(types.int64), types.int64), build


@njit(inline="always")  # type: ignore[untyped-decorator]
def next_piece(numbers: Any) -> Any:
    """Returns the number of the kernel's next piece, and increments it."""
    return count_up(numbers, 0)
