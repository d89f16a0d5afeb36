"""Retention of the memory that a training step frees, for the next step.

glibc gives the pages of a large tensor back to the kernel as soon as the tensor is freed, and the
next one of its size has to fault every page in again: on a CPU up to half of a training step, for
memory that the process needs again a moment later (docs/decisions/0010, benchmarks/freed_pages.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from functools import cache

import psutil

_TRIM_THRESHOLD = -1
_MMAP_THRESHOLD = -3
"""Parameters of mallopt(3)."""
_NEVER = -1
_PART_OF_MEMORY = 64
_LEAST, _MOST = 32 << 20, 1 << 30
"""Bytes from which a block has its own mapping, which is always given back: a part of the machine's memory.

A kept block may be split by small allocations, so that the next large one takes new memory. Where sequences differ in
length that goes on for a whole run (`give_back_if_scarce`). An older glibc accepts at most `_LEAST`.
"""
_SPARE = 4
"""Kept pages are given back when less than this part of the machine's memory, a quarter, is available."""
_SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_", "MALLOC_TOP_PAD_")


@cache
def keep_freed_pages() -> bool:
    """Lets glibc's allocator keep freed pages, for this process and until it ends.

    The process then stays at its peak size, unless memory is scarce (`give_back_if_scarce`). Settings of the allocator
    by the environment variables of mallopt(3) take precedence.

    Returns:
        Whether freed pages are kept; False on other systems, with another C library, or with settings by the user.
    """
    is_set = any(name in os.environ for name in _SETTINGS) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
    if is_set or not sys.platform.startswith("linux"):
        return False
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        mallopt = library.mallopt
    except (OSError, AttributeError):
        return False
    largest = min(max(psutil.virtual_memory().total // _PART_OF_MEMORY, _LEAST), _MOST)
    blocks = mallopt(_MMAP_THRESHOLD, largest) or mallopt(_MMAP_THRESHOLD, _LEAST)
    return bool(mallopt(_TRIM_THRESHOLD, _NEVER) and blocks)


def give_back_freed_pages() -> None:
    """Gives kept pages back to the kernel, between runs whose tensors have other sizes; without effect elsewhere."""
    if sys.platform.startswith("linux"):
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def give_back_if_scarce() -> None:
    """Gives kept pages back where the machine has little memory left, after a cohort has trained."""
    memory = psutil.virtual_memory()
    if memory.available * _SPARE < memory.total:
        give_back_freed_pages()
