"""Frozen linear layers through oneDNN against torch's own."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fedguild.model import frozen_linear
from fedguild.model.frozen_linear import speed_up_frozen_linears


def layer(bias: bool, dtype: torch.dtype = torch.float32) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 10, bias=bias).to(dtype).requires_grad_(False)


@pytest.fixture
def taken(monkeypatch):
    """Sends every product to oneDNN; the list grows with each."""
    calls = []
    original = frozen_linear.onednn_linear
    monkeypatch.setattr(frozen_linear, "WORTHWHILE", 0)
    monkeypatch.setattr(frozen_linear, "onednn_linear", lambda *args: (calls.append(1), original(*args))[1])
    return calls


@pytest.mark.parametrize("bias", [False, True])
def test_values_and_gradients_equal_torchs(bias, taken):
    hidden = torch.randn(2, 5, 24, requires_grad=True)
    upstream = torch.randn(2, 10, 5).transpose(1, 2)
    plain, fast = layer(bias), layer(bias)
    speed_up_frozen_linears(fast)
    expected = plain(hidden)
    found = fast(hidden)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)
    (expected_grad,) = torch.autograd.grad(expected, hidden, upstream)
    (found_grad,) = torch.autograd.grad(found, hidden, upstream)
    assert torch.allclose(found_grad, expected_grad, rtol=1e-5, atol=1e-6)
    assert len(taken) == 2


def test_a_small_product_stays_with_torch(monkeypatch):
    monkeypatch.setattr(frozen_linear, "onednn_linear", lambda *_: pytest.fail("oneDNN was called"))
    fast = layer(bias=True)
    speed_up_frozen_linears(fast)
    assert torch.equal(fast(torch.ones(1, 24)), layer(bias=True)(torch.ones(1, 24)))


def test_a_trainable_weight_keeps_its_gradient(taken):
    fast = layer(bias=False)
    speed_up_frozen_linears(fast)
    fast.weight.requires_grad_()
    fast(torch.ones(1, 24)).sum().backward()
    assert torch.equal(fast.weight.grad, torch.ones(10, 24))
    assert not taken


def test_other_dtypes_are_left_alone(taken):
    fast = layer(bias=True, dtype=torch.float64)
    speed_up_frozen_linears(fast)
    hidden = torch.ones(1, 24, dtype=torch.float64)
    assert torch.equal(fast(hidden), layer(bias=True, dtype=torch.float64)(hidden))
    assert not taken
