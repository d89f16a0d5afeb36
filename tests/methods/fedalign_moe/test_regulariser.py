"""FedAlign-MoE's client: statistics (Eq. 3, 5, 12) and the regulariser (Eq. 8-11) against slow loops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.observing import observing
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.methods.fedalign_moe.measuring import RoutingProfile, measure_routing, sample_rows
from fedguild.methods.fedalign_moe.regulariser import LayerTarget, Regulariser
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import MoeInfo
from fedguild.model.moe.view import Routing
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone
from tests.oracles import fedalign_moe as oracle

EXPERTS, TOP_K, HIDDEN = 5, 2, 3
LAYER = MoeInfo("block", "block.gate", "block.experts", EXPERTS, TOP_K, HIDDEN, 4)
PLAN = AdapterPlan((Lora(2, 2.0, ("experts",)), FullRouter()))
SETTINGS = TrainingSettings(optimizer="adamw", learning_rate=0.02, batch_size=2, steps=3, max_grad_norm=None)


def routing(tokens_of: list[int], seed: int, padding: bool = True, layer: int = 0) -> Routing:
    """A random routing in fp64 with these tokens per slot, every third of them padding."""
    rng, count = torch_rng(seed, "routing"), sum(tokens_of)
    logits = torch.randn(count, EXPERTS, generator=rng, dtype=torch.float64) * 2
    weights, indices = logits.softmax(-1).topk(TOP_K)
    slot = torch.tensor([s for s, tokens in enumerate(tokens_of) for _ in range(tokens)], dtype=torch.int64)
    keep = torch.arange(count) % 3 != 2 if padding else None
    hidden = torch.randn(count, HIDDEN, generator=rng, dtype=torch.float64)
    return Routing(layer, hidden, logits.requires_grad_(), weights, indices, slot, keep)


def real_of(seen: Routing, slot: int) -> list[bool]:
    keep = [True] * len(seen.slot) if seen.keep is None else seen.keep.tolist()
    return [ok and owner == slot for ok, owner in zip(keep, seen.slot.tolist(), strict=True)]


# Eq. 3, 5, 12


@pytest.mark.parametrize("tokens", [[9], [4, 7, 1], [0, 5], [3, 0, 40]])
@pytest.mark.parametrize("padding", [False, True])
def test_statistics_of_two_passes(tokens: list[int], padding: bool) -> None:
    profile = RoutingProfile([LAYER], len(tokens), torch.device("cpu"), torch.float64)
    passes = [routing(tokens, seed, padding) for seed in (1, 2)]
    for seen in passes:
        profile.observe(seen)
    for slot in range(len(tokens)):
        (found,) = profile.of(slot)
        logits, hidden = (torch.cat([getattr(seen, part) for seen in passes]).detach() for part in ("logits", "hidden"))
        real = [ok for seen in passes for ok in real_of(seen, slot)]
        mean, margin, region = oracle.routing_statistics(logits, hidden, real, TOP_K)
        for value, expected in ((found.routing, mean), (found.margin, margin), (found.region, region)):
            torch.testing.assert_close(value, torch.tensor(expected, dtype=torch.float64), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("active", [(2, 1, 2), (1, 1, 2), (0, 2, 0), (0, 0, 0)])
def test_what_is_not_active_is_nobodys(active: tuple[int, ...]) -> None:
    """Index M, of a token beyond its expert's capacity or of fewer active experts, is not the next client's expert 0.

    Expert 0 is never likely: its region would be what was counted as active by mistake.
    """
    seen = routing([6, 9, 4], 7)
    quiet = seen.logits.detach().clone()
    quiet[:, 0] = -30
    beyond = torch.arange(TOP_K) >= torch.tensor(active)[seen.slot][:, None]
    seen = replace(seen, logits=quiet, indices=quiet.topk(TOP_K).indices.masked_fill(beyond, EXPERTS))
    profile = RoutingProfile([LAYER], 3, torch.device("cpu"), torch.float64)
    profile.observe(seen)
    for slot, count in enumerate(active):
        (found,) = profile.of(slot)
        assert not found.region[0].any()
        _, _, region = oracle.routing_statistics(quiet, seen.hidden, real_of(seen, slot), count)
        torch.testing.assert_close(found.region, torch.tensor(region, dtype=torch.float64), rtol=1e-10, atol=1e-12)


def test_a_client_without_tokens_has_zeros() -> None:
    profile = RoutingProfile([LAYER, LAYER], 2, torch.device("cpu"), torch.float32)
    profile.observe(routing([4, 0], 1, layer=1))
    for layer, slot in ((0, 0), (0, 1), (1, 1)):
        found = profile.of(slot)[layer]
        assert not any(bool(value.any()) for value in (found.routing, found.margin, found.region))
    assert float(profile.of(0)[1].routing.sum()) == pytest.approx(1.0)


# Eq. 8 to 10


def target_of(slots: int, seed: int, zero: int | None = None) -> LayerTarget:
    rng = torch_rng(seed, "target")
    reference = torch.rand(EXPERTS, generator=rng, dtype=torch.float64)
    if zero is not None:
        reference[zero] = 0.0
    return LayerTarget(reference / reference.sum(), torch.rand(slots, EXPERTS, generator=rng, dtype=torch.float64))


@pytest.mark.parametrize("form", ["pointwise", "bernoulli", "generalised"])
@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("tokens", [[5], [4, 6], [7, 0, 3]])
@pytest.mark.parametrize("zero", [None, 0])
def test_the_regulariser_and_its_gradient(form: str, padding: bool, tokens: list[int], zero: int | None) -> None:
    """Layers 0 and 2 have a target, layer 1 has none."""
    targets = {0: target_of(len(tokens), 5, zero), 2: target_of(len(tokens), 6)}
    regulariser = Regulariser(targets, len(tokens), [TOP_K] * len(tokens), form)
    passes = [routing(tokens, layer, padding, layer) for layer in (0, 1, 2)]
    for seen in passes:
        regulariser.observe(seen)
    found = regulariser.loss()
    mine = torch.autograd.grad(found.sum(), [passes[0].logits, passes[2].logits])
    slow = []
    for slot in range(len(tokens)):
        chosen = [passes[layer] for layer in targets]
        references = [target.reference.tolist() for target in targets.values()]
        alphas = [target.weights[slot].tolist() for target in targets.values()]
        real = real_of(passes[0], slot)
        slow.append(oracle.regulariser([seen.logits for seen in chosen], real, references, alphas, TOP_K, form))
    expected = torch.stack(slow)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    gradients = torch.autograd.grad(expected.sum(), [passes[0].logits, passes[2].logits])
    for gradient, slow_gradient in zip(mine, gradients, strict=True):
        torch.testing.assert_close(gradient, slow_gradient, rtol=1e-10, atol=1e-12)
    assert regulariser.loss() == 0.0


def descent(form: str, experts: int, top_k: int) -> tuple[float, float, float]:
    """The gradient's norm at p = p_g, and the mass on Top-k(p_g) before and after 200 steps of descent from there."""
    rng = torch_rng(experts, "reference")
    reference = torch.randn(experts, generator=rng, dtype=torch.float64).softmax(-1)
    target = LayerTarget(reference, torch.full((1, experts), 0.475, dtype=torch.float64))
    regulariser = Regulariser({0: target}, 1, [top_k], form)
    logits = reference.log()[None].clone().requires_grad_()
    norms = []
    for _ in range(200):
        weights, indices = logits.softmax(-1).topk(top_k)
        regulariser.observe(Routing(0, torch.zeros(1, 1), logits, weights, indices, torch.tensor([0]), None))
        (gradient,) = torch.autograd.grad(regulariser.loss().sum(), [logits])
        norms.append(float(gradient.norm()))
        with torch.no_grad():
            logits -= gradient
    top = reference.topk(top_k).indices
    return norms[0], float(reference[top].sum()), float(logits.detach().softmax(-1)[0, top].sum())


