"""Dropout's mask by its counter, in Triton: the same bits as `fedguild.model.adapters.dropout.kept`, in one pass.

torch computes SplitMix64's output function in twelve passes over integers of eight bytes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
"""Outputs of 64 bits, two elements each, of a program."""


def kept_elements(
    keys: Tensor, least: Tensor, features: int, gamma: int, multipliers: tuple[int, int], shifts: tuple[int, int, int]
) -> Tensor:
    """Returns [N, features] bool, the elements that are kept, as `fedguild.model.adapters.dropout.kept` does.

    Args:
        keys: [N] int64, the key of each token.
        least: [N] int32, the smallest number with which a token's element is kept.
        gamma: SplitMix64's increment; `multipliers` and `shifts` are its other constants.
    """
    out = torch.empty(len(keys), features, dtype=torch.bool, device=keys.device)
    if out.numel() == 0 or out.device.type == "meta":
        return out
    block = min(BLOCK, triton.next_power_of_2(-(-features // 2)))
    with torch.cuda.device_of(keys):
        _kept_kernel[(len(keys), -(-features // (2 * block)))](
            keys,
            least,
            out.view(torch.uint8),
            features,
            GAMMA=gamma,
            FIRST=multipliers[0],
            SECOND=multipliers[1],
            SHIFT_1=shifts[0],
            SHIFT_2=shifts[1],
            SHIFT_3=shifts[2],
            BLOCK=block,
        )
    return out


@triton.jit
def _kept_kernel(
    keys_at,
    least_at,
    out_at,
    features,
    GAMMA: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    SHIFT_1: tl.constexpr,
    SHIFT_2: tl.constexpr,
    SHIFT_3: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of one token's elements."""
    token = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key = tl.load(keys_at + token).to(tl.uint64, bitcast=True)
    least = tl.load(least_at + token)
    gamma = tl.full([], GAMMA, dtype=tl.uint64)
    values = key + (place + 1).to(tl.uint64) * gamma
    values = (values ^ (values >> SHIFT_1)) * tl.full([], FIRST, dtype=tl.uint64)
    values = (values ^ (values >> SHIFT_2)) * tl.full([], SECOND, dtype=tl.uint64)
    values = values ^ (values >> SHIFT_3)
    low = (values & 0xFFFFFFFF).to(tl.uint32).to(tl.int32, bitcast=True)
    high = (values >> 32).to(tl.uint32).to(tl.int32, bitcast=True)
    at = out_at + token * features + 2 * place
    tl.store(at, (low >= least).to(tl.uint8), mask=2 * place < features)
    tl.store(at + 1, (high >= least).to(tl.uint8), mask=2 * place + 1 < features)
