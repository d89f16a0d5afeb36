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
        rows_per_slot: Rows of each slot, in slot order; tokens if rows are packed.
        mask: [R, T] bool, False for padding; None if every token is real. In an encoder-decoder model it is the
            encoder's.
        active_experts: [S] active experts of each slot, on the device; None for the model's own.
        most_active: The largest of them.
        select: [P] positions in [R·T] at which logits are wanted; None for all.
        decoder_mask: [R, U] of the decoder, U ≠ T, so that the number of a layer's tokens identifies its side.
        experts_per_slot: Active experts of each slot, on the host; None if not known there.
        real_tokens: Real tokens of each slot in `mask`, on the host; None if not known there.
    """

    rows_per_slot: tuple[int, ...]
    mask: Tensor | None
    active_experts: Tensor | None
    most_active: int
    select: Tensor | None = None
    decoder_mask: Tensor | None = None
    experts_per_slot: tuple[int, ...] | None = None
    real_tokens: tuple[int, ...] | None = None
    _slots: dict[int, Tensor] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)

    def slot_of_token(self, tokens: int, device: torch.device) -> Tensor:
        """Returns [tokens], the slot of each token of the flattened rows."""
        if tokens not in self._slots:
            rows = torch.tensor(self.rows_per_slot)
            per_row = tokens // int(rows.sum())
            slots = torch.arange(len(self.rows_per_slot)).repeat_interleave(rows * per_row)
            self._slots[tokens] = slots.to(device, non_blocking=True)
        return self._slots[tokens]

    def place_in_slot(self, tokens: int, device: torch.device) -> Tensor:
        """Returns [tokens], each real token's place among its slot's real tokens, from 0; arbitrary for padding."""
        if tokens not in self._places:
            slot, keep = self.slot_of_token(tokens, device), self.keep(tokens)
            real = torch.ones_like(slot) if keep is None else keep.to(slot.dtype)
            of_slot = real.new_zeros(len(self.rows_per_slot)).scatter_add_(0, slot, real)
            before = of_slot.cumsum(0) - of_slot
            self._places[tokens] = real.cumsum(0) - 1 - before.index_select(0, slot)
        return self._places[tokens]

    def active_pairs(self, tokens: int) -> int | None:
        """Returns the number of active pairs in a layer with these tokens; None if the host does not know it."""
        if self.experts_per_slot is None:
            return None
        if self.keep(tokens) is None:
            unit = tokens // max(1, sum(self.rows_per_slot))
            of_slots: tuple[int, ...] | None = tuple(rows * unit for rows in self.rows_per_slot)
        else:
            of_slots = self.real_tokens if self.decoder_mask is None else None
        if of_slots is None:
            return None
        return sum(count * active for count, active in zip(of_slots, self.experts_per_slot, strict=True))

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
