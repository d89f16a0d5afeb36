"""Linear layers trained in full: every targeted weight W gets a change D of its shape, zero at the start.

The layer computes (W + D_c) x for the rows of client c. What is trained, sent and averaged is D; its
gradient is the one that W would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from fedguild.model.adapters.lora import in_place
from fedguild.model.adapters.part import AdapterHost, AdapterPart, OutputHook
from fedguild.model.info import ModelInfo
from fedguild.model.moe.casts import Casts
from fedguild.model.runtime import Pass
from fedguild.model.slot_products import add_slot_rows_in_place, slot_rows
from fedguild.model.targets import targeted_linears


@dataclass(frozen=True)
class FullLinears(AdapterPart):
    """Trains `{linear}.delta` [out, in] of the targeted linear layers.

    Attributes:
        targets: Leaf names of linear layers, or the groups `attention` and `mlp`.
    """

    folds_into_weights = True

    targets: tuple[str, ...]

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `{linear}.delta` -> (out, in).

        Raises:
            ConfigError: a target names no linear layer of this model.
        """
        linears = targeted_linears(model, self.targets)
        return {f"{linear.name}.delta": (linear.outputs, linear.inputs) for linear in linears}

    def attach(self, host: AdapterHost, parts: Sequence[FullLinears]) -> None:
        """Adds D_c x to the output of every targeted layer."""
        for name in self.shapes(host.backbone.info):
            linear = host.backbone.model.get_submodule(name.removesuffix(".delta"))
            host.change_output(linear, _hook(host.running(name)))


def _hook(stored: Tensor) -> OutputHook:
    casts = Casts()

    def hook(current: Pass, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        rows = args[0].reshape(-1, args[0].shape[-1])
        change = casts.with_gradient(stored, rows.dtype)
        if in_place(output, rows):
            return add_slot_rows_in_place(output, rows, change, current.rows_per_slot)
        return output + slot_rows(rows, change, current.rows_per_slot).view_as(output)

    return hook
