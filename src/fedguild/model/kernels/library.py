"""The functions that replace the computations of a frozen model's modules."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Library:
    """The functions that replace a module's, all differentiable.

    Attributes:
        takes: Whether they compute with a tensor; otherwise the module's own code runs.
        tried: What a module was tried as -> why it cannot be replaced, or empty; so each is tried once.
        norm: (x [..., H], weight [H], epsilon) -> [..., H].
        rotary: (query [B, h, T, d], key, cos [B, T, d], sin) -> both rotated, possibly in place.
        gate: z [n, 2·I] -> silu of the first half times the second, [n, I].
        product: (a, b) -> silu(a) · b.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor], Tensor]
    takes: Callable[[Tensor], bool] = lambda values: values.numel() > 0
    tried: dict[Hashable, str] = field(default_factory=dict, init=False, compare=False)
