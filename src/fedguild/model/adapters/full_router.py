"""A router trained in full: a dense change of its weight for every slot, initially zero.

The router's logits become (W + D_c) h for the rows of client c. W is the frozen weight, D_c the client's change, which
a method may keep private (FedAlign-MoE's gate) or average.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.info import ModelInfo
from fedguild.model.moe.casts import Casts
from fedguild.model.slot_products import slot_rows


@dataclass(frozen=True)
class FullRouter(AdapterPart):
    """Trains `{router}.delta` [M, H] of every MoE layer; without MoE layers it trains nothing."""

    folds_into_weights = True

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        return {delta_name(moe.router): (moe.num_experts, moe.hidden) for moe in model.moe}

    def attach(self, host: AdapterHost, parts: Sequence[FullRouter]) -> None:
        for layer in host.backbone.moe:
            layer.logit_terms.append(_term(host, host.running(delta_name(layer.info.router))))


def delta_name(router: str) -> str:
    """Returns the name of the change of the router at this module path."""
    return f"{router}.delta"


def _term(host: AdapterHost, stored: Tensor) -> Callable[[Tensor], Tensor]:
    casts = Casts()

    def term(hidden: Tensor) -> Tensor:
        current = host.backbone.runtime.current
        assert current is not None
        return slot_rows(hidden, casts.with_gradient(stored, hidden.dtype), current.rows_per_slot)

    return term