@pytest.mark.parametrize(("experts", "top_k"), [(16, 1), (16, 8), (64, 6)])
@pytest.mark.parametrize("form", ["bernoulli", "generalised"])
def test_the_minimum_is_at_the_reference(form: str, experts: int, top_k: int) -> None:
    """Descent that starts at p_g stays there, and p keeps its mass on Top-k(p_g)."""
    norm, before, after = descent(form, experts, top_k)
    assert norm < 1e-12
    assert after == pytest.approx(before, abs=1e-9)


@pytest.mark.parametrize(("experts", "top_k"), [(16, 1), (16, 8), (64, 6)])
def test_the_pointwise_term_pushes_away_from_the_reference(experts: int, top_k: int) -> None:
    """Why it is not the default: started at p_g, p loses a fifth or more of its mass on Top-k(p_g)."""
    norm, before, after = descent("pointwise", experts, top_k)
    assert norm > 0.01
    assert after < 0.8 * before


def test_every_client_has_its_own_top_k() -> None:
    """Two clients of unlike budgets, each as it is alone."""
    target, seen = target_of(2, 3), routing([5, 7], 1)
    regulariser = Regulariser({0: target}, 2, [1, 3], "bernoulli")
    regulariser.observe(seen)
    found = regulariser.loss()
    for slot, top_k in enumerate((1, 3)):
        expected = oracle.regulariser(
            [seen.logits],
            real_of(seen, slot),
            [target.reference.tolist()],
            [target.weights[slot].tolist()],
            top_k,
            "bernoulli",
        )
        torch.testing.assert_close(found[slot], expected, rtol=1e-10, atol=1e-12)


# In a cohort


def work_of(index: int, examples: int) -> LocalWork:
    rows = [Encoded(tuple(row), 2) for row in random_rows([4 + (index + i) % 5 for i in range(examples)], 50 + index)]
    return LocalWork(ClientInfo(index, Budget("all", 4, 1), examples), rows, Payload(), Payload())


