"""LoRA of several slots on a linear layer: s · B_c A_c x, each row with its own client's factors.

Source: Hu et al., LoRA, 2021, Section 4.1; stored as A [S, r, in] and B [S, out, r]. With a factor
R [S, r, r] in the middle it is s · B_c R_c A_c x.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def slot_product(
    hidden: Tensor, down: Tensor, up: Tensor, scale: Tensor, rows: tuple[int, ...], middle: Tensor | None = None
) -> Tensor:
    """Returns s · B A x of every row, or s · B R A x, with the factors of the row's slot.

    Args:
        hidden: [..., in], slot-major: the rows of slot 0 first.
        down: A, [S, r, in].
        up: B, [S, out, r].
        scale: [S] LoRA's scale.
        rows: Rows of each slot (in any unit that `hidden`'s leading size is a multiple of).
        middle: R, [S, r, r]; None where there is none.
    """
    shape = hidden.shape
    flat = hidden.reshape(-1, shape[-1])
    scaled = down * scale[:, None, None]
    factors = [factor.to(flat.dtype) for factor in (scaled, middle, up) if factor is not None]
    if len(rows) == 1:
        out = _through(flat, [factor[0] for factor in factors])
    elif len(set(rows)) == 1:
        out = _through(flat.view(len(rows), -1, shape[-1]), factors)
    else:
        unit = flat.shape[0] // sum(rows)
        parts = flat.split([count * unit for count in rows])
        out = torch.cat([_through(part, own) for part, *own in zip(parts, *factors, strict=True)])
    return out.reshape(*shape[:-1], up.shape[1])


def _through(rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Returns the rows [.., n, in] times each factor [.., out, in] transposed, one after the other."""
    for factor in factors:
        rows = rows @ factor.transpose(-1, -2)
    return rows


def kaiming_uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Returns A's start: uniform in ±1/√in, which is peft's Kaiming initialisation with a = √5."""
    bound = 1 / math.sqrt(shape[-1])
    return (torch.rand(shape, generator=rng) * 2 - 1) * bound


def initial_value(name: str, shape: tuple[int, ...], start: float, rng: torch.Generator) -> Tensor:
    """Returns the start of a trainable by its name: A random, B and R zero, an output scale `start`."""
    if name.endswith("lora_A"):
        return kaiming_uniform(shape, rng)
    if name.endswith(("lora_B", "lora_R")):
        return torch.zeros(shape)
    return torch.full(shape, start)
