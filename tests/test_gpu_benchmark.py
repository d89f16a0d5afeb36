"""`benchmarks/gpu.py`, rehearsed on a CPU: every system, resumed, out of time and out of memory."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def gpu() -> Iterator[Any]:
    """The script, imported as it runs."""
    sys.path.insert(0, str(BENCHMARKS))
    yield importlib.import_module("gpu")
    sys.path.remove(str(BENCHMARKS))


@pytest.fixture
def pages(gpu: Any, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a page would have been written."""
    written: list[Path] = []
    monkeypatch.setattr(gpu, "write_page", lambda results, path: written.append(path))
    return written


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


@pytest.mark.long
def test_no_case_begins_after_its_time(gpu, pages, tmp_path):
    only = "Qwen3-30B-A3B, 12 layers | ours | 2 x 8"
    gpu.main(["--device", "cpu", "--dtype", "float32", "--small", "--output", str(tmp_path), "--minutes", "0"])
    assert json.loads((tmp_path / "results.json").read_text())["cases"] == {}
    assert len(rehearse(gpu, tmp_path, only)) == 2
    assert pages == [tmp_path / "index.html"] * 2


@pytest.mark.long
def test_running_out_of_memory_is_a_result(gpu, pages, tmp_path, monkeypatch):
    """Measured again with activations recomputed; another library's failure is named."""
    own = gpu.typical

    def full(step, *, few):
        monkeypatch.setattr(gpu, "typical", own)
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(gpu, "typical", full)
    found = rehearse(gpu, tmp_path, "OLMoE-1B-7B | ours | 1 x 8 | rank 20")
    assert [(entry["outcome"], entry["recomputes"]) for entry in found.values()] == [
        ("out of memory", False),
        ("ok", True),
    ]
    monkeypatch.setattr(gpu, "with_peft", lambda *_: (_ for _ in ()).throw(ValueError("no such target")))
    failed = rehearse(gpu, tmp_path, "OLMoE-1B-7B | peft | 1 x 8 | rank 20")
    assert failed["OLMoE-1B-7B | peft | 1 x 8 | rank 20, 8 active"]["error"] == "ValueError: no such target"
    rows = [importlib.import_module("gpu_page").row_of(key, entry, failed.values()) for key, entry in failed.items()]
    assert [row[1] for row in rows][::2] == ["out of memory", "ValueError: no such target"]


def test_results_of_another_device_or_dtype_are_not_mixed(gpu, pages, tmp_path):
    assert not rehearse(gpu, tmp_path, "nothing is called this")
    assert len(pages) == 1
    with pytest.raises(SystemExit, match="name another folder"):
        gpu.main(["--device", "cpu", "--dtype", "bfloat16", "--small", "--output", str(tmp_path)])


def test_the_cases_that_tell_most_come_first(gpu):
    """All systems' typical steps in each layout, before any other; each case once."""
    found = list(gpu.cases(False))
    assert len({case.key for case in found}) == len(found)
    most = {(system, layout.name): 1 for system in (gpu.PEFT, gpu.PLAIN) for layout in gpu.LAYOUTS}
    whole = "Qwen3-30B-A3B"
    most |= {(gpu.OURS, whole): 4, (gpu.WITHOUT, whole): 4}
    typical = [case for case in found if (case.clients, case.tokens) == (most.get((case.system, case.layout), 8), 1024)]
    first = found[: len(typical)]
    assert set(typical) == set(first)
    assert {case.layout for case in first} == {layout.name for layout in gpu.LAYOUTS}
    assert {case.system for case in first} == {gpu.OURS, gpu.WITHOUT, gpu.PEFT, gpu.PLAIN}
    assert first[0].key == "OLMoE-1B-7B | ours | 8 x 1024 | rank 20, 8 active"
    assert found[-1].tokens != 1024


@pytest.mark.long
def test_a_script_is_rehearsed_in_the_time_that_is_kept_for_it(gpu, pages, tmp_path, monkeypatch):
    """Though cases are left; what it prints is kept, and nothing runs twice."""
    monkeypatch.setattr(gpu, "parity", lambda setting: None)
    bench = ["--device", "cpu", "--dtype", "float32", "--small", "--output", str(tmp_path), "--minutes", "0.5"]
    monkeypatch.setattr(gpu.Bench, "has_time", lambda self, kept_seconds=0.0: not kept_seconds)
    gpu.main(bench)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["cases"] == {}
    (script,) = results["scripts"].values()
    assert script["outcome"] == "ok", script
    assert "small: grouped_mm" in script["output"]
    monkeypatch.setattr(gpu.subprocess, "run", lambda *given, **more: pytest.fail("it ran again"))
    gpu.main(bench)


def test_nothing_is_measured_on_a_device_that_computes_something_else(gpu, pages, tmp_path, monkeypatch):
    def differs(setting):
        raise SystemExit("cpu computes something else than the CPU")

    monkeypatch.setattr(gpu, "parity", differs)
    with pytest.raises(SystemExit, match="computes something else"):
        rehearse(gpu, tmp_path, "OLMoE-1B-7B | ours | 1 x 8 | rank 20")
    assert json.loads((tmp_path / "results.json").read_text())["cases"] == {}
    assert pages == []


def test_the_scripts_that_it_runs_take_a_device_and_a_dtype(gpu):
    for name in gpu.SCRIPTS:
        text = (BENCHMARKS / f"{name}.py").read_text()
        assert "add_device(parser)" in text
        assert "machine(" in text
