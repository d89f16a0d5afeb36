"""Copies of the factors in the dtype of the products: made once, and anew after every change."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.moe.casts import Casts


def test_a_tensor_is_cast_once_until_it_changes():
    casts, tensor = Casts(), torch.ones(2, 3, requires_grad=True)
    first = casts.of(tensor, torch.bfloat16)
    assert first.dtype is torch.bfloat16
    assert not first.requires_grad
    assert casts.of(tensor, torch.bfloat16) is first
    tensor.detach().mul_(3.0)
    assert casts.of(tensor, torch.bfloat16).tolist() == [[3.0] * 3] * 2
    assert casts.of(tensor, torch.float16).dtype is torch.float16
    assert casts.of(tensor, torch.float32) is tensor


@pytest.mark.parametrize("scaled", [False, True])
def test_a_kept_cast_has_the_gradient_of_a_cast(scaled):
    """Also where an evaluation has made it."""
    casts, tensor = Casts(), torch.randn(3, 4, 5, requires_grad=True)
    scale = torch.tensor([0.5, 3.0, 0.1])[:, None, None] if scaled else None
    with torch.inference_mode():
        casts.with_gradient(tensor, torch.bfloat16, scale)
    weight = torch.randn(3, 4, 5).to(torch.bfloat16)
    for _ in range(2):
        (casts.with_gradient(tensor, torch.bfloat16, scale) * weight).sum().backward()
    found, tensor.grad = tensor.grad, None
    for _ in range(2):
        ((tensor if scale is None else tensor * scale).to(torch.bfloat16) * weight).sum().backward()
    assert torch.equal(found, tensor.grad)
