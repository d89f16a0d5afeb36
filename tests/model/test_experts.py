"""The fused experts against a loop that forms W + s·BA, values and gradients, at awkward sizes."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.moe import dispatch as dispatch_module
from fedguild.model.moe.low_rank import prefers_blocks
from tests.model.layers import CASES, build, by_loop, by_view, worst


@pytest.fixture(params=[0, 8, 32], ids=["groups", "blocks of 8", "blocks of 32"])
def layout(request, monkeypatch):
    """Forces one of the ways of the low-rank products."""
    monkeypatch.setattr(dispatch_module, "BLOCK_HEIGHTS", (request.param,) if request.param else ())
    monkeypatch.setattr(dispatch_module, "FILLER_LIMIT", 1000.0)


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_experts_equal_the_loop(case, dtype, tolerance):
    layer = build(case, dtype)
    expected, expected_grads = by_loop(layer)
    found, found_grads = by_view(layer, dtype)
    assert found.dtype is dtype
    assert worst(found, expected) < tolerance
    padded = torch.zeros(len(found), dtype=torch.bool)
    padded[list(case.padding)] = True
    assert not found[padded].any()
    beyond = layer.indices == case.experts
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        if found_grad.shape == beyond.shape:
            found_grad, expected_grad = found_grad.masked_fill(beyond, 0), expected_grad.masked_fill(beyond, 0)
        assert worst(found_grad, expected_grad) < tolerance


@pytest.mark.usefixtures("layout")
def test_the_zeros_beyond_a_slots_rank_get_no_gradient():
    layer = build(CASES["mixed ranks, scales and active experts"], torch.float32)
    _, grads = by_view(layer, torch.float32)
    for down, up in zip(grads[2::2], grads[3::2], strict=True):
        for slot, rank in enumerate(layer.case.ranks):
            assert down[slot, :, :rank].any()
            assert not down[slot, :, rank:].any()
            assert not up[slot, :, :, rank:].any()


@pytest.mark.usefixtures("layout")
def test_a_slots_gradients_come_from_its_own_tokens_only():
    layer = build(CASES["mixed ranks, scales and active experts"], torch.float64)
    layer.upstream[layer.slot != 1] = 0.0
    _, grads = by_view(layer, torch.float64)
    for factor in grads[2:]:
        assert factor[1].any()
        assert not factor[[0, 2]].any()


@pytest.mark.parametrize(
    ("threads", "dtype", "expected"),
    [(2, torch.float32, True), (2, torch.float64, True), (2, torch.bfloat16, False), (1, torch.float32, False)],
)
def test_blocks_are_for_full_precision_on_several_threads(threads, dtype, expected, monkeypatch):
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert prefers_blocks(torch.zeros(1, 1, dtype=dtype)) is expected
