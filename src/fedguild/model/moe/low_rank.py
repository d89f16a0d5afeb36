"""The low-rank products of one layer's experts: every (expert, slot) group with its own factors.

There are five ways to compute them:

- on a GPU with Triton, a kernel over the groups that adds into the frozen product (docs/decisions/0016);
- on a CPU with Numba, kernels that do the same, or compute both at once (docs/decisions/0019, 0021);
- without these, a grouped product over the groups;
- if the dispatch has filled the groups up to whole blocks, one batched product over the blocks (docs/decisions/0003);
- if there are more groups than a grouped product takes, one over the experts alone, with the factors of all slots side
  by side: a row's values at the other slots are zero. Its cost grows with the slots, but from a small share of the
  frozen product's, and it needs no copy of the factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from fedguild.model import kernels
from fedguild.model.moe.dispatch import Dispatch
from fedguild.model.moe.products import GROUP_LIMIT, FrozenProduct, computed, grouped_outer, grouped_rows

if TYPE_CHECKING:
    from fedguild.model.kernels.cpu_groups import Groups
    from fedguild.model.kernels.segmented import Segments


def prefers_blocks(rows: Tensor) -> bool:
    """Whether a layer with this input [N, H] benefits from blocks.

    CPU libraries have a batched product for fp32 and fp64 that distributes its matrices over the threads. The groups of
    a grouped product run in turn, each as a small product of all threads. With a single thread that costs nothing, and
    blocks would only copy the matrices. CUDA has a kernel for grouped products, and the CPU kernels distribute rows
    whatever their groups.
    """
    is_full_precision = rows.dtype in (torch.float32, torch.float64) and not prefers_groups(rows)
    return rows.device.type == "cpu" and is_full_precision and torch.get_num_threads() > 1


def prefers_groups(tensor: Tensor) -> bool:
    """Whether the CPU kernels compute a layer's products with a tensor of this dtype and device."""
    return kernels.computes("low-rank", tensor)


def prefers_side_by_side(device: torch.device, groups: int) -> bool:
    """Whether there are more groups than a grouped product takes at once; a CPU takes any number."""
    return device.type != "cpu" and groups > GROUP_LIMIT


