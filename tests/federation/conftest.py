"""Fixtures of the tests of federations."""

from __future__ import annotations

import pytest

from tests.runs.runs import load_models_once


@pytest.fixture(autouse=True)
def _loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Loads every model once for all runs, servers and trainers in this process."""
    load_models_once(monkeypatch, "runs.setup.preparation", "federation.serving")
