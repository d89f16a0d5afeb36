"""Changes in a backbone's weights: against a slow sum of dense matrices, and gone without a trace."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.model.weight_changes import weight_modules
from tests.backbones import DENSE_FAMILIES, MOE_FAMILIES, SEQ2SEQ_FAMILIES, random_adapter, tiny_backbone
from tests.oracles.merges import changed_weights

TOKENS = torch.arange(3, 15)[None]
VERSIONS = ((1, 3), (2, 1), (10, 2))
"""Versions and their ranks; as text, 10 would come before 2."""


def targets_of(backbone: Backbone) -> tuple[str, ...]:
    return ("attention", "router", "experts") if backbone.info.moe else ("attention", "mlp")


def merges_of(backbone: Backbone, targets: tuple[str, ...], size: float = 0.3) -> dict[str, Tensor]:
    return {
        f"{version}/{name}": value.float()
        for version, rank in VERSIONS
        for name, value in random_adapter(
            backbone.info, AdapterPlan((Lora(rank, 1.0, targets),)), version, size
        ).items()
    }


def weights_of(backbone: Backbone) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in backbone.model.state_dict().items()}


def assert_same_bits(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert not [name for name, value in expected.items() if not torch.equal(found[name], value)]


@pytest.mark.parametrize("family", [*MOE_FAMILIES, *DENSE_FAMILIES, *SEQ2SEQ_FAMILIES])
def test_every_weight_of_every_family(family: str) -> None:
    backbone = tiny_backbone(family)
    before, merges = weights_of(backbone), merges_of(backbone, targets_of(backbone))
    expected = changed_weights(before, merges)
    with backbone.merged(merges):
        inside = weights_of(backbone)
    assert_same_bits(weights_of(backbone), before)
    for name, weight in expected.items():
        torch.testing.assert_close(inside[name].double(), weight, rtol=1e-5, atol=1e-5, msg=name)
    touched = {name for name, weight in inside.items() if not torch.equal(weight, before[name])}
    assert touched == {
        weight
        for weight, parts in weight_modules(backbone.info).items()
        if any(f"1/{p}.lora_A" in merges for p in parts)
    }


@pytest.mark.parametrize("family", ["olmoe", "switch", "llama"])
def test_a_merged_change_computes_what_an_adapter_computes(family: str) -> None:
    backbone = tiny_backbone(family, dtype=torch.float64)
    plan = AdapterPlan((Lora(3, 0.7, targets_of(backbone)),))
    adapter = random_adapter(backbone.info, plan, seed=1)
    merges = {f"1/{name}": value * (0.7 if name.endswith("lora_B") else 1.0) for name, value in adapter.items()}
    zero = {name: torch.zeros_like(value) for name, value in adapter.items()}

    def said(tensors: dict[str, Tensor]) -> list[list[int]]:
        with SlotModel(backbone, [plan]) as model, torch.no_grad():
            model.load(0, tensors)
            inputs = {"decoder_input_ids": TOKENS[:, :5]} if backbone.info.seq2seq else {}
            return backbone.model(input_ids=TOKENS, use_cache=False, **inputs).logits

    beside = said(adapter)
    with backbone.merged(merges):
        beneath = said(zero)
    torch.testing.assert_close(beneath, beside, rtol=1e-9, atol=1e-9)
    assert (said(zero) - beside).abs().max() > 1e-3


def test_bf16_is_rounded_once_however_many_versions() -> None:
    backbone = tiny_backbone("olmoe", dtype=torch.bfloat16)
    before = weights_of(backbone)
    small = random_adapter(backbone.info, AdapterPlan((Lora(2, 1.0, ("attention", "experts")),)), 1, size=0.05)
    many = {f"{version}/{name}": value for version in range(1, 9) for name, value in small.items()}
    expected = changed_weights(before, many)
    with backbone.merged(many):
        inside = weights_of(backbone)
    assert_same_bits(weights_of(backbone), before)
    for name, weight in expected.items():
        assert inside[name].dtype == before[name].dtype
        assert ((inside[name].double() - weight).abs() <= 2**-8 * weight.abs() + 1e-6).all(), name


def test_it_does_not_matter_in_which_order_the_names_come() -> None:
    backbone = tiny_backbone("olmoe")
    merges = merges_of(backbone, ("attention", "experts"))
    with backbone.merged(merges):
        first = weights_of(backbone)
    with backbone.merged(dict(sorted(merges.items(), reverse=True))):
        assert_same_bits(weights_of(backbone), first)


def test_tied_embeddings_are_not_touched() -> None:
    backbone = tiny_backbone("llama", tie_word_embeddings=True)
    model = backbone.model
    before = model.lm_head.weight.clone()
    with backbone.merged(merges_of(backbone, ("attention", "mlp"))):
        assert torch.equal(model.lm_head.weight, before)
        assert model.lm_head.weight is model.model.embed_tokens.weight


def test_an_exception_inside_leaves_no_change() -> None:
    backbone = tiny_backbone("olmoe")
    before, merges = backbone.fingerprint(), merges_of(backbone, ("attention", "experts"))
    with pytest.raises(KeyError), backbone.merged(merges):
        raise KeyError
    assert backbone.fingerprint() == before
    with backbone.merged(merges):
        assert backbone.fingerprint() != before


def test_a_change_that_fits_not_leaves_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first weights are changed already when the last turns out not to fit."""
    backbone = tiny_backbone("olmoe")
    before, merges = backbone.fingerprint(), merges_of(backbone, ("attention", "experts"))
    name = next(reversed(merges))
    with (
        pytest.raises(ModelError, match=r"does not fit model\.layers\.1\.mlp\.experts"),
        backbone.merged({**merges, name: merges[name][..., :-1, :]}),
    ):
        pass
    assert backbone.fingerprint() == before
    assert not backbone.is_merged


