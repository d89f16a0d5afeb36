"""Fixtures that any test may use."""

from __future__ import annotations

import pytest

from fedguild.model.backbone import Backbone
from tests.backbones import tiny_backbone


@pytest.fixture(scope="session")
def olmoe_backbone() -> Backbone:
    """A frozen random OLMoE of two layers with 8 experts, of which 4 are active."""
    return tiny_backbone("olmoe")


@pytest.fixture(scope="session")
def llama_backbone() -> Backbone:
    """A frozen random dense Llama of two layers."""
    return tiny_backbone("llama")
