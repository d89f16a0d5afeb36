"""FedEx-LoRA with whole matrices: the average of the products less the product of the averages, in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from tests.oracles.low_rank import dense_product


def averages(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float]) -> dict[str, Tensor]:
    """sum_c w_c theta_c of every factor."""
    return {
        name: torch.stack([w * own[name].double() for own, w in zip(clients, weights, strict=True)]).sum(0)
        for name in clients[0]
    }


def product_of_averages(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], module: str) -> Tensor:
    """B A [.., out, in] of one module."""
    mean = averages(clients, weights)
    return dense_product(mean[f"{module}.lora_A"], mean[f"{module}.lora_B"])


def average_of_products(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], module: str) -> Tensor:
    """sum_c w_c B_c A_c [.., out, in] of one module."""
    products = [dense_product(own[f"{module}.lora_A"], own[f"{module}.lora_B"]) for own in clients]
    return torch.stack([w * product for product, w in zip(products, weights, strict=True)]).sum(0)


def residual(clients: Sequence[Mapping[str, Tensor]], weights: Sequence[float], module: str, scale: float) -> Tensor:
    """s (sum_c w_c B_c A_c - B A) [.., out, in] of one module."""
    return scale * (average_of_products(clients, weights, module) - product_of_averages(clients, weights, module))
