"""Attached models: transformers' own calls give what FedGuild's slots give, for every kind of part."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.export.live import attached
from fedguild.methods.fedamole.mixture import MixtureOfLora
from fedguild.methods.pfl_moe.logit_mixture import LogitMixture
from fedguild.methods.ub_smoe.modulated_routing import ModulatedRouting
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.adapters.soft_prompt import SoftPrompt
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.method import Deployment
from tests.backbones import random_adapter, tiny_backbone

PROMPTS = [[5, 9, 3, 7], [4, 8], [11, 6, 10]]
EVERYWHERE = ("attention", "router", "experts")
LORA = Lora(2, 2.0, EVERYWHERE)
HELD = tuple(
    (f"model.layers.{layer}.self_attn.{leaf}", (1, 4, 2)) for layer in range(2) for leaf in ("q_proj", "v_proj")
)
PARTS: dict[str, tuple[AdapterPart, ...]] = {
    "lora and an output scale": (LORA, OutputScale("per_layer")),
    "modulated routing": (LORA, ModulatedRouting(candidates=3)),
    "mixture of lora": (MixtureOfLora(("q_proj", "v_proj"), 2, 2.0, 6, 3, 2, held=HELD),),
    "mixture of logits": (LogitMixture(2, EVERYWHERE), LORA),
    "soft prompt": (SoftPrompt(3),),
}
ACTIVE = {"lora and an output scale": 2, "modulated routing": 1}


def deployment_of(backbone: Backbone, label: str) -> Deployment:
    plan = AdapterPlan(PARTS[label], ACTIVE.get(label))
    tensors = {name: value.float() for name, value in random_adapter(backbone.info, plan, seed=5).items()}
    return Deployment(plan, tensors)


def fresh(label: str) -> tuple[Backbone, Deployment]:
    backbone = tiny_backbone("olmoe")
    backbone.tokenizer.pad_token_id, backbone.tokenizer.eos_token_id = 0, 1
    return backbone, deployment_of(backbone, label)


def ours(backbone: Backbone, deployment: Deployment) -> tuple[list[list[int]], Tensor]:
    """FedGuild's greedy continuations of the prompts, and the logits at each prompt's end."""
    with SlotModel(backbone, [deployment.plan]) as slots, torch.no_grad():
        slots.load(0, deployment.tensors)
        (continued,) = slots.generate([PROMPTS], 5)
        rows = [Encoded((*prompt, 2), len(prompt)) for prompt in PROMPTS]
        return continued, slots.logits(collate([rows], 0))


def padded(prompts: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    """Prompts padded on the left, as transformers generates."""
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(row)) + list(row) for row in prompts])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in prompts])
    return {"input_ids": ids, "attention_mask": mask}


def continued(model: Any, prompts: Sequence[Sequence[int]], **options: Any) -> list[list[int]]:
    inputs = padded(prompts)
    out = model.generate(**inputs, max_new_tokens=5, pad_token_id=0, eos_token_id=1, **options)
    rows = out[:, inputs["input_ids"].shape[1] :].tolist()
    return [row[: row.index(1)] if 1 in row else row for row in rows]


@pytest.mark.parametrize("label", PARTS)
def test_it_computes_and_generates_what_the_slots_do(label: str) -> None:
    backbone, deployment = fresh(label)
    generated, logits = ours(backbone, deployment)
    model = attached(backbone, deployment)
    assert continued(model, PROMPTS, do_sample=False) == generated
    assert [continued(model, [prompt], do_sample=False)[0] for prompt in PROMPTS] == generated
    with torch.no_grad():
        alone = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
        output = model(**padded(PROMPTS))
    torch.testing.assert_close(alone, logits, rtol=0, atol=1e-4)
    assert output.logits.shape[:2] == (3, 4)
    if label != "soft prompt":  # whose positions a plain call leaves to the model
        torch.testing.assert_close(output.logits[:, -1][0], logits[0], rtol=0, atol=1e-4)


def test_the_adapter_changes_the_model() -> None:
    """Else the test above could not fail."""
    for label in PARTS:
        backbone, deployment = fresh(label)
        _, logits = ours(backbone, deployment)
        with torch.no_grad():
            plain = backbone.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
        assert (plain - logits[0]).abs().max() > 1e-2, label


def test_it_is_not_saved_without_its_adapter(tmp_path: Any) -> None:
    backbone, deployment = fresh("modulated routing")
    model = attached(backbone, deployment)
    with pytest.raises(ModelError, match="fedguild export"):
        model.save_pretrained(tmp_path)
    with pytest.raises(ModelError, match="Another SlotModel is attached"):
        attached(backbone, deployment)
