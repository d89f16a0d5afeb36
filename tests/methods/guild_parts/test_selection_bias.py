"""The selection bias against part c of the box: logits + phi choose, the logits alone weigh."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedguild.data.batches import Encoded, collate
from fedguild.errors import ModelError
from fedguild.methods.guild_parts.balancing import balanced, within_reach
from fedguild.methods.guild_parts.selection_bias import BiasedChooser, SelectionBias
from fedguild.model.backbone import Backbone
from fedguild.model.moe.routing import RoutingRule, route
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.utilisation import gini
from tests.backbones import random_rows, tiny_backbone
from tests.oracles import guild_parts as oracle
from tests.oracles.routing import as_dicts, route_token

TOKENS, EXPERTS, SLOTS = 24, 8, 3
ACTIVE = torch.tensor([4, 1, 2])
"""k_i of each slot."""


class Layer:
    """What a chooser sees of a layer."""

    def __init__(self, rule: RoutingRule, bias: Tensor | None = None) -> None:
        self.rule, self.router = rule, nn.Linear(1, 1)
        if bias is not None:
            self.router.register_buffer("e_score_correction_bias", bias)


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, M], phi [S, M] large enough to change the order, and the slot of each token."""
    rng = torch.Generator().manual_seed(seed)
    logits, phi = torch.randn(TOKENS, EXPERTS, generator=rng), torch.randn(SLOTS, EXPERTS, generator=rng)
    return logits, phi, torch.arange(TOKENS) * SLOTS // TOKENS


def chooser(phi: Tensor, rule: RoutingRule, bias: Tensor | None = None) -> BiasedChooser:
    return BiasedChooser(Layer(rule, bias), phi)  # type: ignore[arg-type]


def test_experts_and_weights_are_those_of_part_c() -> None:
    logits, phi, slot = given()
    found = as_dicts(*chooser(phi, RoutingRule())(logits, slot, 4, ACTIVE[slot]), EXPERTS)
    changed = 0
    for token, ours in enumerate(found):
        own = int(slot[token])
        theirs = oracle.route(logits[token].tolist(), phi[own].tolist(), int(ACTIVE[own]))
        assert ours == pytest.approx(theirs, rel=1e-5)
        changed += ours.keys() != oracle.route(logits[token].tolist(), [0.0] * EXPERTS, int(ACTIVE[own])).keys()
    assert changed > TOKENS // 3


@pytest.mark.parametrize(
    "rule",
    [
        {"renormalise": True, "scaling": 2.5},
        {"groups": 4, "groups_kept": 2},
        {"score": "sigmoid", "groups": 4, "groups_kept": 2, "group_score": "top2", "renormalise": True},
    ],
)
def test_other_families_choose_by_their_own_rule(rule: dict[str, Any]) -> None:
    """Groups and their choice follow the shifted logits too; a bias that the model has on the scores stays."""
    logits, phi, slot = given(1)
    bias = 0.2 * torch.randn(EXPERTS, generator=torch.Generator().manual_seed(3)) if "score" in rule else None
    found = as_dicts(*chooser(phi, RoutingRule(**rule), bias)(logits, slot, 4, None), EXPERTS)
    for token, ours in enumerate(found):
        shifted = (logits[token] + phi[slot[token]]).tolist()
        chosen = route_token(shifted, 4, **rule, bias=None if bias is None else bias.tolist())
        alone = {**rule, "renormalise": False, "groups": 1, "groups_kept": 1, "scaling": 1.0}
        scores = route_token(logits[token].tolist(), EXPERTS, **alone)
        total = sum(scores[expert] for expert in chosen) if rule.get("renormalise") else 1.0
        theirs = {expert: scores[expert] / total * rule.get("scaling", 1.0) for expert in chosen}
        assert ours == pytest.approx(theirs, rel=1e-5)


def test_without_an_offset_it_is_the_familys_routing_bit_for_bit() -> None:
    logits, phi, slot = given(2)
    found = chooser(torch.zeros_like(phi), RoutingRule())(logits, slot, 4, ACTIVE[slot])
    for ours, theirs in zip(found, route(logits, RoutingRule(), 4, ACTIVE[slot]), strict=True):
        assert torch.equal(ours, theirs)


