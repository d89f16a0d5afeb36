"""The mixture of LoRA experts: values and gradients against loops, assignments, balance loss, embeddings."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Encoded, collate
from fedguild.methods.fedamole.mixture import MixtureOfLora
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.oracles.mole import LoopedModel

PART = MixtureOfLora(("q_proj", "v_proj"), rank=3, scale=0.5, experts=7, capacity=4, top_k=2)
LENGTHS = [[5, 3], [4], []]
MODULES = tuple(f"model.layers.{layer}.self_attn.{leaf}" for layer in (0, 1) for leaf in ("q_proj", "v_proj"))
HELD = [
    dict(zip(MODULES, ([4, 0, 6], [1, 2], [5, 3, 0, 1], [6, 2]), strict=True)),
    dict(zip(MODULES, ([2, 5], [3, 6, 0, 4], [1, 0], [0, 1]), strict=True)),
    dict(zip(MODULES, ([0, 1, 2, 3],) * 4, strict=True)),
]


def plan_with(part: MixtureOfLora) -> AdapterPlan:
    return AdapterPlan((part,))


def encoded(lengths: list[list[int]]) -> list[list[Encoded]]:
    return [[Encoded(tuple(ids), 2) for ids in random_rows(own, slot)] for slot, own in enumerate(lengths)]


def holding(part: MixtureOfLora, slot: int) -> dict[str, list[int]]:
    """The slot's experts; a third one where three are active."""
    grown = {module: ids + [i for i in range(7) if i not in ids] for module, ids in HELD[slot].items()}
    return {module: ids[: max(part.top_k, len(HELD[slot][module]))] for module, ids in grown.items()}


def loaded(backbone, part: MixtureOfLora, lengths: list[list[int]]) -> tuple[SlotModel, list[dict[str, torch.Tensor]]]:
    """A model with random adapters far from zero, also in the rows that nobody uses."""
    model = SlotModel(backbone, [plan_with(part)] * len(lengths))
    adapters = [random_adapter(backbone.info, plan_with(part), slot, size=0.5) for slot in range(len(lengths))]
    for slot, adapter in enumerate(adapters):
        model.load(slot, adapter)
        model.attached[MixtureOfLora].assign(slot, holding(part, slot))
    return model, adapters


def looped(part: MixtureOfLora, plain, tensors, slot: int) -> LoopedModel:
    return LoopedModel(
        plain,
        tensors,
        holding(part, slot),
        top_k=part.top_k,
        scale=part.scale,
        divisor=part.score_scale,
        renormalise=part.renormalise,
        vanilla=part.router == "vanilla",
    )


VARIANTS = {
    "default": {},
    "one active": {"top_k": 1},
    "one active, raw": {"top_k": 1, "renormalise": False},
    "three active": {"top_k": 3},
    "raw": {"renormalise": False},
    "hidden scale": {"score_scale": "hidden"},
    "hidden scale, raw": {"score_scale": "hidden", "renormalise": False, "top_k": 3},
    "vanilla": {"router": "vanilla"},
    "vanilla, raw": {"router": "vanilla", "renormalise": False, "top_k": 1},
    "no shared expert": {"shared": False},
    "no shared expert, vanilla": {"shared": False, "router": "vanilla"},
    "rank one": {"rank": 1},
}


