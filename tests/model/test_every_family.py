"""Every family that is described, on a tiny random model of its config class, against transformers' own model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from fedguild.data.batches import Encoded, collate
from fedguild.model import kernels
from fedguild.model.slots import SlotModel
from tests.backbones import END, EXPERTS, PAD, lora_plan, random_adapter, random_rows
from tests.families import DESCRIBED, tiny_backbone, tiny_model
from tests.model.merged import assert_equal_to_merged


@pytest.mark.parametrize("family", DESCRIBED)
def test_logits_routing_and_gradients_are_those_of_the_plain_model(family: str):
    """In fp64: without an adapter; with LoRA on routers and experts in two slots, one with fewer active experts."""
    plain, backbone = tiny_model(family, dtype=torch.float64), tiny_backbone(family, dtype=torch.float64)
    ids = torch.tensor(random_rows([9, 9], seed=1))
    native: list[torch.Tensor] = []
    for moe in backbone.info.moe:
        if family == "llama4_text":  # whose experts get weighted inputs
            plain.get_submodule(moe.router).register_forward_hook(lambda *seen: native.append(seen[2][0].double()))
        else:
            plain.get_submodule(moe.experts).register_forward_pre_hook(
                lambda _, args: native.append(by_expert(args[2], args[1]))
            )
    with torch.no_grad():
        expected, found = (model(ids, use_cache=False).logits for model in (plain, backbone.model))
    assert expected.abs().max() > 0.1
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)

    routed: list[torch.Tensor] = []
    for layer in backbone.moe:
        layer.observers.append(lambda routing: routed.append(by_expert(routing.weights, routing.indices)))
    rows = [[Encoded(tuple(row), 2) for row in ids.tolist()]]
    with SlotModel(backbone, [lora_plan(1, 1.0, ("router", "experts"))]) as model, torch.no_grad():
        model.token_losses(collate(rows, PAD))
    for layer in backbone.moe:
        layer.observers.clear()
    assert len(routed) == len(native) == len(backbone.moe) > 0
    for ours, own in zip(routed, native, strict=True):
        assert ((own != 0).sum(dim=1) == backbone.info.top_k).all()
        torch.testing.assert_close(ours, own, rtol=1e-6, atol=1e-6)

    targets = ("router", "experts")
    plans = [
        lora_plan(3, 0.5, targets, max(1, backbone.info.top_k // 2), output_scale="per_layer"),
        lora_plan(1, 2.0, targets, output_scale="per_layer"),
    ]
    assert_equal_to_merged(backbone, plain, plans, [[7, 5], [6]])


@pytest.mark.parametrize("family", DESCRIBED)
def test_in_fp32_the_backbone_is_the_plain_model(family: str, monkeypatch: pytest.MonkeyPatch):
    """To 1e-6 of the largest logit; with the kernels of a CPU, which round otherwise, to a few times as much."""
    ids = torch.tensor(random_rows([9, 9], seed=1))
    with torch.no_grad():
        expected = tiny_model(family)(ids, use_cache=False).logits
        for setting, near in (("none", 1e-6), ("auto", 1e-5)):
            monkeypatch.setenv(kernels.VARIABLE, setting)
            found = tiny_backbone(family).model(ids, use_cache=False).logits
            torch.testing.assert_close(found, expected, rtol=0, atol=near * float(expected.abs().max()))


@pytest.mark.parametrize("family", ["minimax", "qwen3_next"])
def test_generation_is_each_prompts_own(family: str):
    """MiniMax's cache forgets that a row is padded."""
    backbone = tiny_backbone(family)
    backbone.tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
    plan = lora_plan(2, 1.0, ("router",))
    prompts = [[[5, 9, 3, 7], [4, 8], [11, 6, 10]], [[6, 12]]]
    with SlotModel(backbone, [plan, plan]) as model:
        for slot in (0, 1):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        together = model.generate(prompts, 5)
        for slot, rows in enumerate(prompts):
            alone = [model.generate([[row] if own == slot else [] for own in (0, 1)], 5)[slot][0] for row in rows]
            assert together[slot] == alone


def test_a_model_that_its_family_does_not_cover_trains_without_its_experts():
    backbone = tiny_backbone("nemotron_h", moe_latent_size=8)
    assert not backbone.info.moe
    assert backbone.info.undescribed


def by_expert(weights: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
    """Returns [N, M], each token's weight of every expert, 0 for one that it does not take."""
    shares = torch.zeros(len(weights), EXPERTS + 1, dtype=torch.float64)
    return shares.scatter(1, indices, weights.double())[:, :EXPERTS]
