"""`benchmarks/gpu.py`, rehearsed on a CPU: every system, resumed, out of time and out of memory."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu")
    sys.path.remove(str(BENCHMARKS))


def rehearse(gpu: Any, folder: Path, only: str, *more: str) -> dict[str, Any]:
    given = ["--device", "cpu", "--dtype", "float32", "--small", "--output", str(folder), "--only", only, *more]
    gpu.main(given)
    return json.loads((folder / "results.json").read_text())["cases"]


@pytest.fixture(autouse=True)
def at_parity(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parity has a test of its own."""
    monkeypatch.setattr(gpu, "parity", lambda setting: None)


@pytest.mark.long
def test_every_system_at_small_sizes(gpu, tmp_path):
    """One layout; a second call measures nothing again; the page shows each case and the gain over peft."""
    found = rehearse(gpu, tmp_path, "OLMoE-1B-7B | ")
    assert {entry["outcome"] for entry in found.values()} == {"ok"}, found
    assert {entry["system"] for entry in found.values()} == {gpu.OURS, gpu.WITHOUT, gpu.PEFT, gpu.PLAIN}
    assert len(found) == 2 * 2 * 2 + 4 * 2 + 2 + 2
    for entry in found.values():
        assert entry["tokens_per_second"] == pytest.approx(entry["clients"] * entry["tokens"] / entry["seconds"])
        assert entry["share_of_measured"] > 0
        assert entry["share_of_peak"] is None
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 3
    assert all(key.replace("&", "&amp;") in page for key in found)
    assert rehearse(gpu, tmp_path, "OLMoE-1B-7B | ") == found
    equal = found["OLMoE-1B-7B | ours | 2 x 16 | rank 20, 8 active"]
    alone = found["OLMoE-1B-7B | peft | 1 x 16 | rank 20, 8 active"]
    page_module = importlib.import_module("gpu_page")
    assert page_module.gain(equal, found.values()) == pytest.approx(2 * alone["seconds"] / equal["seconds"])