@dataclass(frozen=True)
class LowRank:
    """The grouping of a layer's low-rank products.

    n is the number of rows of the dispatch, G = M·S of groups, r the rank.

    Attributes:
        factor: [n, r] LoRA's scale for each row and rank; 0 for filler rows.
        ends: [G] int32, where each group's rows end; [M], each expert's, with the slots' factors side by side.
        height: Rows of a block; 0 without blocks.
        group_of_block: Group of each block; None without blocks.
        block_starts: [G] where each group's blocks start; None without blocks.
        slot: [n] slot of each row, with the slots' factors side by side; else None.
        slots: S.
        scale: [S, r] LoRA's scale of each slot's ranks, 0 beyond a slot's own, for the kernel; else None.
        segments: The groups' tiles, for the kernel; else None.
        groups: The groups, for the kernels of a CPU; else None.
    """

    tensors_per_projection: ClassVar[int] = 2
    factor: Tensor
    ends: Tensor
    height: int = 0
    group_of_block: Tensor | None = None
    block_starts: Tensor | None = None
    slot: Tensor | None = None
    slots: int = 0
    scale: Tensor | None = None
    segments: Segments | None = None
    groups: Groups | None = None

    @classmethod
    def of(cls, plan: Dispatch, scale: Tensor) -> LowRank:
        """Returns the products of a dispatch; `scale` [S, r] is LoRA's scale of each slot's ranks."""
        if plan.block_ends is None:
            factor = scale.index_select(0, plan.slot)
            if prefers_groups(scale):
                from fedguild.model.kernels.cpu_groups import Groups

                return cls(factor, plan.group_ends, groups=Groups(plan.group_ends))
            if kernels.runs("low-rank", scale.device) and kernels.language(scale.device) == "triton":
                from fedguild.model.kernels.segmented import Segments

                segments = Segments.of(plan.group_ends, plan.slot.shape[0], scale.dtype)
                return cls(factor, plan.group_ends, slots=plan.slots, scale=scale, segments=segments)
            if not prefers_side_by_side(scale.device, plan.experts * plan.slots):
                return cls(factor, plan.group_ends)
            return cls(factor, plan.expert_ends, slot=plan.slot, slots=plan.slots)
        with_filler = torch.cat([scale, scale.new_zeros(1, scale.shape[1])])
        blocks = plan.block_ends.diff(prepend=plan.block_ends.new_zeros(1))
        return cls(
            with_filler.index_select(0, plan.slot),
            plan.group_ends,
            plan.block_height,
            torch.arange(len(blocks), device=blocks.device).repeat_interleave(blocks),
            plan.block_ends - blocks,
        )

    def add(self, total: Tensor | FrozenProduct, rows: Tensor, trained: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Adds scale · B A x of every row x [n, in] to the frozen product [n, p·out] of p projections.

        Args:
            total: [n, p·out], the projections side by side.
            rows: [n, in].
            trained: A [M, S, r, in] and B [M, S, r, out] of the first projection, of the second, …

        Returns:
            The total, and scale · A x [n, p·r], which the backward pass needs.
        """
        downs, ups = trained[0::2], trained[1::2]
        low = self.compress(rows, downs)
        if (fused := self._with_frozen(total, low, ups, summed=False)) is not None:
            return fused, low
        total = computed(total)
        if self.segments is not None:
            self._segmented(low, ups, total=total)
            return total, low
        if self.groups is not None:
            self.groups.add(total, low, by_group(ups))
            return total, low
        for part, part_low, up in zip(total.chunk(len(ups), dim=1), low.chunk(len(ups), dim=1), ups, strict=True):
            self.add_rows(part, part_low, up)
        return total, low

    def _with_frozen(
        self, total: Tensor | FrozenProduct | None, low: Tensor, stored: Sequence[Tensor], *, summed: bool
    ) -> Tensor | None:
        """Returns the frozen product and the low-rank ones of `low` in one; None if no kernel computes both."""
        if self.groups is None or not isinstance(total, FrozenProduct) or not total.suits_kernel():
            return None
        assert total.places is None, "trained parts have rows of their own"
        from fedguild.model.kernels.cpu_groups import LowRankProduct

        product = LowRankProduct(low, by_group(stored), summed=summed)
        if not product.suits(total.matrices.shape[2]):
            return None
        return self.groups.add_to_frozen(total.rows, total.matrices, total.ends, product)

    def back(
        self,
        d_rows: Tensor | FrozenProduct | None,
        d_total: Tensor,
        rows: Tensor,
        trained: Sequence[Tensor],
        kept: Tensor | None,
        weight: Tensor | None,
        needed: Sequence[bool],
    ) -> tuple[Tensor | None, list[Tensor | None]]:
        """Adds scale · Aᵀ Bᵀ dy to the gradient of the rows; returns that, and the gradients of every A and B.

        Args:
            d_rows: [n, in]; None if it is not needed.
            d_total: dy, [n, p·out].
            rows: x, [n, in].
            trained: The factors, as `add` takes them.
            kept: What `add` returned.
            weight: [n, 1], if dy does not include the routing weight yet.
            needed: Which of the factors are trained; the others' gradients are not computed.
        """
        assert kept is not None
        downs, ups = trained[0::2], trained[1::2]
        if self.segments is not None:
            d_rows = None if d_rows is None else computed(d_rows)
            return d_rows, self._segmented_back(d_rows, d_total, rows, trained, kept, weight, needed)
        parts = d_total.chunk(len(ups), dim=1)
        if self.groups is not None:
            d_low = self.scaled(self.groups.rows(d_total, by_group(ups, transposed=True)))
        else:
            d_lows = [self.rows(part, up, transposed=True) for part, up in zip(parts, ups, strict=True)]
            d_low = self.scaled(torch.cat(d_lows, dim=1) if len(d_lows) > 1 else d_lows[0])
        if (fused := self._with_frozen(d_rows, d_low, downs, summed=True)) is not None:
            d_rows = fused
        elif d_rows is not None:
            d_rows = computed(d_rows)
            self.add_compressed(d_rows, d_low, downs)
        if weight is not None:
            d_low, kept = d_low.mul_(weight), kept * weight
        gradients: list[Tensor | None] = [None] * len(trained)
        if any(needed[0::2]):
            gradients[0::2] = self.outer(d_low, rows).chunk(len(downs), dim=1)
        if any(needed[1::2]):
            lows = kept.chunk(len(ups), dim=1)
            gradients[1::2] = [self.outer(low, part) for low, part in zip(lows, parts, strict=True)]
        return d_rows, gradients

    def rows(self, rows: Tensor, stored: Tensor, transposed: bool = False) -> Tensor:
        """Returns [n, b], the rows [n, a] times their group's matrix.

        Args:
            rows: [n, a].
            stored: [M, S, a, b], or [M, S, b, a] with `transposed`.
            transposed: Whether to multiply by the transposed matrices.
        """
        if self.segments is not None:
            return self._segmented(rows, [stored], transposed=transposed)
        if self.groups is not None:
            return self.groups.rows(rows, by_group([stored], transposed=transposed))
        if self.slot is not None:
            return self._rows_side_by_side(rows, stored.flatten(1, 2).to(rows.dtype), transposed)
        matrices = self._matrices(stored, rows.dtype)
        matrices = matrices.transpose(1, 2) if transposed else matrices
        if self.group_of_block is None:
            return grouped_rows(rows, matrices, self.ends)
        return torch.bmm(self._blocks(rows), matrices).flatten(0, 1)

    def add_rows(self, total: Tensor, rows: Tensor, stored: Tensor) -> None:
        """Adds the rows [n, a] times their group's matrix, stored [M, S, a, b], to the total [n, b]."""
        if self.segments is not None:
            self._segmented(rows, [stored], total=total)
        elif self.groups is not None:
            self.groups.add(total, rows, by_group([stored]))
        elif self.group_of_block is not None and total.is_contiguous():
            self._blocks(total).baddbmm_(self._blocks(rows), self._matrices(stored, rows.dtype))
        else:
            total += self.rows(rows, stored)

    def compress(self, rows: Tensor, downs: Sequence[Tensor]) -> Tensor:
        """Returns scale · A x [n, p·r] of every row x [n, a], for the A [M, S, r, a] of p projections."""
        if self.segments is not None:
            return self._segmented(rows, downs, transposed=True, scale=self.scale)
        if self.groups is not None:
            return self.scaled(self.groups.rows(rows, by_group(downs, transposed=True)))
        return self.scaled(self.rows(rows, stacked(downs), transposed=True))

    def add_compressed(self, total: Tensor, low: Tensor, downs: Sequence[Tensor]) -> None:
        """Adds Σ_p Aᵀ of the rows low [n, p·r] to the total [n, a], for the A [M, S, r, a] of p projections."""
        if self.segments is not None:
            self._segmented(low, downs, total=total, summed=True)
        elif self.groups is not None:
            self.groups.add(total, low, by_group(downs), summed=True)
        else:
            self.add_rows(total, low, stacked(downs))

    def scaled(self, low: Tensor) -> Tensor:
        low.unflatten(1, (-1, self.factor.shape[1])).mul_(self.factor[:, None])
        return low

    def outer(self, left: Tensor, right: Tensor) -> Tensor:
        """Returns [G, a, b], each group's left [n_g, a] transposed times its right [n_g, b]."""
        if self.segments is not None:
            from fedguild.model.kernels.segmented import segmented_outer

            return segmented_outer(left, right, self.segments)
        if self.groups is not None:
            return self.groups.outer(left, right)
        if self.slot is not None:
            both = grouped_outer(self._spread(left), right, self.ends)
            by_group: Tensor = both.unflatten(1, (-1, left.shape[1])).flatten(0, 1)
            return by_group
        if self.block_starts is None or self.group_of_block is None:
            return grouped_outer(left, right, self.ends)
        blocks = torch.bmm(self._blocks(left).transpose(1, 2), self._blocks(right))
        order = torch.arange(blocks.shape[0], device=blocks.device)
        sums = torch.nn.functional.embedding_bag(order, blocks.flatten(1), self.block_starts, mode="sum")
        return sums.view(self.block_starts.shape[0], left.shape[1], right.shape[1])

    def _segmented(
        self,
        rows: Tensor,
        stored: Sequence[Tensor],
        *,
        transposed: bool = False,
        total: Tensor | None = None,
        scale: Tensor | None = None,
        summed: bool = False,
    ) -> Tensor:
        """Returns `segmented_rows` for matrices stored [M, S, a, b] of each projection."""
        from fedguild.model.kernels.segmented import segmented_rows

        assert self.segments is not None
        matrices = by_group(stored, transposed=transposed)
        return segmented_rows(rows, matrices, self.segments, total=total, scale=scale, summed=summed)

    def _segmented_back(
        self,
        d_rows: Tensor | None,
        d_total: Tensor,
        rows: Tensor,
        trained: Sequence[Tensor],
        kept: Tensor,
        weight: Tensor | None,
        needed: Sequence[bool],
    ) -> list[Tensor | None]:
        from fedguild.model.kernels.segmented import segmented_outer

        assert self.segments is not None
        downs, ups = trained[0::2], trained[1::2]
        d_low = self._segmented(d_total, ups, transposed=True, scale=self.scale)
        if d_rows is not None:
            self.add_compressed(d_rows, d_low, downs)
        exact = torch.promote_types(rows.dtype, torch.float32)
        gradients: list[Tensor | None] = [None] * len(trained)
        parts = [part.chunk(len(ups), dim=1) for part in (d_low, kept, d_total)]
        for index, (d_part, low, part) in enumerate(zip(*parts, strict=True)):
            for place, left, right in ((2 * index, d_part, rows), (2 * index + 1, low, part)):
                if needed[place]:
                    gradients[place] = segmented_outer(left, right, self.segments, weight=weight, dtype=exact)
        return gradients

    def _matrices(self, stored: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the stored [M, S, a, b] as one matrix for each group, or for each block."""
        matrices = stored.flatten(0, 1).to(dtype)
        return matrices if self.group_of_block is None else matrices.index_select(0, self.group_of_block)

    def _rows_side_by_side(self, rows: Tensor, stored: Tensor, transposed: bool) -> Tensor:
        """As `rows`, for matrices [M, S·a, b] of all slots."""
        if not transposed:
            return grouped_rows(self._spread(rows), stored, self.ends)
        assert self.slot is not None
        all_slots: Tensor = grouped_rows(rows, stored.transpose(1, 2), self.ends).unflatten(1, (self.slots, -1))
        own = self.slot[:, None, None].expand(-1, 1, all_slots.shape[2])
        return all_slots.gather(1, own).squeeze(1)

    def _spread(self, rows: Tensor) -> Tensor:
        """Returns [n, S·a], the rows [n, a] at their own slot's columns and zeros elsewhere."""
        assert self.slot is not None
        own = self.slot[:, None] == torch.arange(self.slots, device=rows.device)
        return (own[:, :, None] * rows[:, None, :]).flatten(1)

    def _blocks(self, rows: Tensor) -> Tensor:
        blocks: Tensor = rows.unflatten(0, (-1, self.height))
        return blocks


def by_group(stored: Sequence[Tensor], *, transposed: bool = False) -> list[Tensor]:
    """Returns the matrices [M, S, a, b] of each projection as [G, a, b], or as [G, b, a] with `transposed`."""
    matrices = [one.flatten(0, 1) for one in stored]
    return [one.transpose(1, 2) for one in matrices] if transposed else matrices


def stacked(downs: Sequence[Tensor]) -> Tensor:
    """Stacks the A [M, S, r, in] of p projections to [M, S, p·r, in]."""
    return torch.cat(tuple(downs), dim=2) if len(downs) > 1 else downs[0]
