"""`benchmarks/traffic.py` counts what its docstring says."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def traffic() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("traffic")
    sys.path.remove(str(BENCHMARKS))


def test_products_and_their_bytes(traffic: Any) -> None:
    left, right = torch.ones(3, 5), torch.ones(5, 7)
    found = traffic.counted(lambda: left @ right)
    assert (found.operations, found.flops, found.read, found.written) == (1, 2 * 3 * 5 * 7, 4 * (15 + 35), 4 * 21)


def test_views_cost_nothing_and_what_is_changed_in_place_is_read_and_written(traffic: Any) -> None:
    tensor, other = torch.ones(6, 4), torch.ones(6, 4)
    assert traffic.counted(lambda: tensor.t()[1:]).operations == 0
    found = traffic.counted(lambda: tensor.add_(other))
    assert (found.operations, found.flops, found.read, found.written) == (1, 0, 2 * 96, 96)
