"""Installed packages for tests of plug-ins: a dist-info folder and modules, put on `sys.path`."""

from __future__ import annotations

import sys
from pathlib import Path
from textwrap import dedent

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch,
    folder: Path,
    name: str,
    *,
    entry_points: str,
    modules: dict[str, str] | None = None,
    version: str = "1.2",
    summary: str = "",
) -> None:
    """Makes a package importable and found by its entry points until the test ends."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    lines = [
        "Metadata-Version: 2.1",
        f"Name: {name}",
        f"Version: {version}",
        *([f"Summary: {summary}"] * bool(summary)),
    ]
    (info / "METADATA").write_text("\n".join(lines) + "\n")
    (info / "entry_points.txt").write_text(dedent(entry_points))
    for file, source in (modules or {}).items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(source))
        module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(str(folder))
