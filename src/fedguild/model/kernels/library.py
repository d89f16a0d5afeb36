"""The functions that modules of a frozen model compute with instead of their own."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass(frozen=True)
class Library:
    """The functions that take a module's place, all differentiable.

    Attributes:
        takes: Whether they compute with a tensor; the module's own way is taken with another.
        tried: What a module was tried as -> why it cannot be replaced, or nothing; so each is tried once.
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
