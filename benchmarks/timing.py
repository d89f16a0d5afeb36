"""How the benchmarks measure: side by side in one process, interleaved, medians."""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping

import torch

MALLOC = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}


def keep_freed_pages() -> None:
    """Starts this script again with glibc told to keep freed pages, which both sides profit from."""
    if any(name not in os.environ for name in MALLOC):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})


def medians(steps: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Returns each step's median seconds; the steps take turns, so that load hits all alike."""
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warmup + repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def machine() -> str:
    """Returns what the figures were measured on, in words."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
    return f"{device}, {torch.get_num_threads()} threads, torch {torch.__version__}"
