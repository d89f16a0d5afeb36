"""LoRA of several slots on a linear layer: s · B_c A_c x, each row with its own client's factors.

Source: Hu et al., LoRA, 2021, Section 4.1; stored as A [S, r, in] and B [S, out, r].
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def slot_product(hidden: Tensor, down: Tensor, up: Tensor, scale: Tensor, rows: tuple[int, ...]) -> Tensor:
    """Returns s · B A x of every row, with the factors of the row's slot.

    Args:
        hidden: [..., in], slot-major: the rows of slot 0 first.
        down: A, [S, r, in].
        up: B, [S, out, r].
        scale: [S] LoRA's scale.
        rows: Rows of each slot (in any unit that `hidden`'s leading size is a multiple of).
    """
    shape = hidden.shape
    flat = hidden.reshape(-1, shape[-1])
    down = (down * scale[:, None, None]).to(flat.dtype)
    up = up.to(flat.dtype)
    if len(rows) == 1:
        out = (flat @ down[0].t()) @ up[0].t()
    elif len(set(rows)) == 1:
        grouped = flat.view(len(rows), -1, shape[-1])
        out = torch.bmm(torch.bmm(grouped, down.transpose(1, 2)), up.transpose(1, 2))
    else:
        unit = flat.shape[0] // sum(rows)
        parts = flat.split([count * unit for count in rows])
        out = torch.cat([(part @ a.t()) @ b.t() for part, a, b in zip(parts, down, up, strict=True)])
    return out.reshape(*shape[:-1], up.shape[1])


def kaiming_uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Returns A's start: uniform in ±1/√in, which is peft's Kaiming initialisation with a = √5."""
    bound = 1 / math.sqrt(shape[-1])
    return (torch.rand(shape, generator=rng) * 2 - 1) * bound


def initial_value(name: str, shape: tuple[int, ...], start: float, rng: torch.Generator) -> Tensor:
    """Returns the start of a trainable by its name: A random, B zero, an output scale `start`."""
    if name.endswith("lora_A"):
        return kaiming_uniform(shape, rng)
    if name.endswith("lora_B"):
        return torch.zeros(shape)
    return torch.full(shape, start)
