"""Model families that are found: those that ship, and the view of an architecture that another package gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Cohere2MoeConfig, LagunaConfig

from fedguild.core.errors import ConfigError, ModelError
from fedguild.model.backbone import Backbone, describe_architecture, make_backbone
from fedguild.model.families import FAMILIES
from tests.backbones import PAD, lora_plan
from tests.model.merged import assert_equal_to_merged
from tests.plugins import install

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "num_experts": 8,
    "num_experts_per_tok": 4,
}
CONFIGS: dict[str, Any] = {
    "laguna": lambda: LagunaConfig(**SIZES, mlp_layer_types=["sparse", "sparse"]),
    "cohere2_moe": lambda: Cohere2MoeConfig(**SIZES, expert_selection_fn="sigmoid"),
}
"""Architectures that do not ship: data describe the first, the second has a rule of its own."""
SOURCE = '''
    """Laguna and Cohere."""
    from fedguild.model.moe.family import Family
    from fedguild.model.moe.routing import RoutingRule


    class Cohere(Family):
        def rule(self, router):
            if router.expert_selection_fn == "softmax":  # of the best k logits: that of all, renormalised
                return RoutingRule(renormalise=True)
            return RoutingRule.of(router, score="sigmoid", renormalise="norm_topk_prob")


    laguna = Family(routing={"score": "sigmoid", "renormalise": True})
    cohere = Cohere()
'''
ENTRIES = """
    [fedguild.model_families]
    laguna = more_families:laguna
    cohere2_moe = more_families:cohere
    gemma4_text = more_families:Cohere
"""


@pytest.fixture
def more_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package with two families and a class in place of one."""
    install(monkeypatch, tmp_path / "more", "more-families", entry_points=ENTRIES, modules={"more_families.py": SOURCE})


def plain_model(family: str, **changes: Any) -> Any:
    config = CONFIGS[family]()
    config.update(changes)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float64).eval()
    model.set_experts_implementation("eager")
    return model


def backbone_of(family: str) -> Backbone:
    return make_backbone(plain_model(family), None, name=f"tiny {family}")


@pytest.mark.usefixtures("more_families")
@pytest.mark.parametrize("family", CONFIGS)
def test_slots_equal_their_merged_models_in_losses_and_gradients(family: str):
    """As for the families that ship: two slots of mixed rank, scale and active experts."""
    backbone = backbone_of(family)
    assert [moe.router.rpartition(".")[2] for moe in backbone.info.moe] == ["gate", "gate"]
    assert (backbone.info.top_k, backbone.info.moe[0].num_experts) == (4, 8)
    targets = ("attention", "router", "experts")
    plans = [
        lora_plan(3, 0.5, targets, 2, output_scale="per_layer"),
        lora_plan(1, 2.0, targets, output_scale="per_layer"),
    ]
    assert_equal_to_merged(backbone, plain_model(family), plans, [[7, 5], [7, 5]])


@pytest.mark.usefixtures("more_families")
def test_a_config_alone_is_described_too():
    info = describe_architecture({"model_type": "laguna", **SIZES, "mlp_layer_types": ["sparse"] * 2}, "laguna")
    assert info.moe == backbone_of("laguna").info.moe


def test_without_the_package_experts_cannot_be_adapted():
    with pytest.raises(ModelError, match=r"family 'laguna' of.* has no description.*\n.*deepseek_v2, .*olmoe"):
        backbone_of("laguna").info.require_experts("FLAME")


@pytest.mark.usefixtures("more_families")
def test_a_family_that_is_none_is_refused_and_leaves_the_others_alone():
    with pytest.raises(ConfigError, match=r"family gemma4_text \(more-families 1.2\) cannot .*: a model family is a"):
        FAMILIES.load("gemma4_text")
    assert [family.name for family in FAMILIES.checked() if family.fault] == ["gemma4_text"]


@pytest.mark.usefixtures("more_families")
def test_a_layer_that_is_not_built_as_its_family_says_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FAMILIES.load("laguna"), "router", "router")
    with pytest.raises(ModelError, match=r"model.layers.0.mlp \(LagunaSparseMoeBlock\) is not built as.*'router'"):
        backbone_of("laguna")


@pytest.mark.usefixtures("more_families")
def test_a_family_that_needs_a_newer_transformers_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(FAMILIES.load("laguna"), "since", "99.1")
    with pytest.raises(ModelError, match=rf"'laguna' need transformers 99.1 or newer; {transformers.__version__} is"):
        backbone_of("laguna")
    with pytest.raises(ModelError, match="'laguna' need transformers 99"):
        describe_architecture({"model_type": "laguna", **SIZES}, "laguna")


def test_listing_the_families_does_not_import_torch():
    code = "import sys; from fedguild.model.families import FAMILIES; print('torch' in sys.modules, *FAMILIES)"
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split()[0] == "False"
    assert run.stdout.split()[1:] == sorted(FAMILIES)
