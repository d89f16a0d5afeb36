"""Attention of short rows in bf16 on a CPU against torch's own in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fedguild.model import packed_rows
from fedguild.model.short_attention import LONGEST, is_short, short_attention
from fedguild.model.slots import SlotModel
from tests.backbones import lora_plan, random_adapter, tiny_backbone
from tests.model.test_slots import batch_of

TOKENS, WIDTH = 9, 8


def masks() -> dict[str, Tensor | None]:
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril().repeat(2, 1, 1, 1)
    seen[0, :, :, 6:] = False  # padding
    padded = seen.clone()
    padded[1, :, 0] = False  # a token that sees nothing
    added = torch.zeros(2, 1, TOKENS, TOKENS).masked_fill(~seen, torch.finfo(torch.bfloat16).min)
    return {"causal": None, "padding": seen, "nothing to see": padded, "added": added.bfloat16()}


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("mask", masks())
@pytest.mark.parametrize("heads", [(6, 2), (3, 3), (2, 1)], ids=str)
def test_values_and_gradients_are_those_of_fp32(heads: tuple[int, int], mask: str, scale: float | None) -> None:
    rng = torch.Generator().manual_seed(0)
    widths = (WIDTH, WIDTH, 5)
    states = [
        torch.randn(2, TOKENS, count, width, generator=rng).bfloat16().transpose(1, 2)
        for count, width in zip((heads[0], heads[1], heads[1]), widths, strict=True)
    ]
    weight = torch.randn(2, heads[0], TOKENS, 5, generator=rng).bfloat16()
    given = masks()[mask]
    if given is not None and given.dtype is torch.bool:
        weight *= given.any(dim=-1)[..., None]  # no loss counts a token that sees nothing

    leaves = [state.clone().requires_grad_() for state in states]
    found = short_attention(*leaves, given, scale).transpose(1, 2)
    exact = [state.double().requires_grad_() for state in states]
    expected = scaled_dot_product_attention(
        *exact,
        attn_mask=given if given is None or given.dtype is torch.bool else given.double(),
        is_causal=given is None,
        scale=scale,
        enable_gqa=True,
    )
    pairs = zip(
        (found * weight, *torch.autograd.grad(found, leaves, weight)),
        (expected * weight, *torch.autograd.grad(expected, exact, weight.double())),
        strict=True,
    )
    for ours, true in pairs:
        assert ours.dtype is torch.bfloat16
        assert float((ours.detach().double() - true.detach()).norm() / true.detach().norm()) < 0.01


def test_only_short_rows_that_train_in_bf16_take_it() -> None:
    def takes(tokens: int = 5, *, dtype: torch.dtype = torch.bfloat16, trains: bool = True, **options: object) -> bool:
        states = torch.zeros(1, 2, tokens, 4, dtype=dtype, requires_grad=trains)
        return is_short(states, states, options)

    assert takes(scaling=0.5, dropout=0.0)
    assert takes(LONGEST)
    assert not takes(LONGEST + 1)
    assert not takes(dtype=torch.float32)
    assert not takes(trains=False)
    assert not takes(dropout=0.1)
    assert not takes(is_causal=False)
    assert not takes(position_bias=torch.zeros(1))
    with torch.no_grad():
        assert not takes()


@pytest.mark.parametrize("lengths", [[9, 9], [9, 4]], ids=["even", "packed"])
def test_a_model_in_bf16_trains_by_it(lengths: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses and gradients are as near to those of fp32 as they are by torch's kernel."""
    plan, apart = lora_plan(3, 0.5, ("attention",)), {}
    calls: list[int] = []
    monkeypatch.setattr(packed_rows, "short_attention", lambda *args: calls.append(1) or short_attention(*args))
    found = {}
    for kind in ("exact", "short", "torch"):
        if kind == "torch":
            monkeypatch.setattr(packed_rows, "is_short", lambda *_: False)
        dtype = torch.float32 if kind == "exact" else torch.bfloat16
        backbone = tiny_backbone("llama", dtype=dtype, initializer_range=0.1)
        with SlotModel(backbone, [plan]) as model:
            model.load(0, random_adapter(backbone.info, plan, 1, size=0.1))
            losses = model.token_losses(batch_of(lengths))
            losses.sum().backward()
            gradients = [tensor.own(0, of=tensor.stored.grad).flatten() for tensor in model.trainables.values()]
            found[kind] = torch.cat([losses.detach().flatten(), *gradients])
        if kind != "torch":
            assert bool(calls) == (kind == "short")
    for kind in ("short", "torch"):
        apart[kind] = float((found[kind] - found["exact"]).norm() / found["exact"].norm())
    assert apart["short"] < max(0.03, 1.5 * apart["torch"])
