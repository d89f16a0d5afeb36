"""Plain checkpoints of every family on disk, and finished runs on one of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fedguild.config import Config
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from fedguild.server.method import Deployment
from tests.backbones import VOCABULARY, random_adapter, tiny_model
from tools.tiny.tokenizer import train_tokenizer

TOKENS = torch.randint(3, VOCABULARY, (3, 17), generator=torch.Generator().manual_seed(3))


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


BUDGETS = (
    {"name": "large", "active_experts": 4, "rank": 3},
    {"name": "small", "active_experts": 1, "rank": 2},
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of two clients and two rounds, on a model and tokenizer in a folder."""
    base = tmp_path_factory.mktemp("olmoe")
    tokenizer = train_tokenizer(["Name a colour.", "red green blue", "3 + 4 = 7"])
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    folders = {}
    for label, method in {
        "flame": {"name": "flame", "rank": 3},
        "ranks": {"name": "fedit", "rank": 3, "rank_by_budget": True, "targets": ["attention", "router", "experts"]},
        "personal": {"name": "fedit", "rank": 2, "personal": True},
    }.items():
        folders[label] = tmp_path_factory.mktemp(label)
        config = Config.model_validate(
            {
                "name": label,
                "method": method,
                "model": {"path": str(base), "device": "cpu"},
                "data": {"options": {"train_examples": 40, "families": ["sum"]}, "partition": {"minimum": 4}},
                "federation": {"clients": 2, "rounds": 2, "budgets": BUDGETS},
                "training": {"steps": 2, "learning_rate": 0.05, "batch_size": 2},
                "evaluation": {"every": 2, "max_examples": 1, "max_new_tokens": 1},
            }
        )
        experiment.run(config, folders[label])
    return folders
