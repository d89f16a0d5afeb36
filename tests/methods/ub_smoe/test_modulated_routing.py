"""Dynamic Modulated Routing against Algorithm 2: choice, weights, and the gradients that reach phi."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.methods.ub_smoe.modulated_routing import ModulatedChooser, ModulatedRouting
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.moe.routing import RoutingRule, route
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_rows, tiny_backbone
from tests.oracles import ub_smoe as oracle
from tests.oracles.routing import as_dicts

TOKENS, EXPERTS, SLOTS = 24, 8, 3
READINGS = [(m, g) for m in ("candidate", "preserve", "none") for g in ("renormalised", "native")]
CANDIDATES = (0, 1, 2, 4, 8)
ACTIVE = torch.tensor([4, 1, 2])
"""K_c of each slot."""


def given(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [N, M], phi [S, M] large enough to change the order, and the slot of each token."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(TOKENS, EXPERTS, generator=rng, dtype=torch.float64)
    phi = torch.randn(SLOTS, EXPERTS, generator=rng, dtype=torch.float64)
    return logits, phi, torch.arange(TOKENS) * SLOTS // TOKENS


def chooser(modulation: str, gating: str, candidates: int, phi: Tensor) -> ModulatedChooser:
    part = ModulatedRouting(modulation, candidates, gating)  # type: ignore[arg-type]
    return ModulatedChooser(part, None if modulation == "none" else phi, RoutingRule())


def expected(logits: Tensor, phi: Tensor, slot: Tensor, candidates: int, reading: tuple[str, str]):
    return [
        oracle.route(scores, phi[own].tolist(), int(ACTIVE[own]), candidates, *reading)
        for scores, own in zip(logits.tolist(), slot.tolist(), strict=True)
    ]


@pytest.mark.parametrize("candidates", CANDIDATES)
@pytest.mark.parametrize("reading", READINGS, ids="-".join)
def test_experts_and_weights_are_algorithm_2s(reading: tuple[str, str], candidates: int) -> None:
    logits, phi, slot = given()
    found = chooser(*reading, candidates, phi)(logits, slot, 4, ACTIVE[slot])
    for ours, theirs in zip(as_dicts(*found, EXPERTS), expected(logits, phi, slot, candidates, reading), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("candidates", [1, 2, 4])
@pytest.mark.parametrize("reading", READINGS, ids="-".join)
def test_gradients_are_those_of_the_slow_version(reading: tuple[str, str], candidates: int) -> None:
    """Central differences of the oracle, by every logit and every phi."""
    logits, phi, slot = given(1)
    pull = torch.randn(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(2), dtype=torch.float64).tolist()

    def slow(logits: Tensor, phi: Tensor) -> float:
        weights = expected(logits, phi, slot, candidates, reading)
        return sum(pull[n][i] * w for n, token in enumerate(weights) for i, w in token.items())

    def differences(vary: Tensor, of: list[Tensor]) -> Tensor:
        result, step = torch.zeros_like(vary), 1e-6
        for at in range(vary.numel()):
            kept = float(vary.view(-1)[at])
            values = []
            for sign in (1, -1):
                vary.view(-1)[at] = kept + sign * step
                values.append(slow(*of))
            vary.view(-1)[at] = kept
            result.view(-1)[at] = (values[0] - values[1]) / (2 * step)
        return result

    leaves = [logits.clone().requires_grad_(), phi.clone().requires_grad_()]
    weights, indices = chooser(*reading, candidates, leaves[1])(leaves[0], slot, 4, ACTIVE[slot])
    factors = torch.nn.functional.pad(torch.tensor(pull, dtype=torch.float64), (0, 1)).gather(1, indices)
    (weights * factors).sum().backward()
    torch.testing.assert_close(leaves[0].grad, differences(logits, [logits, phi]), rtol=1e-6, atol=1e-8)
    if reading[0] != "none":
        torch.testing.assert_close(leaves[1].grad, differences(phi, [logits, phi]), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("renormalise", [False, True])
def test_without_modulation_native_gating_is_the_familys(renormalise: bool) -> None:
    logits, _, slot = given()
    rule = RoutingRule(renormalise=renormalise, scaling=2.5)
    part = ModulatedRouting("none", 2, "native")
    ours = ModulatedChooser(part, None, rule)(logits.float(), slot, 4, ACTIVE[slot])
    theirs = route(logits.float(), rule, 4, ACTIVE[slot])
    torch.testing.assert_close(ours[0], theirs[0])
    assert torch.equal(ours[1], theirs[1])


# in the model


def plan_with(active: int, **changes: object) -> AdapterPlan:
    part = replace(ModulatedRouting(), **changes)
    return AdapterPlan((Lora(2, 1.0, ("experts",)), part), active)


@pytest.fixture(scope="module")
def exact() -> Backbone:
    return tiny_backbone("olmoe", dtype=torch.float64)


def loaded(model: SlotModel, seed: int) -> None:
    """Gives every trainable normal values, B included."""
    rng = torch.Generator().manual_seed(seed)
    for name, trainable in model.trainables.items():
        value = torch.randn(trainable.stored.shape, generator=rng, dtype=torch.float64)
        trainable.stored.detach().copy_(value * (1.0 if name.endswith("phi") else 0.3))


@pytest.mark.parametrize("modulation", ["candidate", "preserve"])
@pytest.mark.parametrize("gating", ["renormalised", "native"])
def test_the_gradient_of_phi_is_that_of_the_loss(modulation: str, gating: str, exact: Backbone) -> None:
    """Central differences through the whole model, clients with 4, 2 and 1 active experts.

    The model is fp64, but transformers' routers hand their weights on in fp32, hence the wide step.
    """
    plans = [plan_with(k, modulation=modulation, gating=gating, candidates=2) for k in (4, 2, 1)]
    rows = [[Encoded(tuple(row), 2) for row in random_rows([5, 7], slot)] for slot in range(3)]
    batch = collate(rows, PAD)
    with SlotModel(exact, plans) as model:
        loaded(model, 3)
        model.token_losses(batch).sum().backward()
        checked = 0
        for name, trainable in model.trainables.items():
            if not name.endswith("phi"):
                continue
            values, grad = trainable.stored.detach(), trainable.stored.grad
            for slot, expert in [(0, 0), (0, 3), (1, 5), (2, 1), (1, 7)]:
                kept, sides = float(values[slot, expert]), []
                for sign in (1, -1):
                    values[slot, expert] = kept + sign * 1e-3
                    with torch.no_grad():
                        sides.append(float(model.token_losses(batch).sum()))
                values[slot, expert] = kept
                assert float(grad[slot, expert]) == pytest.approx((sides[0] - sides[1]) / 2e-3, rel=1e-3, abs=1e-3)
                checked += bool(grad[slot, expert])
    assert checked


def test_a_fixed_phi_acts_but_gets_no_gradient(exact: Backbone) -> None:
    rows = [[Encoded(tuple(row), 2) for row in random_rows([6], 0)]]
    losses = []
    for learned in (True, False):
        with SlotModel(exact, [plan_with(4, learned=learned)]) as model:
            loaded(model, 5)
            losses.append(model.token_losses(collate(rows, PAD)))
            losses[-1].sum().backward()
            grads = [t.stored.grad for name, t in model.trainables.items() if name.endswith("phi")]
            assert all((grad is not None) is learned for grad in grads)
    assert torch.equal(*losses)


# bad input


def test_more_candidates_than_experts(exact: Backbone) -> None:
    with pytest.raises(ConfigError, match=r"9 candidates are requested, but tiny olmoe has 8(.|\n)*0 to 8"):
        ModulatedRouting(candidates=9).shapes(exact.info)


@pytest.mark.parametrize(("family", "told"), [("deepseek_v3", "scores by sigmoid"), ("deepseek_v2 grouped", "limits")])
def test_a_router_that_is_no_softmax_over_all(family: str, told: str) -> None:
    with pytest.raises(ModelError, match=rf"softmax over all experts; .*{told}"):
        SlotModel(tiny_backbone(family), [plan_with(2)])


def test_unequal_clients_of_a_cohort(olmoe_backbone: Backbone) -> None:
    part = ModulatedRouting()
    with (
        SlotModel(olmoe_backbone, [plan_with(2)]) as model,
        pytest.raises(ConfigError, match="modulate their routing in the same way"),
    ):
        part.attach(model, [part, replace(part, candidates=3)])
