"""Cross-entropy in chunks: values and gradients of the whole, and never more logits than a chunk's."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedguild.data.batches import Encoded, collate
from fedguild.model import chunked_loss
from fedguild.model.adapters.lora import Lora
from fedguild.model.chunked_loss import chunk_rows, chunked_losses
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, VOCABULARY, random_adapter, random_rows, tiny_backbone

WORDS = 37
"""Size of the vocabulary, which is no other size of the model."""
PLAN = AdapterPlan((Lora(4, 0.5, ("attention", "experts")),))


@pytest.mark.parametrize("rows", [1, 3, 7, 100])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses_and_gradients_by_definition(rows, smoothing):
    """fp64; -log softmax of the target, smoothed over the vocabulary, each at a weight of its own."""
    generator = torch.Generator().manual_seed(1)
    weight = torch.randn(11, 5, generator=generator, dtype=torch.float64)
    weights = torch.rand(7, generator=generator, dtype=torch.float64)
    targets = torch.randint(11, (7,), generator=generator)
    hidden = torch.randn(7, 5, generator=generator, dtype=torch.float64)
    leaves = [hidden.clone().requires_grad_() for _ in range(2)]
    found = chunked_losses(leaves[0], targets, lambda part: part @ weight.t(), smoothing, rows)
    log_p = (leaves[1] @ weight.t()).log_softmax(dim=1)
    expected = -(1 - smoothing) * log_p.gather(1, targets[:, None])[:, 0] - smoothing * log_p.mean(dim=1)
    (found * weights).sum().backward()
    (expected * weights).sum().backward()
    assert torch.allclose(found, expected, rtol=1e-12)
    assert torch.allclose(leaves[0].grad, leaves[1].grad, rtol=1e-10, atol=1e-14)


class Largest(TorchDispatchMode):
    """The most elements of any result with the vocabulary as its last dimension."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function in (torch.ops.aten.t.default, torch.ops.aten.transpose.int):  # the head's weight
            return out
        for result in out if isinstance(out, tuple) else [out]:
            if isinstance(result, torch.Tensor) and result.dim() and result.shape[-1] == WORDS:
                self.elements = max(self.elements, result.numel())
        return out


def run(backbone, rows):
    plans = [PLAN, PLAN]
    with SlotModel(backbone, plans) as model, Largest() as largest:
        for slot, plan in enumerate(plans):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        losses = model.token_losses(collate(rows, PAD), label_smoothing=0.1)
        losses.sum().backward()
        return losses.detach(), {n: t.stored.grad.clone() for n, t in model.trainables.items()}, largest.elements


def test_a_models_losses_are_computed_in_chunks(monkeypatch):
    """Chunks of four tokens; the same losses and gradients, and the logits of four tokens at most."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64, vocab_size=WORDS)
    rows = [[Encoded(tuple(ids), 1) for ids in random_rows(own, slot)] for slot, own in enumerate([[9, 4], [7]])]
    losses, grads, largest = run(backbone, rows)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * WORDS * 8)
    assert chunk_rows(WORDS, torch.float64) == 4
    assert backbone.ends_with_head()
    chunked, chunked_grads, chunked_largest = run(backbone, rows)
    assert largest == 17 * WORDS
    assert chunked_largest == 4 * WORDS
    assert torch.allclose(losses, chunked, rtol=1e-12)
    for name, grad in grads.items():
        assert torch.allclose(chunked_grads[name], grad, rtol=1e-9, atol=1e-12), name


def test_without_gradients_none_are_formed(monkeypatch, olmoe_backbone):
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 2 * VOCABULARY * 4)
    rows = [[Encoded(tuple(ids), 1) for ids in random_rows([9], 1)]]
    with SlotModel(olmoe_backbone, [PLAN]) as model, torch.no_grad():
        found = model.token_losses(collate(rows, PAD))
        monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 1 << 30)
        assert torch.allclose(found, model.token_losses(collate(rows, PAD)), atol=1e-6)
    assert not found.requires_grad


def test_a_model_that_changes_its_logits_behind_the_head_keeps_them_whole(monkeypatch):
    backbone = tiny_backbone("llama")
    plain = type(backbone.model).forward

    def scaled(self, *args, **kwargs):
        output = plain(self, *args, **kwargs)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(type(backbone.model), "forward", scaled)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", VOCABULARY * 4)
    plan = AdapterPlan((Lora(4, 0.5, ("attention",)),))
    batch = collate([[Encoded(tuple(random_rows([9], 1)[0]), 1)]], PAD)
    with SlotModel(backbone, [plan]) as model, torch.no_grad():
        assert not backbone.ends_with_head()
        logits = model.logits(batch)
        expected = nn.functional.cross_entropy(logits, batch.targets, reduction="none")
        assert torch.equal(model.token_losses(batch), expected)


def test_a_hook_on_the_head_keeps_the_logits_whole(olmoe_backbone):
    assert olmoe_backbone.ends_with_head()
    hook = olmoe_backbone.head.register_forward_hook(lambda _, __, output: output * 2)
    assert not olmoe_backbone.ends_with_head()
    hook.remove()
    assert olmoe_backbone.ends_with_head()
    assert not tiny_backbone("switch").ends_with_head()
