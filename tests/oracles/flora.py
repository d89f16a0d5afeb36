"""FLoRA with whole matrices: Delta W = sum_c p_c s_c B_c A_c, client by client in fp64."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from tests.oracles.low_rank import dense_product


def exact_change(
    clients: Sequence[Mapping[str, Tensor]], examples: Sequence[int], scales: Sequence[float], module: str
) -> Tensor:
    """Delta W [.., out, in] of one module."""
    total = 0.0
    for own, count, scale in zip(clients, examples, scales, strict=True):
        product = dense_product(own[f"{module}.lora_A"], own[f"{module}.lora_B"])
        total = total + count / sum(examples) * scale * product
    assert isinstance(total, Tensor)
    return total
