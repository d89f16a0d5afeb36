"""The notebooks of docs/ run, in small sizes, and are stored with the outputs of a run."""

from __future__ import annotations

from pathlib import Path

import nbformat
import pytest

pytest.importorskip("nbclient")
notebooks = pytest.importorskip("tools.notebooks")
FOLDER = Path(__file__).parents[2] / "docs" / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))


def test_there_is_one() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
@pytest.mark.long
def test_it_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGUILD_SMALL", "1")
    done = notebooks.executed(path)
    shown = [cell for cell in done.cells if cell.cell_type == "code" and cell.outputs]
    assert any("<svg" in output.get("data", {}).get("text/html", "") for cell in shown for output in cell.outputs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_stored_as_it_was_executed(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert len(outputs) >= len(code) - 2
    text = path.read_text()
    assert not [place for place in ("/home/", "/root/", "/work/", "/tmp/") if place in text]
