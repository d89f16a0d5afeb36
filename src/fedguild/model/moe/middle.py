"""Low-rank products of one layer's experts with a trained factor between frozen ones: s · B R A x.

Only R is trained, so no gradients of A and B are formed: the backward pass needs just r values of each row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedguild.model.moe.low_rank import LowRank
from fedguild.model.moe.products import FrozenProduct, computed


@dataclass(frozen=True)
class MiddleRank:
    """The grouping of a layer's products s · B R A x.

    Attributes:
        low_rank: The grouping, the same as for s · B A x.
    """

    tensors_per_projection: ClassVar[int] = 3
    low_rank: LowRank

    def add(self, total: Tensor | FrozenProduct, rows: Tensor, trained: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Adds scale · B R A x of every row x [n, in] to the frozen product [n, p·out] of p projections.

        Args:
            total: [n, p·out], the projections side by side.
            rows: [n, in].
            trained: A [M, S, r, in], B [M, S, r, out] and R [M, S, r, r] of the first projection, of the second, …

        Returns:
            The total, and scale · A x [n, p·r], which the backward pass needs.
        """
        total = computed(total)
        downs, ups, middles = trained[0::3], trained[1::3], trained[2::3]
        low = self.low_rank.compress(rows, downs)
        parts = zip(total.chunk(len(ups), dim=1), low.chunk(len(ups), dim=1), ups, middles, strict=True)
        for part, part_low, up, middle in parts:
            self.low_rank.add_rows(part, self.low_rank.rows(part_low, middle, transposed=True), up)
        return total, low

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
        """Adds scale · Aᵀ Rᵀ Bᵀ dy to the gradient of the rows; returns that, and Σ w Bᵀ dy (s A x)ᵀ for every R.

        Args:
            d_rows: [n, in]; None if it is not needed.
            d_total: dy, [n, p·out].
            rows: x, [n, in].
            trained: The factors, as `add` takes them.
            kept: What `add` returned.
            weight: w, [n, 1], if dy does not include the routing weight yet.
            needed: The factors whose gradients are needed: every R and nothing else.
        """
        assert kept is not None
        assert not any((*needed[0::3], *needed[1::3])), "A and B around a middle factor are frozen"
        downs, ups, middles = trained[0::3], trained[1::3], trained[2::3]
        parts = d_total.chunk(len(ups), dim=1)
        d_highs = [self.low_rank.rows(part, up, transposed=True) for part, up in zip(parts, ups, strict=True)]
        d_rows = None if d_rows is None else computed(d_rows)
        if d_rows is not None:
            d_lows = [self.low_rank.rows(d_high, middle) for d_high, middle in zip(d_highs, middles, strict=True)]
            self.low_rank.add_compressed(d_rows, self.low_rank.scaled(torch.cat(d_lows, dim=1)), downs)
        lows = (kept if weight is None else kept * weight).chunk(len(ups), dim=1)
        gradients: list[Tensor | None] = [None] * len(trained)
        gradients[2::3] = [self.low_rank.outer(d_high, low) for d_high, low in zip(d_highs, lows, strict=True)]
        return d_rows, gradients
