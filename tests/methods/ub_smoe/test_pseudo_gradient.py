"""The Universal Pseudo-Gradient against Eq. 15, Eq. 16 and Table 19, and what AdamW makes of it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.methods.ub_smoe.pseudo_gradient import (
    ExpertGradients,
    Inactivity,
    Norm,
    clip_per_expert,
    inactive_share,
    pseudo_gradient,
    unit_per_expert,
)
from fedguild.model.adapters.storage import SlotTensor
from tests.oracles import ub_smoe as oracle

LAYERS, SLOTS, EXPERTS, RANK, STORED_RANK, WIDTH = 2, 3, 5, 2, 4, 6
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(LAYERS)]
NAMES = [f"{path}.{projection}.lora_A" for path in PATHS for projection in ("up_proj", "down_proj")]
# Of 12, 6 and 10 tokens with 4, 1 and 2 active experts; slot 1 leaves most experts alone, slot 2 one of each layer.
COUNTS = torch.tensor(
    [
        [[12, 12, 12, 8, 4], [6, 0, 0, 0, 0], [5, 5, 5, 5, 0]],
        [[12, 12, 0, 12, 12], [1, 2, 3, 0, 0], [0, 10, 4, 3, 3]],
    ]
)
TOKENS = (12, 6, 10)
SEEN = torch.tensor([TOKENS] * LAYERS)
RHO = (0.7, 1.9, 1.4)


def trainables(seed: int = 0) -> dict[str, SlotTensor]:
    """Expert LoRA of all slots with random weights, its rank padded by zeros, and one attention tensor."""
    rng = torch.Generator().manual_seed(seed)
    found = {}
    for name in NAMES:
        stored = torch.zeros(EXPERTS, SLOTS, STORED_RANK, WIDTH, dtype=torch.float64)
        stored[:, :, :RANK] = torch.randn(EXPERTS, SLOTS, RANK, WIDTH, generator=rng, dtype=torch.float64)
        found[name] = SlotTensor(name, stored.requires_grad_(), 1, False, ((EXPERTS, RANK, WIDTH),) * SLOTS)
    other = torch.randn(SLOTS, RANK, WIDTH, generator=rng, dtype=torch.float64, requires_grad=True)
    found["q_proj.lora_A"] = SlotTensor("q_proj.lora_A", other, 0, False, ((RANK, WIDTH),) * SLOTS)
    return found


def random_pseudo(seed: int, quiet: tuple[int, ...] = ()) -> dict[str, Tensor]:
    """G~ of every expert tensor, zero for the experts in `quiet` of the first layer."""
    rng = torch.Generator().manual_seed(seed)
    found = {name: torch.randn(EXPERTS, RANK, WIDTH, generator=rng, dtype=torch.float64) for name in NAMES}
    for name in NAMES[:2]:
        found[name][list(quiet)] = 0.0
    return found


def give_gradients(own: dict[str, SlotTensor], counts: Tensor, seed: int) -> None:
    """Random gradients, zero where no token activated the expert and in padded ranks."""
    rng = torch.Generator().manual_seed(seed)
    for name, trainable in own.items():
        grad = torch.randn(trainable.stored.shape, generator=rng, dtype=torch.float64)
        if name in NAMES:
            grad[:, :, RANK:] = 0.0
            grad *= (counts[PATHS.index(name.rsplit(".", 2)[0])] > 0).T[:, :, None, None]
        trainable.stored.grad = grad


# Eq. 15


def test_without_steps_it_is_zero() -> None:
    assert not pseudo_gradient({"a": torch.ones(2, 1)}, {"a": torch.zeros(2, 1)}, 0.0)["a"].any()


# clipping


@pytest.mark.parametrize("limit", [0.5, 2.0, 1e9])
def test_clipping_is_per_expert_over_all_its_tensors(limit: float) -> None:
    pseudo = random_pseudo(1, quiet=(2,))
    pseudo[NAMES[0]][0] *= 1e-3
    pseudo[NAMES[1]][0] *= 1e-3
    found = clip_per_expert(pseudo, limit)
    for layer in (NAMES[:2], NAMES[2:]):
        expected = oracle.clipped([pseudo[name] for name in layer], limit)
        for name, value in zip(layer, expected, strict=True):
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=0)
    assert not found[NAMES[0]][2].any()
    norm = math.hypot(*(float(found[name][1].norm()) for name in NAMES[:2]))
    assert norm <= limit * (1 + 1e-12)


# Eq. 16


@pytest.mark.parametrize("inactivity", ["batch", "token"])
def test_injection_is_equation_16_expert_by_expert(inactivity: Inactivity) -> None:
    own = trainables()
    give_gradients(own, COUNTS, 3)
    before = {name: trainable.stored.grad.clone() for name, trainable in own.items()}
    gradients = ExpertGradients(own, PATHS)
    pseudo = [random_pseudo(10 + slot) for slot in range(SLOTS)]
    for slot in range(SLOTS):
        gradients.set(slot, pseudo[slot], RHO[slot])
    learns = gradients.inject(COUNTS, SEEN, inactivity)
    assert learns.keys() == set(NAMES)
    assert all(mask.all() for mask in learns.values())
    assert torch.equal(own["q_proj.lora_A"].stored.grad, before["q_proj.lora_A"])
    for name in NAMES:
        layer, grad = PATHS.index(name.rsplit(".", 2)[0]), own[name].stored.grad
        assert not grad[:, :, RANK:].any()
        for slot in range(SLOTS):
            expected = oracle.injected(
                before[name][:, slot, :RANK],
                pseudo[slot][name],
                RHO[slot],
                COUNTS[layer, slot].tolist(),
                TOKENS[slot],
                inactivity,
            )
            torch.testing.assert_close(grad[:, slot, :RANK], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inactivity", ["batch", "token"])
@pytest.mark.parametrize("norm", ["published", "expert"])
def test_sizes_and_figures_over_a_round_step_by_step(norm: Norm, inactivity: Inactivity) -> None:
    """Three steps with other experts idle in each; slot 1 has finished after the first."""
    own = trainables()
    gradients = ExpertGradients(own, PATHS, norm)
    pseudo = [random_pseudo(30 + slot, quiet=(1,)) for slot in range(SLOTS)]
    sized = [unit_per_expert(one) if norm == "expert" else one for one in pseudo]
    for slot in range(SLOTS):
        gradients.set(slot, sized[slot], RHO[slot])
    slow = {(layer, slot): oracle.OwnNorms(EXPERTS) for layer in range(LAYERS) for slot in range(SLOTS)}
    for step in range(3):
        counts, seen = COUNTS.roll(step, dims=-1).clone(), SEEN.clone()
        if step:
            counts[:, 1], seen[:, 1] = 0, 0
        give_gradients(own, counts, 40 + step)
        before = {name: own[name].stored.grad.clone() for name in NAMES}
        gradients.inject(counts, seen, inactivity)
        for (layer, slot), norms in slow.items():
            if int(seen[0, slot]) == 0:
                continue
            names = [name for name in NAMES if name.startswith(PATHS[layer])]
            on = counts[layer, slot].tolist()
            norms.add([before[name][:, slot, :RANK] for name in names], on)
            squares = [0.0] * EXPERTS
            for name in names:
                value = sized[slot][name].clone()
                if norm == "expert":
                    for expert in range(EXPERTS):
                        value[expert] *= norms.reference(expert)
                grad = before[name][:, slot, :RANK]
                expected = oracle.injected(grad, value, RHO[slot], on, TOKENS[slot], inactivity)
                torch.testing.assert_close(own[name].stored.grad[:, slot, :RANK], expected, rtol=1e-9, atol=1e-12)
                for expert in range(EXPERTS):
                    squares[expert] += float(((expected - grad)[expert] ** 2).sum())
            norms.injected += [math.sqrt(square) for square in squares if square > 0]
    for slot in range(SLOTS):
        idle, ratio = gradients.figures(slot)
        for layer in range(LAYERS):
            norms = slow[layer, slot]
            assert float(idle[layer]) == pytest.approx(norms.idle / norms.steps)
            injected = sum(norms.injected) / len(norms.injected) if norms.injected else 0.0
            assert float(ratio[layer]) == pytest.approx(injected / norms.mean(), rel=1e-5)


def test_the_share_of_inactive_tokens() -> None:
    """Slot 0's 12 tokens with 4 experts each: expert 3 of layer 0 was left out by 4 of them, expert 4 by 8."""
    share = inactive_share(COUNTS, SEEN, "token")
    assert share[0, 0].tolist() == pytest.approx([0, 0, 0, 1 / 3, 2 / 3])
    assert share[0, 1].tolist() == pytest.approx([0, 1, 1, 1, 1])
    assert inactive_share(COUNTS, SEEN, "batch")[0, 0].tolist() == [0, 0, 0, 0, 0]
    nothing = torch.zeros(1, 3, 4, dtype=torch.int64)
    assert inactive_share(nothing, nothing.sum(dim=-1), "token").eq(1).all()


