"""`benchmarks/gpu_first.py`, rehearsed on a CPU."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
CPU = ["--device", "cpu", "--dtype", "float32", "--small"]


@pytest.fixture(scope="module")
def first() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu_first")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture(autouse=True)
def unmeasured(first: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine's own rates take a second to measure."""
    monkeypatch.setattr(first, "machine", lambda *given: "a machine")
    monkeypatch.setattr(first, "speed", lambda *given: 1e12)


@pytest.mark.long
def test_every_part_in_its_order(first, capsys):
    first.main(CPU)
    said = capsys.readouterr().out
    places = [said.index(part) for part in ("a machine", "parity in", "clients x", "decode 8 rows", "operations ")]
    assert places == sorted(places)
    assert re.search(r"4 clients x 1 x 8, active \(8,\), dropout 0.0: [\d.]+ ms, \d+ tokens/s, [\d.]+% of", said)
    assert re.search(r"forward [\d.]+ ms, clip [\d.]+ ms, optimizer [\d.]+ ms, optimizer, one client finished", said)


def test_parity_fails_where_the_device_computes_something_else(first, capsys, monkeypatch):
    """Another loss, a value that is not finite, or a gradient without data; and nothing is measured then."""
    first.main([*CPU, "parity"])
    assert "parity in torch.float32: median 0.0e+00" in capsys.readouterr().out
    own, turns = first.gradients, []

    def changed(name, change):
        def gradients(backbone, batches):
            found = own(backbone, batches)
            turns.append(name)
            return {**found, name: change(found[name])} if len(turns) % 2 else found

        return gradients

    empty = "2/model.layers.0.self_attn.q_proj.lora_B"
    for name, change in (
        ("losses", lambda losses: 1.01 * losses),
        ("0/model.layers.0.self_attn.q_proj.lora_A", lambda gradient: gradient / 0),
        (empty, lambda gradient: gradient + 1e-7),
    ):
        turns.clear()
        monkeypatch.setattr(first, "gradients", changed(name, change))
        with pytest.raises(
            SystemExit, match=re.escape(f"cpu computes something else than the CPU in {torch.float32}: {name}")
        ):
            first.main(CPU)
        assert "clients x" not in capsys.readouterr().out
