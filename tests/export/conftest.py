"""Plain checkpoints of every family on disk, and finished runs on one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.method import Deployment
from tests.backbones import VOCABULARY, random_adapter, tiny_model

TOKENS = torch.randint(3, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(3))
BUDGETS = ({"name": "large", "active_experts": 4, "rank": 3}, {"name": "small", "active_experts": 1, "rank": 2})


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Returns the folder of a family's random model, as plain transformers saved it."""
    folders: dict[str, Path] = {}

    def saved(family: str, **changes: Any) -> Path:
        key = f"{family} {changes}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp("base")
            tiny_model(family, **changes).save_pretrained(folders[key])
        return folders[key]

    return saved


def backbone_of(folder: Path) -> Backbone:
    return make_backbone(AutoModelForCausalLM.from_pretrained(folder), None, name="tiny")


def deployment_of(backbone: Backbone, plan: AdapterPlan) -> Deployment:
    """Random factors, and output scales that are far from 1 and differ by layer."""
    tensors = {name: value.float() for name, value in random_adapter(backbone.info, plan, seed=5).items()}
    return Deployment(plan, {n: 2.0 * v if n.endswith("output_scale") else v for n, v in tensors.items()})


@torch.no_grad()
def slot_logits(backbone: Backbone, deployment: Deployment) -> Tensor:
    """The logits [R, T, V] of a deployment as FedGuild runs it."""
    with SlotModel(backbone, [deployment.plan]) as model:
        model.load(0, deployment.tensors)
        backbone.runtime.current = model._pass((len(TOKENS),), None)
        return backbone.model(input_ids=TOKENS, use_cache=False).logits


@torch.no_grad()
def plain_logits(model: Any) -> Tensor:
    """The logits [R, T, V] of a model of transformers or peft."""
    return model.eval()(input_ids=TOKENS, use_cache=False).logits


def assert_same_logits(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * expected.abs().max().item())
