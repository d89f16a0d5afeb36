"""Software versions and hardware behind a run's numbers; never a host name, a user or a path."""

from __future__ import annotations

import os
import platform
from typing import Any

import psutil
import torch

from fedguild import __version__
from fedguild.core.plugins import installed

PACKAGES = (
    "torch",
    "transformers",
    "datasets",
    "safetensors",
    "numpy",
    "scipy",
    "peft",
    "flwr",
    "ray",
    "dp-accounting",
)


def describe_environment(device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
    """Returns versions, device and cores as plain JSON values."""
    return {
        "fedguild": __version__,
        "python": platform.python_version(),
        "packages": {name: version for name in PACKAGES if (version := installed(name)) is not None},
        "system": f"{platform.system()} {platform.machine()}",
        "device": device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "memory_bytes": psutil.virtual_memory().total,
    }


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
