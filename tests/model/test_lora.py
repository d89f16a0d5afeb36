"""LoRA of several slots on a linear layer, and how its factors start."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedguild.core.seeding import torch_rng
from fedguild.model.adapters.lora import Lora, ReadyFactors, through_factors
from fedguild.model.adapters.storage import padded_rank

IN, OUT, RANK = 6, 5, 3


@pytest.mark.parametrize("rows", [(4,), (2, 2, 2), (1, 3, 2), (0, 2, 0), (3, 0)], ids=str)
@pytest.mark.parametrize("length", [(), (4,)], ids=["flat", "sequences"])
def test_each_row_gets_its_own_slots_product(rows, length):
    """Values and gradients against one row after the other; slots may have no rows."""
    rng = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    hidden, down, up = leaf(sum(rows), *length, IN), leaf(len(rows), RANK, IN), leaf(len(rows), OUT, RANK)
    scale = torch.linspace(0.5, 2.0, len(rows), dtype=torch.float64)
    slots = [slot for slot, count in enumerate(rows) for _ in range(count)]
    expected = torch.stack(
        [scale[slot] * row @ (up[slot] @ down[slot]).t() for slot, row in zip(slots, hidden, strict=True)]
    )
    found = through_factors(hidden, ReadyFactors(scale, down, up).of(hidden.dtype), rows)
    assert torch.allclose(found, expected, rtol=1e-12)
    upstream = torch.randn(expected.shape, generator=rng, dtype=torch.float64)
    for ours, theirs in zip(
        torch.autograd.grad((found * upstream).sum(), [hidden, down, up]),
        torch.autograd.grad((expected * upstream).sum(), [hidden, down, up]),
        strict=True,
    ):
        assert torch.allclose(ours, theirs, rtol=1e-11)


def test_rows_in_half_precision_meet_factors_in_fp32():
    hidden = torch.randn(4, IN, generator=torch.Generator().manual_seed(1)).bfloat16()
    factors = ReadyFactors(torch.ones(1), torch.ones(1, RANK, IN), torch.ones(1, OUT, RANK))
    assert through_factors(hidden, factors.of(hidden.dtype), (4,)).dtype is torch.bfloat16


def test_a_starts_as_torchs_kaiming_uniform_and_b_at_zero():
    lora = Lora(64, 1.0, ("attention",))
    value = lora.initial("layer.lora_A", (64, 400), torch_rng(3, "start"))
    reference = nn.init.kaiming_uniform_(torch.empty(64, 400), a=5**0.5, generator=torch_rng(3, "other"))
    bound = 1 / 400**0.5
    for drawn in (value, reference):
        assert 0.99 * bound < drawn.abs().max().item() <= bound
        assert drawn.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert torch.equal(value, lora.initial("layer.lora_A", (64, 400), torch_rng(3, "start")))
    assert not lora.initial("layer.lora_B", (8, 3), torch_rng(3, "start")).any()
    assert not lora.initial("layer.lora_R", (3, 3), torch_rng(3, "start")).any()


@pytest.mark.parametrize(
    ("rank", "dtype", "stored"),
    [(1, torch.float32, 4), (4, torch.float32, 4), (20, torch.bfloat16, 24), (3, torch.float64, 4)],
)
def test_the_storages_rank_keeps_rows_sixteen_bytes_apart(rank, dtype, stored):
    assert padded_rank(rank, dtype) == stored


@pytest.mark.parametrize("shape", [(3, 6), (4, 3, 6), (6, 6)], ids=["of a layer", "of experts", "as many as inputs"])
def test_with_a_start_norm_a_has_orthogonal_rows_of_that_norm_in_the_directions_drawn(shape):
    drawn, found = (
        Lora(shape[-2], 1.0, ("attention",), start_norm=norm).initial("layer.lora_A", shape, torch_rng(0))
        for norm in (None, 5.0)
    )
    gram = found @ found.mT
    torch.testing.assert_close(gram, (25 * torch.eye(shape[-2])).expand_as(gram), rtol=1e-5, atol=1e-5)
    first = drawn[..., 0, :] / drawn[..., 0, :].norm(dim=-1, keepdim=True)
    torch.testing.assert_close(found[..., 0, :] / 5, first, rtol=1e-5, atol=1e-6)


def test_more_ranks_than_inputs_have_the_norm_alone():
    drawn, found = (
        Lora(7, 1.0, ("attention",), start_norm=norm).initial("layer.lora_A", (7, 4), torch_rng(0))
        for norm in (None, 5.0)
    )
    torch.testing.assert_close(found, drawn * (5 / drawn.norm(dim=-1, keepdim=True)), rtol=1e-6, atol=1e-6)
