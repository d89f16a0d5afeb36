"""State of the running forward pass, for the hooks on a backbone.

The layers of a transformers model receive only a hidden state. The `Runtime` of a backbone tells the hooks which rows
belong to which slot, which tokens are padding, how many experts are active, and where activations are counted. It
outlives the forward pass, because gradient checkpointing runs the layers again during the backward pass.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from fedguild.model.moe.statistics import RoutingStatistics


@dataclass
class Pass:
    """One forward pass over the rows of several slots.

    Attributes:
        rows_per_slot: Rows of each slot, in slot order.
        mask: [R, T] bool, False for padding; None where every token is real. In an encoder-decoder
            model it is the encoder's.
        active_experts: [S] active experts of each slot, on the device; None for the model's own.
        most_active: The largest of them.
        select: [P] positions in [R·T] at which logits are wanted; None for all.
        decoder_mask: [R, U] of the decoder, U ≠ T, so that the number of a layer's tokens identifies its side.
    """

    rows_per_slot: tuple[int, ...]
    mask: Tensor | None
    active_experts: Tensor | None
    most_active: int
    select: Tensor | None = None
    decoder_mask: Tensor | None = None
    _slots: dict[int, Tensor] = field(default_factory=dict)

    def slot_of_token(self, tokens: int, device: torch.device) -> Tensor:
        """Returns [tokens], the slot of each token of the flattened rows."""
        if tokens not in self._slots:
            rows = torch.tensor(self.rows_per_slot)
            per_row = tokens // int(rows.sum())
            slots = torch.arange(len(self.rows_per_slot)).repeat_interleave(rows * per_row)
            self._slots[tokens] = slots.to(device)
        return self._slots[tokens]

    def keep(self, tokens: int) -> Tensor | None:
        """Returns [tokens] bool, False for padding; None if all are real."""
        for mask in (self.mask, self.decoder_mask):
            if mask is not None and mask.numel() == tokens:
                return mask.reshape(-1)
        return None


@dataclass
class Runtime:
    """The state that a backbone's hooks share.

    Attributes:
        current: The current or last pass; None means plain use of the backbone.
        statistics: The statistics that activations are counted in; None to count nothing.
        counting: Whether this is the forward pass itself, not its recomputation.
    """

    current: Pass | None = None
    statistics: RoutingStatistics | None = None
    counting: bool = False

    def count(self, layer: int, indices: Tensor) -> None:
        """Adds a layer's activations: `indices` [N, k], M where nothing is active."""
        if not self.counting or self.statistics is None or self.current is None:
            return
        counts = self.statistics.counts
        slots, experts = counts.shape[1:]
        tokens = indices.shape[0]
        slot = self.current.slot_of_token(tokens, indices.device)
        real = self.current.keep(tokens)
        key = slot[:, None] * (experts + 1) + indices
        one = torch.ones_like(key) if real is None else real[:, None].expand_as(key).to(key.dtype)
        table = torch.zeros(slots * (experts + 1), dtype=key.dtype, device=key.device)
        table.scatter_add_(0, key.reshape(-1), one.reshape(-1))
        counts[layer] += table.view(slots, experts + 1)[:, :experts]
        per_token = torch.ones_like(slot) if real is None else real.to(slot.dtype)
        self.statistics.layer_tokens[layer].scatter_add_(0, slot, per_token)
