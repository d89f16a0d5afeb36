"""Linear layers trained in full: every targeted weight W gets a change D of its shape, zero at the start.

The layer computes (W + D_c) x for the rows of client c. What is trained, sent and averaged is D; its
gradient is the one that W would have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from fedguild.model.plan import AdapterPlan, ModelInfo, targeted_linears
from fedguild.model.slot_products import slot_rows

if TYPE_CHECKING:
    from fedguild.model.slots import SlotModel


@dataclass(frozen=True)
class FullLinears:
    """Trains `{linear}.delta` [out, in] of the targeted linear layers.

    Attributes:
        targets: Leaf names of linear layers, or the groups `attention` and `mlp`.
    """

    targets: tuple[str, ...]

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `{linear}.delta` -> (out, in).

        Raises:
            ConfigError: a target names no linear layer of this model.
        """
        linears = targeted_linears(model, AdapterPlan(rank=1, scale=1.0, targets=self.targets))
        return {f"{linear.name}.delta": (linear.outputs, linear.inputs) for linear in linears}

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns no change."""
        return torch.zeros(shape)

    def slot_axis(self, name: str) -> int:
        """Returns 0: the storage is [S, out, in]."""
        return 0

    def decays(self, name: str) -> bool:
        """Weight decay draws a layer back to its pretrained weights."""
        return True

    def attach(self, model: SlotModel, parts: Sequence[FullLinears]) -> None:
        """Adds D_c x to the output of every targeted layer."""
        for name in self.shapes(model.backbone.info):
            linear = model.backbone.model.get_submodule(name.removesuffix(".delta"))
            model.on_close(linear.register_forward_hook(_hook(model, model.loaded[name].stored)).remove)


def _hook(model: SlotModel, stored: Tensor) -> Callable[..., Tensor]:
    def hook(_: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        current = model.backbone.runtime.current
        assert current is not None
        rows = args[0].reshape(-1, args[0].shape[-1])
        return output + slot_rows(rows, stored.to(rows.dtype), current.rows_per_slot).view_as(output)

    return hook