@pytest.mark.parametrize("lengths", [LENGTHS, [[5], [5], [5]], [[6]]], ids=["ragged", "equal", "alone"])
@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_values_and_gradients_against_loops(changes, lengths):
    """Losses, balance losses, counts and every gradient, in fp64, with the balance loss in the objective."""
    part = replace(PART, **changes)
    backbone = tiny_backbone("llama", dtype=torch.float64)
    plain = tiny_model("llama", dtype=torch.float64)
    rows = encoded(lengths)
    model, adapters = loaded(backbone, part, lengths)
    with model:
        mixture = model.attached[MixtureOfLora]
        losses = model.token_losses(collate(rows, PAD))
        balance = mixture.balance_loss()
        (losses.sum() + 0.7 * balance.sum()).backward()
        grads = {name: trainable.stored.grad for name, trainable in model.trainables.items()}
        at = 0
        for slot, own in enumerate(rows):
            leaves = {name: value.clone().requires_grad_() for name, value in adapters[slot].items()}
            oracle = looped(part, plain, leaves, slot)
            expected = [oracle.losses(row.input_ids, row.prompt_length) for row in own]
            if not own:
                assert balance[slot] == 0
                assert not any(grad[slot].any() for grad in grads.values())
                continue
            found = losses[at : at + sum(map(len, expected))]
            at += len(found)
            assert torch.allclose(found, torch.cat(expected), rtol=1e-10)
            assert torch.allclose(balance[slot], oracle.balance(), rtol=1e-10)
            (torch.cat(expected).sum() + 0.7 * oracle.balance()).backward()
            for name, leaf in leaves.items():
                wanted = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
                assert torch.allclose(grads[name][slot], wanted, rtol=1e-8, atol=1e-12), name


def test_dropout_is_the_mixtures_own():
    """Its rate counts, not that of a LoRA beside it; and nothing is dropped before the slots are seeded."""
    backbone = tiny_backbone("llama")
    batch = collate(encoded([[6, 4]]), PAD)

    def losses(rate: float, seed: int | None) -> torch.Tensor:
        beside = Lora(1, 1.0, ("k_proj",), dropout=0.5 - rate)
        plan = AdapterPlan((replace(PART, dropout=rate), beside))
        with SlotModel(backbone, [plan]) as model, torch.no_grad():
            adapter = random_adapter(backbone.info, plan, 0)
            model.load(0, adapter | {name: torch.zeros(shape) for name, shape in beside.shapes(backbone.info).items()})
            model.attached[MixtureOfLora].assign(0, HELD[0])
            model.dropout.seed(None if seed is None else [seed])
            return model.token_losses(batch)

    quiet = losses(0.0, None)
    assert torch.equal(losses(0.0, 3), quiet)
    assert torch.equal(losses(0.5, None), quiet)
    assert not torch.allclose(losses(0.5, 3), quiet, atol=1e-3)
    assert torch.equal(losses(0.5, 3), losses(0.5, 3))
    assert not torch.equal(losses(0.5, 3), losses(0.5, 4))


def test_passes_of_one_size_do_not_share_their_tokens():
    """Two passes with as many positions, but other slots and padding."""
    backbone = tiny_backbone("llama", dtype=torch.float64)
    passes = [collate(encoded(lengths), PAD) for lengths in ([[6, 2], [6]], [[6], [6, 3]])]
    model, _ = loaded(backbone, PART, [[6], [6]])
    with model, torch.no_grad():
        mixture = model.attached[MixtureOfLora]
        model.token_losses(passes[0])
        model.token_losses(passes[1])
        after = mixture.balance_loss()
    model, _ = loaded(backbone, PART, [[6], [6]])
    with model, torch.no_grad():
        model.token_losses(passes[1])
        assert torch.equal(model.attached[MixtureOfLora].balance_loss(), after)


def test_held_at_the_start_is_the_same_as_assigned():
    backbone = tiny_backbone("llama")
    batch = collate(encoded(LENGTHS), PAD)
    model, adapters = loaded(backbone, PART, LENGTHS)
    with model, torch.no_grad():
        assigned = model.token_losses(batch)
        assert model.attached[MixtureOfLora].held(1) == {m: tuple(ids) for m, ids in HELD[1].items()}
    plans = [plan_with(replace(PART, held=tuple((m, tuple(ids)) for m, ids in own.items()))) for own in HELD]
    with SlotModel(backbone, plans) as model, torch.no_grad():
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        assert torch.equal(model.token_losses(batch), assigned)
        assert model.attached[MixtureOfLora].held(0) == {m: tuple(ids) for m, ids in HELD[0].items()}


