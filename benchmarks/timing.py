"""Timing of the benchmarks: side by side in one process, interleaved, medians."""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from functools import cache

import torch

_REHEARSAL: set[bool] = set()
"""Not empty while each step is taken once."""
MALLOC = {"MALLOC_TRIM_THRESHOLD_": "100000000000", "MALLOC_MMAP_THRESHOLD_": "100000000000"}


def keep_freed_pages() -> None:
    """Starts this script again with glibc told to keep freed pages, which both sides profit from."""
    if any(name not in os.environ for name in MALLOC):
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **MALLOC})


def medians(steps: Mapping[str, Callable[[], object]], *, repeats: int, warmup: int = 1) -> dict[str, float]:
    """Returns each step's median seconds; the steps take turns, so that load hits all alike."""
    if _REHEARSAL:
        repeats, warmup = 1, 0
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(warmup + repeats):
        for name, step in steps.items():
            started = time.perf_counter()
            step()
            wait()
            if turn >= warmup:
                seconds[name].append(time.perf_counter() - started)
    return {name: statistics.median(values) for name, values in seconds.items()}


def wait() -> None:
    """Returns when the GPU that the benchmark computes on has finished, if it computes on one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize(torch.cuda.current_device())


def add_device(parser: argparse.ArgumentParser) -> None:
    """Adds `--device` and `--dtype`, of the models that a benchmark builds, and `--small`, which rehearses it."""
    parser.add_argument("--device", type=_device, default=torch.device("cpu"))
    parser.add_argument("--small", action=_Rehearse, nargs=0, default=False, help="once, to see that it runs")
    parser.add_argument(
        "--dtype",
        type=lambda name: {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name],
        default=torch.float32,
        help="float32, bfloat16 or float16",
    )


def _device(name: str) -> torch.device:
    """Returns a device; a GPU with a number becomes the one that is waited for."""
    device = torch.device(name)
    if device.type == "cuda" and device.index is not None:
        torch.cuda.set_device(device)
    return device


class _Rehearse(argparse.Action):
    """Lets `medians` take each step once."""

    def __call__(self, parser: object, namespace: argparse.Namespace, values: object, option: object = None) -> None:
        _REHEARSAL.add(True)
        namespace.small = True


def machine(device: torch.device | None = None, dtype: torch.dtype = torch.float32) -> str:
    """Returns what the figures are measured on, in words, with its measured bandwidth and speed.

    Args:
        device: The device that the benchmark's tensors are on; the CPU if None.
        dtype: The dtype of its products.
    """
    where = device or torch.device("cpu")
    name = torch.cuda.get_device_name(where) if where.type == "cuda" else "CPU"
    return (
        f"{name}, {str(dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, torch {torch.__version__}; "
        f"copies {bandwidth(where) / 1e9:.1f} GB/s, products {speed(where, dtype) / 1e9:.0f} GFLOP/s"
    )


@cache
def bandwidth(device: torch.device) -> float:
    """Returns the bytes read and written in a second of copying 128 MiB."""
    source = torch.ones(1 << (15 if _REHEARSAL else 25), device=device)
    target = torch.empty_like(source)
    seconds = medians({"copy": lambda: target.copy_(source)}, repeats=5)["copy"]
    return 2 * source.numel() * source.element_size() / seconds


@cache
def speed(device: torch.device, dtype: torch.dtype) -> float:
    """Returns the floating-point operations in a second of a square product."""
    size = 64 if _REHEARSAL else 1024 if device.type == "cpu" else 8192
    left = torch.ones(size, size, device=device, dtype=dtype)
    seconds = medians({"product": lambda: left @ left}, repeats=5)["product"]
    return 2 * size**3 / seconds
