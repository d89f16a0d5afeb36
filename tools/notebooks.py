"""Executes the notebooks of docs/notebooks and writes their outputs back.

    python -m tools.notebooks            # as they are read
    FEDGUILD_SMALL=1 …                   # in small sizes, as a test does without writing

The runs of a notebook are written to a temporary folder. Progress bars on stderr are left out.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).parents[1] / "docs" / "notebooks"
TIMEOUT_SECONDS = 600


def executed(path: Path) -> nbformat.NotebookNode:
    """Returns a notebook with the outputs of its cells, run in order in an empty folder.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    notebook: nbformat.NotebookNode = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(
            notebook, timeout=TIMEOUT_SECONDS, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata.pop("execution", None)
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return notebook


def main(names: Sequence[str]) -> int:
    """Executes the named notebooks, or all."""
    for path in [Path(name) for name in names] or sorted(FOLDER.glob("*.ipynb")):
        nbformat.write(executed(path), path)
        print(f"executed {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
