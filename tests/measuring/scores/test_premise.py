"""Loss of a model with fewer active experts, against transformers' own."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from fedguild.core.errors import DataError, ModelError
from fedguild.measuring.scores.premise import Level, measure, require_choice
from fedguild.model.backbone import Backbone, make_backbone
from tests.measuring.scores.conftest import ByteTokenizer

TEXT = "Of a layer's neurons, experts are made that act together. " * 8
SIZES = {
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 258,
}


def network(**changes: object) -> Qwen2MoeForCausalLM:
    torch.manual_seed(0)
    sizes = {"moe_intermediate_size": 16, "shared_expert_intermediate_size": 8, "num_experts": 8}
    return Qwen2MoeForCausalLM(
        Qwen2MoeConfig(**{**SIZES, **sizes, "num_experts_per_tok": 4, "mlp_only_layers": [0], **changes})
    ).eval()


def backbone(**changes: object) -> Backbone:
    return make_backbone(network(**changes), ByteTokenizer(), name="tiny")


def test_the_losses_are_those_of_transformers() -> None:
    """At each number of active experts, with and without renormalisation; rows open with the tokenizer's own token."""
    found = measure(backbone(), [TEXT], context=33, tokens=200)
    assert [(level.renormalised, level.active_experts) for level in found.levels] == [
        (scaling, active) for scaling in (False, True) for active in (4, 2, 1)
    ]
    rows = torch.tensor(ByteTokenizer().encode(TEXT, add_special_tokens=False)[: 6 * 32]).view(6, 32)
    rows = torch.cat([torch.full((6, 1), 256), rows], 1)
    assert found.tokens == 6 * 32
    for level in found.levels:
        plain = network(num_experts_per_tok=level.active_experts, norm_topk_prob=level.renormalised)
        with torch.no_grad():
            logits = plain(rows).logits
        wanted = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten()).item()
        assert level.nats == pytest.approx(wanted, abs=1e-4)
        assert level.lost == pytest.approx(level.nats - found.levels[0].nats, abs=1e-9)


def test_the_model_is_left_as_it_was() -> None:
    model = backbone()
    before = model.fingerprint()
    first, second = (measure(model, [TEXT], context=33, tokens=100) for _ in range(2))
    assert first == second
    assert model.fingerprint() == before
    assert not any(layer.rule.renormalise for layer in model.moe)
    assert model.runtime.current is None


def test_a_model_that_renormalises_is_compared_with_itself() -> None:
    found = measure(backbone(norm_topk_prob=True), [TEXT], context=33, tokens=100)
    assert found.renormalises
    assert found.levels[0].renormalised
    assert found.levels[0].lost == 0


def test_experts_that_are_never_chosen_are_idle() -> None:
    """A router that prefers experts 0 to 3 on all text: half of the experts are idle at k = 4, seven of eight at 1."""
    model = network()
    for layer in model.model.layers[1:]:
        layer.mlp.gate.weight.data.zero_()
    frozen = make_backbone(model, ByteTokenizer(), name="tiny")
    for layer in frozen.moe:
        layer.logit_terms.append(lambda hidden: torch.arange(8, 0, -1.0).expand(len(hidden), -1))
    found = measure(frozen, [TEXT], context=33, tokens=100)
    assert [(use.layer, use.active_experts, use.idle) for use in found.layers] == [
        (f"model.layers.{layer}.mlp", active, idle)
        for active, idle in ((4, 0.5), (2, 0.75), (1, 0.875))
        for layer in (1, 2)
    ]
    assert found.layers[-1].gini == pytest.approx(1 - 1 / 8)


def test_the_verdict_says_whether_there_is_something_to_repair() -> None:
    """Experts that all give out nothing make no difference."""
    model = network()
    for layer in model.model.layers[1:]:
        layer.mlp.experts.down_proj.data.zero_()
    same = measure(make_backbone(model, ByteTokenizer(), name="tiny"), [TEXT], context=33, tokens=100)
    assert same.verdict.startswith("Budgets have nothing to repair on this text")
    assert all(level.lost == 0 for level in same.levels)
    lossy = replace(same, levels=[*same.levels[:2], Level(1, False, nats=5.0, lost=1.3, half_width=0.1)])
    assert lossy.verdict.startswith("One active expert loses 1.300 ± 0.100 nats a token")


def test_its_record_is_json_and_its_frame_has_a_row_for_each_level() -> None:
    found = measure(backbone(), [TEXT], context=33, tokens=100)
    record = json.loads(json.dumps(found.record(), allow_nan=False))
    assert record["top_k"] == 4
    assert len(record["levels"]) == len(found.frame()) == 6
    assert len(record["layers"]) == 3 * 2
    assert all(math.isfinite(value) for value in found.frame()["half_width"])


def test_progress_counts_every_pass() -> None:
    seen: list[tuple[int, int]] = []
    measure(backbone(), [TEXT], context=33, tokens=200, step=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 12) for done in range(1, 13)]


def test_what_has_no_premise_is_refused() -> None:
    dense = make_backbone(LlamaForCausalLM(LlamaConfig(**SIZES)), ByteTokenizer(), name="small")
    with pytest.raises(ModelError, match="'small' is a dense model"):
        measure(dense, [TEXT])
    with pytest.raises(ModelError, match="activates one expert"):
        require_choice(backbone(num_experts_per_tok=1).info)
    with pytest.raises(DataError, match="fewer than two rows of 256"):
        measure(backbone(), ["Too short."])
    with pytest.raises(DataError, match="no token to predict"):
        measure(backbone(), [TEXT], context=2)