def test_a_new_assignment_moves_the_rows():
    backbone = tiny_backbone("llama")
    model, _ = loaded(backbone, PART, [[6]])
    batch = collate(encoded([[6]]), PAD)
    with model:
        mixture = model.attached[MixtureOfLora]
        before = model.token_losses(batch).detach()
        mixture.assign(0, {MODULES[1]: [3, 1, 0, 2]})
        assert not torch.equal(model.token_losses(batch).detach(), before)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_gradient_checkpointing_changes_nothing(dropout):
    part = replace(PART, dropout=dropout)
    found = []
    for checkpointing in (False, True):
        backbone = tiny_backbone("llama", gradient_checkpointing=checkpointing)
        model, _ = loaded(backbone, part, LENGTHS)
        with model:
            model.dropout.seed([1, 2, 3])
            mixture = model.attached[MixtureOfLora]
            losses = model.token_losses(collate(encoded(LENGTHS), PAD))
            (losses.sum() + mixture.balance_loss().sum()).backward()
            grads = {name: trainable.stored.grad for name, trainable in model.trainables.items()}
            found.append((losses.detach(), grads))
    (losses, grads), (again, recomputed) = found
    assert torch.equal(losses, again)
    assert all(torch.equal(grad, recomputed[name]) for name, grad in grads.items())


def test_half_precision_routes_in_fp32():
    backbone = tiny_backbone("llama", dtype=torch.bfloat16)
    model, _ = loaded(backbone, replace(PART, dropout=0.1), LENGTHS)
    with model:
        model.dropout.seed([1, 2, 3])
        losses = model.token_losses(collate(encoded(LENGTHS), PAD))
        balance = model.attached[MixtureOfLora].balance_loss()
        assert balance.dtype is torch.float32
        (losses.sum() + balance.sum()).backward()
        grads = [trainable.stored.grad for trainable in model.trainables.values()]
    assert all(grad.dtype is torch.float32 and grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rank": 0}, "LoRA rank must be at least 1"),
        ({"top_k": 5}, "5 active experts per token and room for 4"),
        ({"top_k": 0}, "0 active experts"),
        ({"experts": 1}, "pool of 1 experts has fewer than the 2"),
        ({"held": (("q", (1,)),)}, "holds 1 expert"),
        ({"held": (("q", (1, 7)),)}, "ids from 0 to 6"),
    ],
    ids=str,
)
def test_impossible_mixtures_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        replace(PART, **changes)


def test_impossible_uses_are_refused():
    backbone = tiny_backbone("llama")
    for targets, message in (((), "no layer"), (("experts",), "experts"), (("k_projection",), "k_projection")):
        with pytest.raises(ConfigError, match=message):
            SlotModel(backbone, [plan_with(replace(PART, targets=targets))])
    with pytest.raises(ConfigError, match="same mixture"):
        SlotModel(backbone, [plan_with(PART), plan_with(replace(PART, top_k=1))])
    with SlotModel(backbone, [plan_with(PART)] * 2) as model:
        mixture = model.attached[MixtureOfLora]
        with pytest.raises(ModelError, match="forward pass first"):
            mixture.balance_loss()
        with pytest.raises(ConfigError, match=r"holds 1 expert\(s\), but 2 are active"):
            mixture.assign(0, {MODULES[0]: [3]})
        with pytest.raises(ConfigError, match="2 to 4 experts per module"):
            mixture.assign(0, {MODULES[0]: [0, 1, 2, 3, 4]})
        with pytest.raises(ConfigError, match="different ids"):
            mixture.assign(0, {MODULES[0]: [3, 3]})
        with pytest.raises(ConfigError, match=r"k_proj has no mixture.*\nKnown"):
            mixture.assign(0, {"model.layers.0.self_attn.k_proj": [0, 1]})
        mixture.assign(0, HELD[0])
        with pytest.raises(ModelError, match=f"Slot 1 holds no experts of {MODULES[0]}"):
            model.token_losses(collate(encoded([[5], [4]]), PAD))
