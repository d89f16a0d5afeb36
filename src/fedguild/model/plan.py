"""Adapter plans: the trainables and the active experts of a client, described without weights.

Every name and shape of an adapter follows from (`ModelInfo`, `AdapterPlan`): `adapter_shapes` lists the tensors that a
client loads, `trainable_shapes` those that it trains. Adapters are built from the first, the server validates uploads
against the second, and the cost model uses both.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedguild.core.errors import ConfigError
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.info import ModelInfo

Part = TypeVar("Part", bound=AdapterPart)


@dataclass(frozen=True)
class AdapterPlan:
    """The trainables and active experts of one client, which a method derives from the client's budget.

    Attributes:
        parts: The parts of the adapter, at most one of a kind. They attach in this order, and their tensors are listed
            and drawn in this order.
        active_experts: Active experts per token, k_i; None keeps the model's own.
        merges: Whether what is trained is added to the backbone's own weights, which then cannot be in 4 bit.
        beside: The plan of further slots that a client holds while it trains (`Cohort.afresh`), so that memory suffices
            for both; None for none.
        beside_until: The last round in which it holds them; None for all rounds.
        buffers: Number of further values, in fp32, that a client holds while it trains.
    """

    parts: tuple[AdapterPart, ...]
    active_experts: int | None = None
    merges: bool = False
    beside: AdapterPlan | None = field(default=None, compare=False)
    beside_until: int | None = field(default=None, compare=False)
    buffers: int = field(default=0, compare=False)

    def __post_init__(self) -> None:
        if self.active_experts is not None and self.active_experts < 1:
            raise ConfigError(f"active_experts must be at least 1, but is {self.active_experts}.")

    def part(self, kind: type[Part]) -> Part | None:
        """Returns the part of a kind; None if there is none."""
        return next((part for part in self.parts if isinstance(part, kind)), None)

    @property
    def lora(self) -> Lora:
        """The plan's LoRA.

        Raises:
            LookupError: it has none.
        """
        lora = self.part(Lora)
        if lora is None:
            raise LookupError(f"This plan has no LoRA, but {', '.join(type(part).__name__ for part in self.parts)}.")
        return lora

    @property
    def rank(self) -> int:
        """The highest rank of its low-rank parts; 0 if it has none."""
        return max((getattr(part, "rank", 0) for part in self.parts), default=0)

    @property
    def prefix_tokens(self) -> int:
        """The positions that its parts put in front of every row."""
        return sum(part.prefix_tokens for part in self.parts)

    @property
    def cohort_key(self) -> object:
        """The key that all plans of one cohort share."""
        return tuple(part.cohort_key for part in self.parts)

    def beside_in(self, round_index: int) -> AdapterPlan | None:
        """Returns the plan of the further slots of a round; None where it has none."""
        return None if self.beside_until is not None and round_index > self.beside_until else self.beside

    def with_lora(self, **changes: Any) -> AdapterPlan:
        """Returns the plan with other values of its LoRA's fields: `plan.with_lora(rank=4)`."""
        lora = replace(self.lora, **changes)
        return replace(self, parts=tuple(lora if part is self.lora else part for part in self.parts))

    def without(self, *kinds: type[AdapterPart]) -> AdapterPlan:
        """Returns the plan without its parts of these kinds."""
        return replace(self, parts=tuple(part for part in self.parts if not isinstance(part, kinds)))


def adapter_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of everything that a client of the plan loads, without the slot axis.

    Raises:
        ConfigError: a part does not fit the model, for example because a target names no layer of it.
    """
    return {name: shape for part in plan.parts for name, shape in part.shapes(model).items()}


def trainable_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of everything that the plan trains: `adapter_shapes` without what is frozen."""
    return {name: shape for part in plan.parts for name, shape in part.shapes(model).items() if part.trains(name)}


def initial_adapter(model: ModelInfo, plan: AdapterPlan, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns the initial values of everything that a plan loads, drawn in the order of its parts; BA = 0 for LoRA."""
    return {name: part.initial(name, shape, rng) for part in plan.parts for name, shape in part.shapes(model).items()}


def zero_adapter(model: ModelInfo, plan: AdapterPlan) -> dict[str, Tensor]:
    """Returns zeros for everything that a plan loads: an adapter that changes nothing."""
    return {name: torch.zeros(shape) for name, shape in adapter_shapes(model, plan).items()}
