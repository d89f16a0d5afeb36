"""Names and shapes of what a plan trains."""

from __future__ import annotations

import pytest

from fedguild.core.errors import ConfigError, ModelError
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import describe_architecture
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.targets import fitting_targets, targeted_linears

Q = "model.layers.0.self_attn.q_proj"
EXPERTS = "model.layers.1.mlp.experts"
GATE = "model.layers.1.mlp.gate"


def test_shapes_of_every_kind(olmoe_backbone):
    plan = AdapterPlan((Lora(3, 1.0, ("q_proj", "router", "experts")), OutputScale("per_layer")))
    shapes = trainable_shapes(olmoe_backbone.info, plan)
    assert len(shapes) == 2 * (2 + 2 + 6 + 1)
    assert shapes[f"{Q}.lora_A"] == (3, 16)
    assert shapes[f"{Q}.lora_B"] == (16, 3)
    assert shapes[f"{GATE}.lora_A"] == (3, 16)
    assert shapes[f"{GATE}.lora_B"] == (8, 3)
    assert shapes[f"{EXPERTS}.up_proj.lora_A"] == (8, 3, 16)
    assert shapes[f"{EXPERTS}.up_proj.lora_B"] == (8, 8, 3)
    assert shapes[f"{EXPERTS}.down_proj.lora_A"] == (8, 3, 8)
    assert shapes[f"{EXPERTS}.down_proj.lora_B"] == (8, 16, 3)
    assert shapes["model.layers.1.mlp.output_scale"] == ()


def test_a_shared_output_scale_is_one_scalar_and_needs_experts(olmoe_backbone, llama_backbone):
    plan = AdapterPlan((Lora(3, 1.0, ("attention",)), OutputScale("shared")))
    for backbone, scales in ((olmoe_backbone, ["output_scale"]), (llama_backbone, [])):
        assert [name for name in trainable_shapes(backbone.info, plan) if "lora" not in name] == scales


def test_groups_and_names_may_overlap(llama_backbone):
    plan = AdapterPlan((Lora(2, 1.0, ("attention", "q_proj", "up_proj")),))
    names = [linear.name.rsplit(".", 1)[-1] for linear in targeted_linears(llama_backbone.info, plan.lora.targets)]
    assert names == ["q_proj", "k_proj", "v_proj", "o_proj", "up_proj"] * 2


def test_every_unknown_target_is_named(llama_backbone):
    plan = AdapterPlan((Lora(2, 1.0, ("q_proj", "wq", "wk")),))
    with pytest.raises(ConfigError, match=r"target\(s\) wq, wk name no layer[\s\S]*attention, mlp, down_proj"):
        trainable_shapes(llama_backbone.info, plan)


def test_a_model_without_linear_layers_has_no_target():
    info = describe_architecture({"model_type": "gpt2", "n_layer": 1}, "some GPT-2")
    with pytest.raises(ModelError, match=r"some GPT-2 \(gpt2\) has no linear layers .*Conv1D[\s\S]*fedprompt"):
        targeted_linears(info, fitting_targets(info, ("attention",)))


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank):
    with pytest.raises(ConfigError, match=f"at least 1, but is {rank}"):
        AdapterPlan((Lora(rank, 1.0, ("attention",)),))


def test_no_active_experts_is_refused():
    with pytest.raises(ConfigError, match="active_experts must be at least 1, but is 0"):
        AdapterPlan((Lora(1, 1.0, ("attention",)),), 0)


def test_a_dense_model_says_that_it_has_no_experts(llama_backbone, olmoe_backbone):
    olmoe_backbone.info.require_experts("flame")
    with pytest.raises(ModelError, match=r"flame needs a mixture-of-experts model, but tiny llama \(llama\)"):
        llama_backbone.info.require_experts("flame")
