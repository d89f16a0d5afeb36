"""A family that differs from the model is stopped before anything is trained."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

import pytest
import torch
from packaging.version import parse
from transformers import CONFIG_MAPPING

from fedguild.core.errors import ModelError
from fedguild.core.plugins import Plugins
from fedguild.model.backbone import make_backbone
from fedguild.model.families import FAMILIES
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.family import Family
from tests.families import tiny_model


class Swapped(Family):
    """Takes the experts' up projection for their gate."""

    def frozen(self, experts: Any) -> FrozenExperts:
        gate, up = experts.gate_up_proj.chunk(2, dim=1)
        return FrozenExperts(torch.cat([up, gate], dim=1), experts.down_proj, experts._apply_gate)


class Unbiased(Family):
    """DeepSeek-V3 without the bias of its choice."""

    routing = FAMILIES.load("deepseek_v3").routing

    def selection_bias(self, block: Any) -> None:
        return None


def taken_for(monkeypatch: pytest.MonkeyPatch, model: str, family: Family, **changes: Any) -> None:
    """Loads a model of one family as if it were of another."""
    monkeypatch.setattr(Plugins, "__contains__", lambda self, name: True)
    monkeypatch.setattr(Plugins, "load", lambda self, name: family)
    make_backbone(tiny_model(model, **changes), None, name="tiny")


@pytest.mark.parametrize(
    ("model", "family", "router", "rule"),
    [
        ("lfm2_moe", "deepseek_v3", "", ""),
        ("phimoe", "mixtral", "", ""),
        ("mixtral", "olmoe", "MixtralTopKRouter", ""),
        ("qwen3_moe", "mixtral", "Qwen3MoeTopKRouter", "renormalise=True"),
        ("deepseek_v3", "mixtral", "DeepseekV3TopkRouter", "score='softmax'"),
        ("mixtral", "deepseek_v3", "", ""),
    ],
)
def test_a_model_described_as_another_family_is_refused(
    monkeypatch: pytest.MonkeyPatch, model: str, family: str, router: str, rule: str
):
    described = FAMILIES.load(family)
    with pytest.raises(ModelError) as refused:
        taken_for(monkeypatch, model, described, **({"norm_topk_prob": False} if model == "qwen3_moe" else {}))
    message = str(refused.value)
    assert "layers." in message
    assert router in message
    assert rule in message


def test_a_bias_of_the_choice_that_is_left_out_is_found_even_where_it_is_zero(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelError, match=r"'deepseek_v3' does not route as DeepseekV3TopkRouter of model\.layers\.1"):
        taken_for(monkeypatch, "deepseek_v3", Unbiased())


class Capped(Family):
    """Qwen3-MoE, its logits capped."""

    def decoded(self, output: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        logits, weights, indices = output
        return 5 * (logits / 5).tanh(), weights, indices


def test_logits_that_are_not_linear_in_the_hidden_states_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(ModelError, match=r"no linear function .* names, model\.layers\.0\.mlp\.gate\.weight"):
        taken_for(monkeypatch, "qwen3_moe", Capped())


def test_experts_that_differ_are_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(
        ModelError, match=r"does not compute the experts as OlmoeExperts of model\.layers\.0.* differ by \d"
    ):
        taken_for(monkeypatch, "olmoe", Swapped())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_right_family_passes_in_every_dtype_and_uses_no_generator_of_the_run(dtype: torch.dtype):
    model = tiny_model("olmoe", dtype=dtype)
    torch.manual_seed(7)
    before = torch.get_rng_state()
    assert make_backbone(model, None, name="tiny").info.moe
    assert torch.equal(before, torch.get_rng_state())


def test_a_name_that_a_description_does_not_have_is_refused():
    with pytest.raises(TypeError, match="a model family has no 'gate', only router, projection, bias"):
        Family(gate="router")
    with pytest.raises(AttributeError, match="a routing rule has no 'norm'"):
        Family(routing={"norm": True}).rule(None)


@pytest.mark.skipif(parse(version("transformers")) < parse("5.23"), reason="older releases lack some families")
def test_the_config_of_a_described_family_is_known_to_transformers():
    assert set(FAMILIES) <= set(CONFIG_MAPPING)
