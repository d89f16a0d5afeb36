"""A router trained in full: a dense change of its weight for every slot, zero at the start.

The router's logits become (W + D_c) h for the rows of client c. W is the frozen weight, D_c the
client's own; a method may keep it to the client (FedAlign-MoE's private gate) or average it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fedguild.model.plan import ModelInfo
from fedguild.model.slot_products import slot_rows

if TYPE_CHECKING:
    from fedguild.model.slots import SlotModel


@dataclass(frozen=True)
class FullRouter:
    """Trains `{router}.delta` [M, H] of every MoE layer; without MoE layers it trains nothing."""

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `{router}.delta` -> (M, H) for every MoE layer."""
        return {delta_name(moe.router): (moe.num_experts, moe.hidden) for moe in model.moe}

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns zeros: the router starts as it was published."""
        return torch.zeros(shape)

    def slot_axis(self, name: str) -> int:
        """Returns 0: the storage is [S, M, H]."""
        return 0

    def decays(self, name: str) -> bool:
        """Returns True: weight decay draws the router back to the published one."""
        return True

    def attach(self, model: SlotModel, parts: Sequence[FullRouter]) -> None:
        """Adds D_c h to every router's logits; the layers drop the term when the model closes."""
        for layer in model.backbone.moe:
            layer.logit_terms.append(_term(model, model.loaded[delta_name(layer.info.router)].stored))


def delta_name(router: str) -> str:
    """Returns the name of the trainable of the router at this module path."""
    return f"{router}.delta"


def _term(model: SlotModel, stored: Tensor) -> Callable[[Tensor], Tensor]:
    def term(hidden: Tensor) -> Tensor:
        current = model.backbone.runtime.current
        assert current is not None
        return slot_rows(hidden, stored.to(hidden.dtype), current.rows_per_slot)

    return term
