"""Our kernels on a CPU, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from fedguild.model import kernels


def let_run(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], *devices: str) -> None:
    """Lets some of `kernels.KERNELS` run on these types of device, `cpu` by default, and no others."""
    wanted, where = frozenset(names), devices or ("cpu",)
    if wanted:
        pytest.importorskip("triton", reason="Triton is there for Linux only")
    assert wanted <= set(kernels.KERNELS)

    def runs(name: str, device: torch.device) -> bool:
        return name in wanted and device.type in where

    monkeypatch.setattr(kernels, "runs", runs)