def test_gradients_of_the_logits_are_those_of_the_chosen_weights() -> None:
    """They do not know of phi, and phi has none."""
    logits, phi, slot = given(4)
    leaf = logits.clone().requires_grad_()
    weights, indices = chooser(phi, RoutingRule())(leaf, slot, 2, None)
    weights.square().sum().backward()
    again = logits.clone().requires_grad_()
    again.softmax(dim=-1).gather(-1, indices).square().sum().backward()
    torch.testing.assert_close(leaf.grad, again.grad)
    assert not phi.requires_grad


@pytest.mark.parametrize("family", ["olmoe", "mixtral", "deepseek_v3"])
def test_a_model_chooses_other_experts_and_is_itself_again_afterwards(family: str) -> None:
    """Two slots, one without an offset; the other is pushed to the first expert."""
    backbone = tiny_backbone(family)
    rows = [Encoded(tuple(row), 2) for row in random_rows([9, 9, 9, 9], seed=1)]
    batch = collate([rows, rows], 0)
    (layer, *_), active = backbone.info.moe, backbone.info.top_k
    with SlotModel(backbone, [AdapterPlan((SelectionBias(),), active)] * 2) as model:
        pushed = torch.zeros(layer.num_experts)
        pushed[0] = 50.0
        model.load(1, {f"{layer.name}.selection_bias": pushed})
        assert not model.trainables
        assert set(model.loaded) == {f"{moe.name}.selection_bias" for moe in backbone.info.moe}
        with model.collect_routing() as counted:
            losses = model.token_losses(batch)
    pushed_to, before = counted.counts[0, :, 0].flip(0).tolist()
    assert pushed_to > before
    if family != "deepseek_v3":  # where a token may use the experts of some groups only
        assert pushed_to == int(counted.layer_tokens[0, 1])
    assert torch.equal(counted.counts[0].sum(-1), counted.layer_tokens[0] * active)
    with SlotModel(backbone, [AdapterPlan((), active)]) as plain:
        torch.testing.assert_close(plain.token_losses(collate([rows], 0)), losses[: len(losses) // 2])


@pytest.mark.parametrize("limit", [0.1, 10.0])
def test_phi_moves_by_a_step_towards_even_use(limit: float) -> None:
    """u < 1/M, u > 1/M, u = 1/M, and unused."""
    before, used = torch.tensor([0.1, -0.1, 0.0, 0.05]), torch.tensor([0.2, 0.55, 0.25, 0.0])
    found = balanced(before, used, 0.04, limit)
    torch.testing.assert_close(found, torch.tensor(oracle.phi(before.tolist(), used.tolist(), 0.04, limit)))
    assert float(found[2]) == 0.0


def test_rounds_of_steps_even_out_the_use_of_a_skewed_router() -> None:
    logits = torch.randn(400, EXPERTS, generator=torch.Generator().manual_seed(0)) + torch.arange(EXPERTS) / 4
    phi, slot, evenness = torch.zeros(EXPERTS), torch.zeros(400, dtype=torch.int64), []
    for _ in range(40):
        _, indices = chooser(phi[None], RoutingRule())(logits, slot, 2, None)
        used = indices.flatten().bincount(minlength=EXPERTS) / indices.numel()
        evenness.append(float(gini(used)))
        phi = balanced(phi, used, 0.05, 2.0)
    assert evenness[0] > 0.35
    assert evenness[-1] < 0.05


def test_a_lie_about_the_use_counts_no_more_than_all_of_it() -> None:
    before = {"e": torch.tensor([0.5, 0.5])}
    assert within_reach({"e": torch.tensor([1e6, -1e6])}, before)["e"].tolist() == [1.5, -0.5]
    assert within_reach({"e": torch.tensor([1.0, 0.0])}, before)["e"].tolist() == [1.0, 0.0]


def test_a_dense_model_has_no_selection() -> None:
    with pytest.raises(ModelError, match="A selection bias needs"):
        SelectionBias().shapes(tiny_backbone("llama").info)


def test_phi_is_loaded_and_never_trained(olmoe_backbone: Backbone) -> None:
    part = SelectionBias()
    shapes = part.shapes(olmoe_backbone.info)
    assert not any(part.trains(name) for name in shapes)
    assert set(shapes.values()) == {(8,)}
