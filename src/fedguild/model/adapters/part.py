"""Adapter parts: the kinds of trainables in an adapter, and their interface to the model.

LoRA, an output scale, a router trained in full and a mixture of LoRA experts are all parts. A part derives its tensors
from the model's description alone. It hooks them into a backbone through `AdapterHost`, never through the class that
runs it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor, nn

from fedguild.data.batches import SlotBatch
from fedguild.model.adapters.dropout import Dropout
from fedguild.model.adapters.storage import Layout, SlotTensor
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.runtime import Pass

OutputHook = Callable[[Pass, tuple[Any, ...], Tensor], Tensor]
"""From the current pass, a module's arguments and its output, the output that takes its place."""


class AdapterHost(Protocol):
    """The slots that a part attaches to: S adapters on one backbone (`fedguild.model.slots.SlotModel`).

    Attributes:
        dtype: The dtype of the adapters' tensors.
        loaded: Name -> storage of everything that the adapters load, allocated before any part attaches.
        attached: Objects that a part's `attach` leaves for its method, by the part's type.
        dropout: Dropout with a generator for each slot.
        widen: A part's change of every batch before the backbone runs it.
        needs_rows: Whether a part needs every row of a pass apart, so that rows cannot be packed without padding.
        copies: Number of times that a pass runs every row, each time under another LoRA.
    """

    backbone: Backbone
    slots: int
    device: torch.device
    dtype: torch.dtype
    loaded: dict[str, SlotTensor]
    attached: dict[type, Any]
    dropout: Dropout
    widen: Callable[[SlotBatch], SlotBatch]
    needs_rows: bool
    copies: int

    def running(self, name: str) -> Tensor:
        """Returns the storage of a tensor as passes use it; `copies` times as many slots after `run_twice`."""
        ...

    def run_twice(self, second: str) -> None:
        """Gives every slot a second adapter with tensors named `{second}{name}`; neither of the two is trained."""
        ...

    def change_output(self, module: nn.Module, hook: OutputHook) -> None:
        """Calls a hook after a module of the backbone until the adapters are detached.

        Passes that are not the slots' own leave it out, for example those that examine the plain backbone.
        """
        ...

    def on_close(self, undo: Callable[[], None]) -> None:
        """Registers a function that detaches an adapter from the backbone; hooks of `change_output` need none."""
        ...


@dataclass(frozen=True)
class Standalone:
    """A part as code for plain transformers, which `fedguild export` writes if the part cannot be merged.

    Attributes:
        source: The file with a class `FedGuildForCausalLM(Base)`, which imports nothing of FedGuild, and `Base` by the
            line `from transformers import PreTrainedModel as Base`. It finds `settings`, with the tensors' `shapes`, in
            `config.fedguild`, and registers each tensor as a buffer of a module `fedguild`, dots in names replaced by
            slashes.
        settings: Plain JSON values.
        merges: Whether the plan's other parts are merged into the weights; if not, `tensors` has them.
    """

    source: Path
    settings: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    merges: bool = True


class AdapterPart:
    """A kind of trainable: a frozen dataclass that overrides the defaults where it differs.

    The parts of one cohort's slots have the same `cohort_key`s in the same order; their values may differ where the
    part allows it. They attach in the order of the plan.

    Attributes:
        folds_into_weights: Whether the part's trainables can be merged into the backbone's own weights.
        packs: Whether rows may be packed without padding; a part that cannot also sets `needs_rows`.
    """

    folds_into_weights: ClassVar[bool] = False
    packs: ClassVar[bool] = True

    @property
    def cohort_key(self) -> object:
        """The key that the parts of one cohort share."""
        return type(self)

    @property
    def prefix_tokens(self) -> int:
        """The positions that the part puts in front of every row; no token is multiplied with its tensors if any."""
        return 0

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of the tensors that a client loads, without the slot axis; by default nothing.

        Raises:
            ConfigError: the part does not fit the model.
        """
        return {}

    def trains(self, name: str) -> bool:
        """Whether one of its tensors is trained; otherwise it has no gradient and is not read out after training."""
        return True

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns the initial value of one of its tensors; by default zeros."""
        return torch.zeros(shape)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns the storage of one of its tensors for all slots; by default the slot axis comes first.

        Args:
            shape: The tensor's largest shape over the slots.
        """
        return Layout(shape)

    def frozen_product_parameters(self, model: ModelInfo) -> int:
        """Returns the backbone's parameters that the part multiplies a token with once more; by default 0."""
        return 0

    def attach(self, host: AdapterHost, parts: Sequence[Any]) -> None:
        """Hooks the tensors into the backbone, with `host.change_output` or an undoing function for `host.on_close`.

        Args:
            host: The slots, their storage allocated.
            parts: Each slot's part, in slot order; `self` is the first.
        """
        raise NotImplementedError

    def standalone(
        self, backbone: Backbone, parts: Sequence[AdapterPart], tensors: Mapping[str, Tensor]
    ) -> Standalone | None:
        """Returns the part as code for plain transformers; None, by default, if there is none.

        Args:
            parts: All parts of the model to write.
            tensors: The model's tensors, those of all its parts.
        """
        return None
