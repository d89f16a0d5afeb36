"""Clipping over all tensors together, and what no client can make of it."""

from __future__ import annotations

import math

import pytest
import torch

from fedguild.privacy.dp.clipping import clipped, norm_of, with_noise
from fedguild.privacy.dp.noise import Noise


def test_the_norm_is_over_all_tensors() -> None:
    tensors = {"a": torch.tensor([3.0, 0.0]), "b": torch.tensor([[4.0]])}
    assert norm_of(tensors) == 5.0
    shorter = clipped(tensors, 1.0)
    assert norm_of(shorter) == pytest.approx(1.0)
    assert shorter["a"].tolist() == pytest.approx([0.6, 0.0])
    assert clipped(tensors, 5.0)["b"].tolist() == [[4.0]]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_adds_nothing(value: float) -> None:
    assert norm_of(clipped({"a": torch.tensor([value, 1.0]), "b": torch.ones(2)}, 1.0)) == 0.0


def test_noise_has_its_deviation_and_differs_by_tensor() -> None:
    noisy = with_noise({"a": torch.ones(20_000), "b": torch.ones(20_000)}, 0.5, Noise(b"key"))
    for tensor in noisy.values():
        assert float(tensor.mean()) == pytest.approx(1.0, abs=0.02)
        assert float(tensor.std()) == pytest.approx(0.5, rel=0.03)
    assert not torch.equal(noisy["a"], noisy["b"])
