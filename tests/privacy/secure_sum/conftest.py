"""Runs of this package load every model once."""

from __future__ import annotations

import pytest

from tests.runs.runs import load_models_once


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    load_models_once(monkeypatch, "runs.setup.preparation", "federation.serving")
