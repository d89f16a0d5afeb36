"""The table of attacks in the documentation names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_test_that_the_page_names_is_there() -> None:
    named = re.findall(r"`(tests/\S+\.py)::(test_\w+)`", (ROOT / "docs/guides/attacks.md").read_text("utf-8"))
    assert len(named) > 50
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).is_file() or f"def {test}(" not in (ROOT / file).read_text("utf-8")
    ]
    assert not missing
