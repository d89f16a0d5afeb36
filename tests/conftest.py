"""Fixtures that any test may use."""

from __future__ import annotations

import pytest

from fedguild.model.backbone import Backbone
from tests.backbones import tiny_backbone


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the tests that start processes first: they wait a lot, and the others fill the time."""
    items.sort(key=lambda item: item.get_closest_marker("processes") is None)


@pytest.fixture(scope="session")
def olmoe_backbone() -> Backbone:
    """A frozen random OLMoE of two layers with 8 experts, of which 4 are active."""
    return tiny_backbone("olmoe")


@pytest.fixture(scope="session")
def llama_backbone() -> Backbone:
    """A frozen random dense Llama of two layers."""
    return tiny_backbone("llama")