def test_nothing_to_merge_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = tiny_backbone("olmoe")
    monkeypatch.setattr(backbone, "model", None)
    with backbone.merged({}):
        assert not backbone.is_merged
        with backbone.merged({}):
            pass


@pytest.mark.parametrize("second", [True, False])
def test_a_backbone_holds_the_changes_of_one_state(second: bool) -> None:
    """Nobody gets the weights of another by accident, not even who asks for those as published."""
    backbone = tiny_backbone("llama")
    merges = merges_of(backbone, ("q_proj",))
    with backbone.merged(merges):
        with (
            pytest.raises(ModelError, match="include another state's changes"),
            backbone.merged(merges if second else {}),
        ):
            pass
        assert backbone.is_merged
    with backbone.merged(merges):
        pass


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ("model.layers.0.self_attn.q_proj.lora_A", "not a factor that can be merged"),
        ("1/model.layers.0.self_attn.q_proj.delta", "not a factor that can be merged"),
        ("7/model.layers.0.self_attn.q_proj.lora_A", "7/model.layers.0.self_attn.q_proj has only one of its two"),
    ],
)
def test_wrong_names_are_refused(wrong: str, message: str) -> None:
    backbone = tiny_backbone("llama")
    with pytest.raises(ModelError, match=message), backbone.merged({wrong: torch.zeros(2, 16)}):
        pass


def test_factors_of_another_model_are_refused() -> None:
    merges = merges_of(tiny_backbone("olmoe"), ("experts",))
    backbone = tiny_backbone("llama")
    message = r"tiny llama has no model\.layers\.0\.mlp\.experts\.\w+ to merge"
    with pytest.raises(ModelError, match=message), backbone.merged(merges):
        pass


def test_four_bit_weights_are_refused_with_a_way_out() -> None:
    backbone = tiny_backbone("llama")
    merges = merges_of(backbone, ("q_proj",))
    backbone.model.hf_quantizer = SimpleNamespace()
    with pytest.raises(ModelError, match=r"loaded in 4 bit(.|\n)*model\.load_in_4bit=false"), backbone.merged(merges):
        pass
    with backbone.merged({}):
        pass