def test_tokens_that_a_layer_dropped_did_not_activate_an_expert() -> None:
    """Ten tokens of which the capacity of a top-1 layer dropped four: its only active expert missed them."""
    share = inactive_share(torch.tensor([[[6, 0]]]), torch.tensor([[10]]), "token")
    assert share[0, 0].tolist() == pytest.approx([0.4, 1.0])


# AdamW


@pytest.mark.parametrize("inactivity", ["batch", "token"])
@pytest.mark.parametrize("kind", ["nobody", "some", "everybody"])
def test_experts_that_learn_nothing_are_left_alone_by_adamw(kind: str, inactivity: Inactivity) -> None:
    """Four steps in which other experts are active, against AdamW that leaves experts out; other slots differ."""
    own, settings = trainables(), TrainingSettings(optimizer="adamw", betas=(0.9, 0.95), eps=1e-5, weight_decay=0.1)
    optimizer, gradients = SlotOptimizer(own, settings), ExpertGradients(own, PATHS)
    pseudo: list[dict[str, Tensor]] = [{}, {}, {}]
    if kind != "nobody":
        pseudo = [random_pseudo(20 + slot, quiet=(1, 4) if kind == "some" else ()) for slot in range(SLOTS)]
        for slot in range(SLOTS):
            gradients.set(slot, pseudo[slot], RHO[slot])
    slow = {
        (name, slot): oracle.Adamw(own[name].stored.detach()[:, slot, :RANK], (0.9, 0.95), 1e-5, 0.1)
        for name in NAMES
        for slot in range(SLOTS)
    }
    rates = [[0.1, 0.1, 0.2], [0.1, None, 0.2], [0.1, 0.1, 0.1], [None, None, 0.1]]
    for number, step_rates in enumerate(rates):
        counts = COUNTS.roll(number, dims=-1)
        optimizer.zero_grad()
        give_gradients(own, counts, number)
        plain = {name: own[name].stored.grad.clone() for name in NAMES}
        learns = gradients.inject(counts, SEEN, inactivity)
        assert all(mask.all() for mask in learns.values()) is (kind == "everybody")
        optimizer.step(step_rates, learns)
        for (name, slot), adamw in slow.items():
            rate, layer = step_rates[slot], PATHS.index(name.rsplit(".", 2)[0])
            if rate is None:
                continue
            on = counts[layer, slot].tolist()
            grad, moved = plain[name][:, slot, :RANK], [False] * EXPERTS
            if pseudo[slot]:
                grad = oracle.injected(grad, pseudo[slot][name], RHO[slot], on, TOKENS[slot], inactivity)
                moved = [bool(pseudo[slot][name][expert].any()) for expert in range(EXPERTS)]
            adamw.step(grad, rate, [tokens > 0 or has for tokens, has in zip(on, moved, strict=True)])
    for (name, slot), adamw in slow.items():
        torch.testing.assert_close(own[name].stored.detach()[:, slot, :RANK], adamw.value, rtol=1e-9, atol=1e-12)
    index = [trainable.name for trainable in optimizer.trainables].index(NAMES[0])
    for slot in range(SLOTS):
        first = optimizer.first[index][:, slot, :RANK]
        torch.testing.assert_close(first, slow[NAMES[0], slot].first, rtol=1e-9, atol=1e-12)
