"""Adapter parts: the kinds of trainables that an adapter is made of, and what they see of the model.

LoRA, an output scale, a router trained in full and a mixture of LoRA experts are parts alike. A part
knows its tensors from the model's description alone, and hooks them into a backbone through
`AdapterHost`, never through the class that runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from fedguild.data.batches import SlotBatch
from fedguild.model.adapters.dropout import Dropout
from fedguild.model.adapters.storage import Layout, SlotTensor
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo


class AdapterHost(Protocol):
    """The slots that a part attaches to: S adapters on one backbone (`fedguild.model.slots.SlotModel`).

    Attributes:
        backbone: The frozen model.
        slots: S.
        device: Where the backbone is.
        dtype: The dtype of the adapters' tensors.
        loaded: Name -> storage of everything that the adapters load, allocated before any part attaches.
        attached: What a part's `attach` leaves for its method, by the part's type.
        dropout: Dropout with a generator for each slot.
        widen: What a part does to every batch before the backbone runs it.
        copies: How often a pass runs every row, each time under a LoRA of its own.
    """

    backbone: Backbone
    slots: int
    device: torch.device
    dtype: torch.dtype
    loaded: dict[str, SlotTensor]
    attached: dict[type, Any]
    dropout: Dropout
    widen: Callable[[SlotBatch], SlotBatch]
    copies: int

    def running(self, name: str) -> Tensor:
        """Returns the storage of a tensor as passes use it; `copies` times as many slots after `run_twice`."""
        ...

    def run_twice(self, second: str) -> None:
        """Gives every slot a second adapter, its tensors called `{second}{name}`; neither of the two is trained."""
        ...

    def on_close(self, undo: Callable[[], None]) -> None:
        """Registers what takes an adapter off the backbone again."""
        ...


class AdapterPart:
    """A kind of trainable: a frozen dataclass that overrides what it does otherwise.

    The parts of one cohort's slots are of the same `cohort_key` in the same order; their numbers may
    differ where the part says so. They attach in the order of the plan.

    Attributes:
        folds_into_weights: Whether the backbone's own weights can hold what the part trains.
    """

    folds_into_weights: ClassVar[bool] = False

    @property
    def cohort_key(self) -> object:
        """What the parts of one cohort have in common."""
        return type(self)

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of the tensors that a client loads, without the slot axis; by default nothing.

        Raises:
            ConfigError: the part does not fit the model.
        """
        return {}

    def trains(self, name: str) -> bool:
        """Whether one of its tensors is trained; if not, it has no gradient and is not read out after training."""
        return True

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns the start of one of its tensors; by default zeros."""
        return torch.zeros(shape)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns how one of its tensors is stored for all slots; by default the slot axis comes first.

        Args:
            name: The tensor's name.
            shape: The largest shape that a slot has of it.
            dtype: The dtype of the backbone's products.
        """
        return Layout(shape)

    def attach(self, host: AdapterHost, parts: Sequence[Any]) -> None:
        """Hooks the tensors into the backbone; undone by what it gives to `host.on_close`.

        Args:
            host: The slots, their storage allocated.
            parts: Each slot's own part, in slot order; `self` is the first.
        """
        raise NotImplementedError
