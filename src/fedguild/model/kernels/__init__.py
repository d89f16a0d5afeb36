"""Kernels of a GPU: which of them run, on which device.

Two kinds. Our own, in Triton: products of (expert, slot) groups (`segmented`), the cross-entropy (`cross_entropy`),
dropout's mask (`dropout`) and the step of Adam (`adam`). Liger-Kernel's, in place of a frozen model's norms, rotary
embedding and gates (`fused`).

A CPU never runs any of them. On a GPU that Triton compiles for each runs where its package is installed; the variable
`FEDGUILD_KERNELS` is `auto` (the default), `none`, or the names of those that must run and no others:
`FEDGUILD_KERNELS=low-rank,grouped`. `docs/decisions/0016` says what each is for.
"""

from __future__ import annotations

import os
from functools import cache
from importlib import util

import torch

from fedguild.errors import ConfigError

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
"""Name -> the package that it needs."""
OLDEST = (7, 5)
"""The lowest compute capability that Triton compiles for."""


def runs(name: str, device: torch.device) -> bool:
    """Whether a kernel runs on a device.

    Args:
        name: One of `KERNELS`.
        device: Where the tensors are.

    Raises:
        ConfigError: FEDGUILD_KERNELS has an unknown name, or names a kernel whose package is not installed.
    """
    return device.type == "cuda" and name in chosen(os.environ.get(VARIABLE, "auto")) and is_new_enough(device)


@cache
def is_new_enough(device: torch.device) -> bool:
    """Whether Triton compiles for a GPU."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= OLDEST


@cache
def chosen(setting: str) -> frozenset[str]:
    """Returns the kernels that a value of FEDGUILD_KERNELS lets a GPU run.

    Raises:
        ConfigError: a name is unknown, or its package is not installed.
    """
    if setting in ("", "auto"):
        return frozenset(name for name, package in KERNELS.items() if util.find_spec(package))
    names = frozenset() if setting == "none" else frozenset(map(str.strip, setting.split(",")))
    if unknown := names - set(KERNELS):
        raise ConfigError(
            f"{VARIABLE}: unknown kernel '{min(unknown)}'.", f"Known: auto, none, or any of {', '.join(KERNELS)}."
        )
    for name in sorted(names):
        if util.find_spec(KERNELS[name]) is None:
            raise ConfigError(
                f"{VARIABLE} names {name}, but {KERNELS[name].replace('_', '-')} is not installed.",
                "pip install 'fedguild[gpu]', or leave it out.",
            )
    return names
