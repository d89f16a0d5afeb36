"""Our kernels on a CPU: in Triton's interpreter, or in Numba."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from fedguild.model import kernels


def let_run(monkeypatch: pytest.MonkeyPatch, names: Iterable[str], *devices: str, language: str = "triton") -> None:
    """Lets some of `kernels.KERNELS` run on these types of device, `cpu` by default, and no others.

    Those in Triton run in its interpreter; with `language` "numba" a CPU's own do, compiled.
    """
    wanted, where = frozenset(names), devices or ("cpu",)
    if wanted:
        pytest.importorskip(language, reason="Triton is there for Linux only")
    assert wanted <= set(kernels.KERNELS)

    def runs(name: str, device: torch.device) -> bool:
        return name in wanted and device.type in where

    monkeypatch.setattr(kernels, "runs", runs)
    monkeypatch.setattr(kernels, "language", lambda device: language)
