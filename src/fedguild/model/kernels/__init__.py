"""FedGuild's kernels, and Liger-Kernel's, in place of torch's: which of them run, on which device.

On a GPU, Triton kernels compute products of (expert, slot) groups (`segmented`), the cross-entropy (`cross_entropy`),
dropout's mask (`dropout`) and the step of Adam (`adam`). Liger-Kernel's compute a frozen model's norms, rotary
embedding and gates (`fused`). On a CPU, Numba kernels on torch's threads (`threads`) compute products of groups
(`cpu_groups`), the step of Adam (`cpu_adam`), and norms, rotary embedding and gates (`cpu_fused`).

By default all kernels run on a CPU. On a GPU that Triton supports, those run whose package is installed. The variable
`FEDGUILD_KERNELS` is `auto` (the default), `none`, or the names of those that must run and no others:
`FEDGUILD_KERNELS=low-rank,grouped`. `docs/decisions/0016` and `0019` to `0021` say what each is for.
"""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import Parameter

from fedguild.core.errors import ConfigError

VARIABLE = "FEDGUILD_KERNELS"
KERNELS = {
    "low-rank": "triton",
    "grouped": "triton",
    "cross-entropy": "triton",
    "dropout": "triton",
    "optimizer": "triton",
    "norm": "liger_kernel",
    "rotary": "liger_kernel",
    "swiglu": "liger_kernel",
}
"""Name -> the package that it needs on a GPU."""
CPU_KERNELS = ("low-rank", "grouped", "optimizer", "norm", "rotary", "swiglu")
"""Those that run on a CPU."""
OLDEST = (7, 5)
"""The lowest compute capability that Triton compiles for."""


def runs(name: str, device: torch.device) -> bool:
    """Whether a kernel runs on a device.

    Args:
        name: One of `KERNELS`.

    Raises:
        ConfigError: FEDGUILD_KERNELS has an unknown name, or names a kernel whose package is not installed.
    """
    if device.type == "cpu":
        return name in CPU_KERNELS and name in chosen(os.environ.get(VARIABLE, "auto"), "cpu")
    return device.type == "cuda" and name in chosen(os.environ.get(VARIABLE, "auto")) and is_new_enough(device)


def computes(name: str, values: Tensor) -> bool:
    """Whether a Numba kernel computes with a tensor.

    Raises:
        ConfigError: as `runs`.
    """
    return has_plain_values(values) and runs(name, values.device) and language(values.device) == "numba"


def has_plain_values(values: Tensor) -> bool:
    """Whether a tensor's fp32 values lie unchanged in the CPU's memory at its address."""
    plain = type(values) is Tensor or type(values) is Parameter
    plain = plain and values.dtype is torch.float32 and values.device.type == "cpu"
    return plain and not values.is_neg() and not values._is_zerotensor()


def language(device: torch.device) -> str:
    """Returns the package in which the kernels for a device are written."""
    return "numba" if device.type == "cpu" else "triton"


@cache
def is_new_enough(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST


@cache
def chosen(setting: str, kind: str = "cuda") -> frozenset[str]:
    """Returns the kernels that a value of FEDGUILD_KERNELS lets a kind of device run.

    Args:
        kind: `cuda` or `cpu`. Kernels of the other kind may be named; they are left out.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    known = CPU_KERNELS if kind == "cpu" else KERNELS
    missing = {} if kind == "cpu" else {name: package for name, package in KERNELS.items() if not find_spec(package)}
    if setting in ("", "auto"):
        return frozenset(known) - set(missing)
    names = frozenset() if setting == "none" else frozenset(map(str.strip, setting.split(",")))
    if unknown := names - set(KERNELS):
        raise ConfigError(
            f"{VARIABLE}: unknown kernel '{min(unknown)}'.", f"Known: auto, none, or any of {', '.join(KERNELS)}."
        )
    if absent := sorted(names & set(missing)):
        raise ConfigError(
            f"{VARIABLE} names {absent[0]}, but {missing[absent[0]].replace('_', '-')} is not installed.",
            "pip install 'fedguild[gpu]', or leave it out.",
        )
    return names & set(known)
