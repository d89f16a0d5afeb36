"""The attack in the security guide runs as it stands there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fedguild import testing

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "security.md"


def test_the_guides_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one round of one step, which proves as much."""
    monkeypatch.chdir(tmp_path)
    (code,) = re.findall(r"```python\n(.*?)```", GUIDE.read_text("utf-8"), re.DOTALL)
    quick = ["federation.rounds=1", "training.steps=1", "evaluation.max_examples=1", "evaluation.every=9"]
    drive = testing.drive

    def quickly(config: str, folder: Path, hostile: object, *, overrides: list[str]) -> testing.Driven:
        return drive(config, folder, hostile, overrides=[*overrides, *quick])  # type: ignore[arg-type]

    monkeypatch.setattr(testing, "drive", quickly)
    names: dict[str, object] = {}
    exec(code, names)
    driven = names["driven"]
    assert isinstance(driven, testing.Driven)
    assert "steps" in driven.rejected[1][2]
