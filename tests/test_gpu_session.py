"""`benchmarks/gpu_session.py` and the parity that it begins with, rehearsed on a CPU."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    sys.path.insert(0, str(BENCHMARKS))
    yield
    sys.path.remove(str(BENCHMARKS))


@pytest.mark.long
def test_every_part_in_its_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    bench, session = importlib.import_module("gpu"), importlib.import_module("gpu_session")
    for script in (bench, session):
        monkeypatch.setattr(script, "machine", lambda *given: "a machine")
    for rate in ("speed", "bandwidth"):
        monkeypatch.setattr(bench, rate, lambda *given: 1e12)
    monkeypatch.setattr(session, "TESTBEDS", ("embedded", "models/nowhere"))
    session.main(["--device", "cpu", "--dtype", "float32", "--small", "--output", str(tmp_path)])
    said = capsys.readouterr().out
    parts = (
        "a machine",
        "parity in",
        "| ours | 4 x",
        "ms: forward",
        "sequential peft takes",
        "12 layers |",
        "decode 8",
    )
    places = [said.index(part) for part in (*parts, "embedded: ", "models/nowhere: ", "a3smoe: ")]
    assert places == sorted(places)
    results = json.loads((tmp_path / "results.json").read_text())
    assert "failed" not in results
    assert results["peft_over_ours"] > 0
    assert list(results["methods"].values()) == [{"loss": 0.0, "score": 0.0}] * 2
    assert {entry["outcome"] for entry in results["cases"].values()} == {"ok"}
    assert results["part_seconds"].keys() == session.PARTS.keys()
    session.main(["--device", "cpu", "--dtype", "float32", "--small", "--output", str(tmp_path), "--seconds", "0"])
    assert capsys.readouterr().out.count("no time is left") == len(session.PARTS)


def test_parity_fails_where_the_device_computes_something_else(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another loss, a value that is not finite, or a gradient without data."""
    first = importlib.import_module("gpu_parity")
    here = first.Setting(torch.device("cpu"), torch.float32, small=True)
    first.parity(here)
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
            first.parity(here)
