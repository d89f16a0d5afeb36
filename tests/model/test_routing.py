"""The routing rule against every family's own router and against the equations."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.families import FAMILIES
from fedguild.model.moe.routing import RoutingRule, route
from tests.backbones import EXPERTS, MOE_FAMILIES, TOP_K, tiny_model
from tests.oracles.routing import as_dicts, route_token

ORACLE_OF_FAMILY = {
    "olmoe": {},
    "mixtral": {"renormalise": True},
    "qwen2_moe": {},
    "qwen3_moe": {"renormalise": True},
    "deepseek_v2 greedy": {},
    "deepseek_v2 grouped": {"scaling": 2.5, "groups": 4, "groups_kept": 2},
    "deepseek_v3": {
        "score": "sigmoid",
        "renormalise": True,
        "scaling": 2.5,
        "groups": 4,
        "groups_kept": 2,
        "group_score": "top2",
    },
}


def assert_same_routing(found, expected):
    for left, right in zip(found, expected, strict=True):
        assert left == pytest.approx(right, rel=1e-6)


def router_of(family: str, **changes):
    model = tiny_model(family, **changes)
    return next(module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter"))


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_the_rule_equals_the_familys_own_router(family):
    router = router_of(family)
    hidden = torch.randn(40, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        logits, weights, indices = router(hidden)
    bias = getattr(router, "e_score_correction_bias", None)
    rule = FAMILIES.load(family.split()[0]).rule(router)
    ours = route(logits, rule, TOP_K, selection_bias=bias)
    assert_same_routing(as_dicts(*ours, EXPERTS), as_dicts(weights, indices, EXPERTS))
    oracle = [
        route_token(row, TOP_K, bias=None if bias is None else bias.tolist(), **ORACLE_OF_FAMILY[family])
        for row in logits.tolist()
    ]
    assert_same_routing(as_dicts(*ours, EXPERTS), oracle)


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("renormalise", [False, True])
def test_renormalisation_follows_the_config(family, renormalise):
    router = router_of(family, norm_topk_prob=renormalise)
    assert FAMILIES.load(family).rule(router).renormalise is renormalise


@pytest.mark.parametrize("family", MOE_FAMILIES)
def test_each_token_has_its_own_number_of_active_experts(family):
    """A token with k active experts is routed as by the family's router with top_k = k."""
    router = router_of(family)
    logits = torch.randn(24, EXPERTS, generator=torch.Generator().manual_seed(2))
    active = torch.tensor([1, 2, 3, 4] * 6)
    bias = getattr(router, "e_score_correction_bias", None)
    weights, indices = route(logits, FAMILIES.load(family.split()[0]).rule(router), TOP_K, active, bias)
    oracle = [
        route_token(row, k, bias=None if bias is None else bias.tolist(), **ORACLE_OF_FAMILY[family])
        for row, k in zip(logits.tolist(), active.tolist(), strict=True)
    ]
    assert_same_routing(as_dicts(weights, indices, EXPERTS), oracle)
    beyond = torch.arange(TOP_K) >= active[:, None]
    assert torch.equal(indices[beyond], torch.full((36,), EXPERTS))
    assert torch.equal(weights[beyond], torch.zeros(36))


@pytest.mark.parametrize("renormalise", [False, True])
def test_gradients_of_the_weights(renormalise):
    """Over tokens of mixed budgets, against autograd through the plain definition."""
    logits = torch.randn(6, EXPERTS, generator=torch.Generator().manual_seed(3)).requires_grad_()
    active = torch.tensor([1, 4, 2, 3, 4, 1])
    factor = torch.randn(6, TOP_K, generator=torch.Generator().manual_seed(4))
    weights, indices = route(logits, RoutingRule(renormalise=renormalise), TOP_K, active)
    (found,) = torch.autograd.grad((weights * factor).sum(), logits)

    total = torch.zeros(())
    for token, k in enumerate(active.tolist()):
        chosen = indices[token, :k]
        own = logits[token].softmax(0)[chosen]
        own = own / own.sum() if renormalise else own
        total = total + (own * factor[token, :k]).sum()
    (expected,) = torch.autograd.grad(total, logits)
    assert torch.allclose(found, expected, atol=1e-6)
    assert expected.abs().max() > 0.01


def test_weights_are_fp32_for_half_precision_logits():
    weights, _ = route(torch.randn(3, EXPERTS).bfloat16(), RoutingRule(), 2)
    assert weights.dtype is torch.float32
