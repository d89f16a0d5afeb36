"""Peak memory of a cohort: allocated bytes on a GPU, the process's resident set on a CPU."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path

import psutil
import torch

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement, if the system can (CUDA; Linux)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        _CLEAR.write_text(_RESET_PEAK)


def used_bytes(device: torch.device) -> int:
    """Returns the bytes that are in use now."""
    if device.type == "cuda":
        return int(torch.cuda.memory_allocated(device))
    return int(psutil.Process().memory_info().rss)


def peak_bytes(device: torch.device) -> int:
    """Returns the peak since `reset_peak`, or since the process began if the system cannot reset it."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    if _STATUS.exists():
        for line in _STATUS.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return 1024 * int(line.split()[1])
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
