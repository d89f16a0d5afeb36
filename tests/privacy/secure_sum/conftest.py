"""Runs of this package end without drawing their report, and load every model once."""

from __future__ import annotations

import pytest

from tests.runs.runs import load_models_once


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch, no_report: None) -> None:
    load_models_once(monkeypatch, "runs.setup.preparation", "federation.serving")
