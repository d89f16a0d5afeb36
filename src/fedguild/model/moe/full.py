"""Products of experts that are trained in full: every (expert, slot) group has its own dense change.

The experts of slot s are W + D_s. W multiplies all rows of an expert at once, and D_s is applied in a product grouped
by (expert, slot), so the sum W + D_s is never formed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from fedguild.model.moe.products import FrozenProduct, add_grouped_rows, computed, grouped_outer


@dataclass(frozen=True)
class FullChange:
    """The grouped products of a layer's dense changes D [M, S, out, in], added to its frozen products.

    n is the number of rows of the dispatch, G = M·S of groups, p of projections with a common input.

    Attributes:
        ends: [G] int32, where each group's rows end.
    """

    tensors_per_projection: ClassVar[int] = 1
    ends: Tensor

    def add(self, total: Tensor | FrozenProduct, rows: Tensor, trained: Sequence[Tensor]) -> tuple[Tensor, None]:
        total = computed(total)
        for part, change in zip(total.chunk(len(trained), dim=1), trained, strict=True):
            add_grouped_rows(part, rows, self._matrices(change, rows.dtype).transpose(1, 2), self.ends)
        return total, None

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
        """Adds Dᵀ dy to the gradient of the rows; returns that, and the gradient Σ w dy xᵀ [G, out, in] of every D.

        Args:
            d_rows: [n, in]; None if it is not needed.
            d_total: dy, [n, p·out].
            rows: x, [n, in].
            kept: What `add` returned.
            weight: w, [n, 1], if dy does not include the routing weight yet.
            needed: Which of the changes are trained; the others' gradients are not computed.
        """
        d_rows = None if d_rows is None else computed(d_rows)
        weighted = rows if weight is None else rows * weight
        gradients: list[Tensor | None] = []
        for part, change, wanted in zip(d_total.chunk(len(trained), dim=1), trained, needed, strict=True):
            if d_rows is not None:
                add_grouped_rows(d_rows, part, self._matrices(change, part.dtype), self.ends)
            gradients.append(grouped_outer(part, weighted, self.ends) if wanted else None)
        return d_rows, gradients

    def _matrices(self, change: Tensor, dtype: torch.dtype) -> Tensor:
        return change.flatten(0, 1).to(dtype)
