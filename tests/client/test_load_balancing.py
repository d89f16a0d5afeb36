"""Load-balancing loss and router z-loss of every client of a cohort: slow loops, transformers' own, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func
from transformers.models.switch_transformers.modeling_switch_transformers import router_z_loss_func

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.load_balancing import LoadBalancing, balance_loss, z_loss
from fedguild.client.observing import observing
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.model.adapters.lora import Lora
from fedguild.model.moe.view import Routing
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows
from tests.oracles import smoe_llb as oracle

EXPERTS = 5
ACTIVE = (2, 1, 4)
PLANS = [AdapterPlan((Lora(2, 1.0, ("attention", "router", "experts")),), k) for k in ACTIVE]


def layer(tokens_of: list[int], seed: int, padding: bool, index: int = 0) -> Routing:
    """A random routing in fp64 with these tokens per slot, ACTIVE[slot] of their experts active, some padding."""
    count = sum(tokens_of)
    logits = torch.randn(count, EXPERTS, generator=torch_rng(seed, "logits"), dtype=torch.float64) * 2
    slot = torch.tensor([s for s, tokens in enumerate(tokens_of) for _ in range(tokens)], dtype=torch.int64)
    indices = logits.topk(max(ACTIVE)).indices
    beyond = torch.arange(max(ACTIVE)) >= torch.tensor(ACTIVE)[slot][:, None]
    indices = indices.masked_fill(beyond, EXPERTS)
    keep = torch.arange(count) % 3 != 2 if padding else None
    nothing = torch.zeros(count, 0)
    return Routing(index, nothing, logits.requires_grad_(), nothing, indices, slot, keep)


def real_of(seen: Routing, slot: int) -> list[bool]:
    keep = [True] * len(seen.slot) if seen.keep is None else seen.keep.tolist()
    return [ok and owner == slot for ok, owner in zip(keep, seen.slot.tolist(), strict=True)]


@pytest.mark.parametrize("padding", [False, True])
@pytest.mark.parametrize("tokens", [[5], [4, 6], [7, 0, 3], [1, 1, 1], [2, 40, 9]])
def test_values_and_gradients(tokens: list[int], padding: bool) -> None:
    """Means over two layers; clients with 2, 1 and 4 active experts, one perhaps without a token."""
    slots, balancing = len(tokens), LoadBalancing(len(tokens))
    layers = [layer(tokens, 3 + index, padding, index) for index in (0, 1)]
    for seen in layers:
        balancing.observe(seen)
    found = balancing.losses()
    slow: list[list[Tensor]] = [[], []]
    for slot in range(slots):
        kinds: list[list[Tensor]] = [[], []]
        for seen in layers:
            real = real_of(seen, slot)
            kinds[0].append(oracle.balance(seen.logits, oracle.chosen(seen.logits, ACTIVE[slot]), real))
            kinds[1].append(oracle.z(seen.logits, real))
        for kind, values in enumerate(kinds):
            slow[kind].append(sum(values) / len(values))
    inputs = [seen.logits for seen in layers]
    weights = torch.arange(1, slots + 1, dtype=torch.float64)
    for mine, theirs in zip(found, slow, strict=True):
        expected = torch.stack(theirs)
        torch.testing.assert_close(mine, expected, rtol=1e-10, atol=1e-12)
        gradients = [torch.autograd.grad((value * weights).sum(), inputs) for value in (mine, expected)]
        for gradient, slow_gradient in zip(*gradients, strict=True):
            torch.testing.assert_close(gradient, slow_gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("active", [1, 2, 3])
def test_transformers_agrees_for_one_client_and_one_layer(active: int) -> None:
    """Mixtral's balance loss sums over a token's experts: K times ours. Switch's z-loss is the same."""
    rows, length = 3, 4
    logits = torch.randn(rows * length, EXPERTS, generator=torch_rng(1, "logits"))
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[1, 2:] = 0
    slot, keep = torch.zeros(rows * length, dtype=torch.int64), mask.flatten().bool()
    theirs = load_balancing_loss_func((logits,), EXPERTS, active, mask)
    ours = balance_loss(logits, logits.topk(active).indices, slot, keep, 1)
    torch.testing.assert_close(active * ours[0], theirs)
    torch.testing.assert_close(z_loss(logits, slot, None, 1)[0], router_z_loss_func(logits.view(rows, length, EXPERTS)))


def test_half_precision_logits_lose_nothing_more() -> None:
    logits = (torch.randn(6, EXPERTS, generator=torch_rng(2, "logits")) * 3).bfloat16()
    slot = torch.zeros(6, dtype=torch.int64)
    exact = z_loss(logits.double(), slot, None, 1)
    assert z_loss(logits, slot, None, 1).dtype is torch.float32
    assert z_loss(logits, slot, None, 1).item() == pytest.approx(exact.item(), rel=1e-6)
    assert math.isfinite(balance_loss(logits, logits.topk(2).indices, slot, None, 1).item())


# In a cohort


def work_of(index: int, examples: int) -> LocalWork:
    rows = [Encoded(tuple(row), 2) for row in random_rows([4 + (index + i) % 5 for i in range(examples)], 50 + index)]
    return LocalWork(ClientInfo(index, Budget("all", ACTIVE[index], 1), examples), rows, Payload(), Payload())


def gradients(backbone, members: list[int], accumulation: int) -> list[dict[str, Tensor]]:
    """Every client's gradients of the two losses alone in the first optimizer step."""
    settings = TrainingSettings(
        optimizer="sgd",
        learning_rate=0.1,
        batch_size=2,
        gradient_accumulation_steps=accumulation,
        steps=1,
        max_grad_norm=None,
    )
    balancing = LoadBalancing(len(members))
    with SlotModel(backbone, [PLANS[index] for index in members]) as model:
        work = [work_of(index, 3 + 2 * index) for index in members]
        cohort = Cohort(model, work, settings, round_index=1, seed=3, pad_id=PAD)
        for slot, index in enumerate(members):
            cohort.load(slot, random_adapter(backbone.info, PLANS[index], index))
        with observing(backbone.moe, balancing.observe):
            for step in cohort.steps():
                nll = step.forward()
                balance, z = balancing.losses()
                step.backward(0.0 * nll + (balance + 0.1 * z) * step.shares())
        trained = {name: tensor for name, tensor in cohort.trainables.items() if tensor.stored.grad is not None}
        return [
            {name: tensor.own(slot, of=tensor.stored.grad).clone() for name, tensor in trained.items()}
            for slot in range(len(members))
        ]


def test_each_pass_is_its_own() -> None:
    """A second call without a pass in between has nothing to say."""
    balancing = LoadBalancing(1)
    balancing.observe(replace(layer([4], 1, False), slot=torch.zeros(4, dtype=torch.int64)))
    assert balancing.losses()[0].shape == (1,)
    with pytest.raises(RuntimeError):
        balancing.losses()
