"""The experts of one layer, token by token, with W + s·BA + D formed for every expert and slot."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


def adapted_experts(
    tokens: Tensor,
    weights: Tensor,
    indices: Tensor,
    slot_of_token: Tensor,
    keep: Tensor | None,
    frozen: tuple[Tensor, Tensor, Tensor],
    lora: Mapping[str, tuple[Tensor, Tensor]],
    scale: Tensor,
    delta: Mapping[str, Tensor],
) -> Tensor:
    """Returns [N, H], y_n = sum_j R_nj · down_e(silu(gate_e x) * up_e x), every matrix with what its slot adds.

    Args:
        tokens: [N, H].
        weights: [N, k] routing weights R.
        indices: [N, k] experts; M for a pair that is not active.
        slot_of_token: [N].
        keep: [N] bool, False for padding; None where all tokens are real.
        frozen: gate [M, I, H], up [M, I, H] and down [M, H, I].
        lora: Projection name -> A [S, M, r, in], B [S, M, out, r]; empty without LoRA.
        scale: [S] LoRA's scale.
        delta: Projection name -> D [S, M, out, in]; empty where nothing is trained in full.
    """
    experts = frozen[0].shape[0]
    rows = []
    for token in range(tokens.shape[0]):
        out = torch.zeros_like(tokens[token])
        slot = int(slot_of_token[token])
        for column in range(indices.shape[1]):
            expert = int(indices[token, column])
            if expert == experts or (keep is not None and not keep[token]):
                continue
            gate, up, down = (
                _merged(weight[expert], lora.get(name), delta.get(name), slot, expert, scale)
                for name, weight in zip(("gate_proj", "up_proj", "down_proj"), frozen, strict=True)
            )
            inner = torch.nn.functional.silu(gate @ tokens[token]) * (up @ tokens[token])
            out = out + weights[token, column].to(out.dtype) * (down @ inner)
        rows.append(out)
    return torch.stack(rows)


def _merged(
    weight: Tensor, pair: tuple[Tensor, Tensor] | None, change: Tensor | None, slot: int, expert: int, scale: Tensor
) -> Tensor:
    if pair is not None:
        down, up = pair
        weight = weight + scale[slot] * (up[slot, expert] @ down[slot, expert])
    return weight if change is None else weight + change[slot, expert]
