"""The backbone that the clients of these tests train on."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.backbone import Backbone
from tests.backbones import tiny_backbone


@pytest.fixture(scope="package")
def exact() -> Backbone:
    """OLMoE in fp64; a training leaves it as it was."""
    return tiny_backbone("olmoe", dtype=torch.float64)