def trained(backbone, members: list[int], settings: TrainingSettings, examples=(3, 5, 2)) -> list[dict[str, Tensor]]:
    """Gradients of the first optimizer step and the trainables after the last, of some of three clients."""
    rng = torch_rng(4, "target")
    alphas = torch.rand(3, 2, 8, generator=rng, dtype=torch.float64)
    reference = torch.rand(2, 8, generator=rng, dtype=torch.float64).softmax(-1)
    targets = {layer: LayerTarget(reference[layer], alphas[members, layer]) for layer in (0, 1)}
    regulariser = Regulariser(targets, len(members), [backbone.info.top_k] * len(members), "pointwise")
    with SlotModel(backbone, [PLAN] * len(members)) as model:
        work = [work_of(index, examples[index]) for index in members]
        cohort = Cohort(model, work, settings, round_index=1, seed=3, pad_id=PAD)
        for slot, index in enumerate(members):
            cohort.load(slot, random_adapter(backbone.info, PLAN, index))
        first: list[dict[str, Tensor]] = []
        with observing(backbone.moe, regulariser.observe):
            for step in cohort.steps():
                step.backward(step.forward() + 3.0 * regulariser.loss() * step.shares())
                if step.is_update and not first:
                    first = [
                        {f"gradient {n}": t.own(s, of=t.stored.grad).clone() for n, t in cohort.trainables.items()}
                        for s in range(len(members))
                    ]
                step.apply()
        return [{**first[slot], **cohort.read(slot)} for slot in range(len(members))]


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=name)


def test_recomputed_layers_get_the_same_gradients(olmoe_backbone) -> None:
    checkpointed = tiny_backbone("olmoe", gradient_checkpointing=True)
    pairs = zip(trained(checkpointed, [0, 1], SETTINGS), trained(olmoe_backbone, [0, 1], SETTINGS), strict=True)
    for found, expected in pairs:
        assert_same(found, expected, 1e-6)


def test_the_shares_of_accumulated_passes_add_up_to_one(olmoe_backbone) -> None:
    """Client 0 has finished after one optimizer step."""
    settings = TrainingSettings(batch_size=2, gradient_accumulation_steps=2, epochs=1, max_grad_norm=None)
    with SlotModel(olmoe_backbone, [PLAN] * 2) as model:
        work = [work_of(0, 3), work_of(1, 7)]
        cohort = Cohort(model, work, settings, round_index=1, seed=3, pad_id=PAD)
        sums, shares = [], torch.zeros(2)
        for step in cohort.steps():
            shares = shares + step.shares()
            if step.is_update:
                sums.append(shares.tolist())
                shares = torch.zeros(2)
        assert [pytest.approx(pair) for pair in ([1.0, 1.0], [0.0, 1.0])] == sums


@pytest.mark.parametrize("family", ["olmoe", "switch"])
def test_measured_over_a_clients_own_examples(family: str) -> None:
    """Against the recorded logits of a plain pass over each row; a layer of a decoder sees the decoder's tokens."""
    backbone = tiny_backbone(family)
    works = [work_of(0, 3), work_of(1, 5)]
    adapters = [random_adapter(backbone.info, PLAN, seed) for seed in (0, 1)]
    with SlotModel(backbone, [PLAN] * 2) as model:
        cohort = Cohort(model, works, SETTINGS, round_index=1, seed=3, pad_id=PAD)
        for slot, adapter in enumerate(adapters):
            cohort.load(slot, adapter)
        profile = measure_routing(cohort, None)
        assert all(not layer.observers for layer in backbone.moe)
    for slot, (work, adapter) in enumerate(zip(works, adapters, strict=True)):
        seen: list[Routing] = []
        with SlotModel(backbone, [PLAN]) as model:
            cohort = Cohort(
                model, [work], SETTINGS.model_copy(update={"batch_size": 1}), round_index=1, seed=3, pad_id=PAD
            )
            cohort.load(0, adapter)
            with observing(backbone.moe, seen.append):
                list(cohort.passes([work.examples]))
        for layer, found in enumerate(profile.of(slot)):
            own = [routing for routing in seen if routing.layer == layer]
            logits, hidden = (torch.cat([getattr(routing, part) for routing in own]) for part in ("logits", "hidden"))
            real = [ok for routing in own for ok in real_of(routing, 0)]
            mean, margin, region = oracle.routing_statistics(logits, hidden, real, backbone.info.top_k)
            for value, expected in ((found.routing, mean), (found.margin, margin), (found.region, region)):
                torch.testing.assert_close(value, torch.tensor(expected), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("tokens", "count"), [(None, 6), (1, 1), (9, 1), (10, 2), (24, 4), (1000, 6)])
def test_a_cap_on_tokens_keeps_whole_examples(tokens: int | None, count: int) -> None:
    rows = [Encoded((1, 2, 3, 4, index), 1) for index in range(6)]
    chosen = sample_rows(rows, tokens, seed=2, client=1)
    assert len(chosen) == count
    assert len({row.input_ids for row in chosen}) == count
    assert chosen == sample_rows(rows, tokens, seed=2, client=1)
    if tokens == 24:
        assert {row.input_ids for row in chosen} != {row.input_ids for row in sample_rows(rows, tokens, 2, client=3)}
