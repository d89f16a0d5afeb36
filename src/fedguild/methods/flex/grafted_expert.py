"""The grafted expert of every MoE layer and slot: a frozen expert with LoRA, which a gate of its own lets in.

FLEx (arXiv 2506.00965). `{block}.graft.source` is the index of the expert in the layer; it is loaded and never trained.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.model.adapters.lora import DOWN, UP, ReadyFactors, in_place, kaiming_uniform, through_factors
from fedguild.model.adapters.part import AdapterHost, AdapterPart, OutputHook
from fedguild.model.adapters.storage import Layout, padded_rank
from fedguild.model.info import ModelInfo
from fedguild.model.moe.casts import Casts
from fedguild.model.moe.experts import FrozenExperts
from fedguild.model.moe.view import MoeLayer
from fedguild.model.runtime import Pass
from fedguild.model.slot_low_rank import add_low_rank
from fedguild.model.slot_products import slot_rows
from fedguild.model.targets import leaf

Combine = Literal["add", "mix"]
ONE_BY_ONE = ("cpu",)
"""Types of device on which the choices of an expert are measured one after the other; elsewhere several at once."""
ELEMENTS = 1 << 26
"""Largest number of elements of their outputs."""


@dataclass(frozen=True)
class GraftedExpert(AdapterPart):
    """Trains `{block}.graft.{gate,up,down}_proj.lora_A` and `.lora_B`, and `{block}.graft.gate.weight` and `.bias`.

    Attributes:
        rank: r of the grafted expert's LoRA.
        scale: Factor on its low-rank products.
        start: The gate's value at the start, in (0, 1), for every input.
        combine: F + g E_c, or (1 - g) F + g E_c.
    """

    rank: int
    scale: float
    start: float
    combine: Combine = "add"

    @property
    def cohort_key(self) -> object:
        """All values; slots differ in nothing but their tensors."""
        return self

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the names above -> A [r, in], B [out, r], weight [1, H], bias [1], and source [].

        Raises:
            ModelError: the model is dense, or its experts have biases or weighted inputs.
        """
        model.require_experts("A grafted expert")
        if any(moe.biased or moe.weighs_input for moe in model.moe):
            raise ModelError(
                f"A grafted expert has no biases and a plain input, but the experts of {model.name} ({model.family}) "
                "have biases or an input that is weighted by the router.",
                "Choose another family, for example OLMoE, Mixtral or Qwen3-MoE.",
            )
        shapes: dict[str, tuple[int, ...]] = {}
        for moe in model.moe:
            for projection in moe.projections:
                last = projection == moe.projections[-1]
                inputs, outputs = (moe.width, moe.hidden) if last else (moe.hidden, moe.width)
                shapes[f"{moe.name}.graft.{projection}.{DOWN}"] = (self.rank, inputs)
                shapes[f"{moe.name}.graft.{projection}.{UP}"] = (outputs, self.rank)
            shapes[f"{moe.name}.graft.gate.weight"] = (1, moe.hidden)
            shapes[f"{moe.name}.graft.gate.bias"] = (1,)
            shapes[source_name(moe.name)] = ()
        return shapes

    def trains(self, name: str) -> bool:
        """Whether a tensor is not the index of the expert."""
        return leaf(name) != "source"

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns random values for A, the logit of `start` for the gate's bias, and zeros for the rest."""
        if leaf(name) == DOWN:
            return kaiming_uniform(shape, rng)
        return torch.full(shape, math.log(self.start / (1 - self.start)) if leaf(name) == "bias" else 0.0)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns the slots first; ranks are padded as LoRA's, and the gate's bias does not decay."""
        sizes = list(shape)
        for kind, axis in ((DOWN, -2), (UP, -1)):
            if leaf(name) == kind:
                sizes[axis] = padded_rank(sizes[axis], dtype)
        return Layout(tuple(sizes), decays=leaf(name) != "bias")

    def frozen_product_parameters(self, model: ModelInfo) -> int:
        """Returns the parameters of one expert in every layer."""
        return sum(moe.expert_parameters for moe in model.moe)

    def attach(self, host: AdapterHost, parts: Sequence[GraftedExpert]) -> None:
        """Hooks the grafts onto the experts' output, and leaves a `Grafts` in `host.attached`."""
        host.attached[GraftedExpert] = Grafts(host, self)


class Grafts:
    """The grafts of all slots.

    Args:
        host: The slots.
        part: Their part.
    """

    def __init__(self, host: AdapterHost, part: GraftedExpert) -> None:
        self._host, self._part = host, part
        self._scale = torch.full((host.slots * host.copies,), part.scale, device=host.device, dtype=host.dtype)
        self._losses: dict[str, Tensor] | None = None
        self._casts = Casts()
        self._chosen: dict[str, tuple[int, Tensor, Tensor]] = {}
        self._ready = {
            f"{layer.info.name}.graft.{projection}": ReadyFactors(
                self._scale, *self._factors(f"{layer.info.name}.graft.{projection}")
            )
            for layer in host.backbone.moe
            for projection in layer.info.projections
        }
        for layer in host.backbone.moe:
            experts = host.backbone.model.get_submodule(layer.info.experts)
            host.change_output(experts, self._hook(layer))

    @contextmanager
    def measuring(self) -> Iterator[Mapping[str, Tensor]]:
        """Runs the passes inside the block without grafts; yields the losses of every choice, complete at its end.

        They are path of each block -> [S, M] fp64, sum_x ||F(x) - E_j(x)||^2 over a slot's real tokens.
        """
        self._losses = {
            layer.info.name: torch.zeros(
                self._host.slots, layer.info.num_experts, dtype=torch.float64, device=self._host.device
            )
            for layer in self._host.backbone.moe
        }
        try:
            yield self._losses
        finally:
            self._losses = None

    def _hook(self, layer: MoeLayer) -> OutputHook:
        named = {
            name: self._host.running(name) for name in self._host.loaded if name.startswith(f"{layer.info.name}.graft.")
        }

        def hook(current: Pass, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden = args[0].reshape(-1, layer.info.hidden)
            if self._losses is not None:
                self._measure(current, self._losses[layer.info.name], layer, hidden, output.reshape(hidden.shape))
                return output
            grafted, gate = self._grafted(current, layer, hidden, named)
            kept = output if self._part.combine == "add" else output * (1 - gate).view(*output.shape[:-1], 1)
            return kept + (gate * grafted).view_as(output)

        return hook

    def _grafted(
        self, current: Pass, layer: MoeLayer, hidden: Tensor, named: Mapping[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Returns E_c(x) [N, H] and the gate [N, 1] of the layer's input [N, H]."""
        prefix, own = f"{layer.info.name}.graft", layer.frozen()
        rows = current.rows_per_slot
        gate_up, down = self._chosen_weights(layer, own, named[f"{prefix}.source"])

        def low_rank(inputs: Tensor, projection: str) -> Tensor:
            return through_factors(inputs, self._ready[f"{prefix}.{projection}"].of(inputs.dtype), rows)

        *inner, last = layer.info.projections
        z = slot_rows(hidden, gate_up, rows)
        h = own.gate(z + torch.cat([low_rank(hidden, projection) for projection in inner], dim=1))
        y = slot_rows(h, down, rows)
        if in_place(y, h):
            y = add_low_rank(y, h, *self._factors(f"{prefix}.{last}"), self._scale, rows, self._casts)
        else:
            y = y + low_rank(h, last)
        slot = current.slot_of_token(len(hidden), hidden.device)
        logit = slot_rows(hidden, self._casts.with_gradient(named[f"{prefix}.gate.weight"], hidden.dtype), rows)
        gate = (logit.to(self._host.dtype) + named[f"{prefix}.gate.bias"][slot]).sigmoid()
        return y, gate.to(y.dtype)

    def _factors(self, module: str) -> tuple[Tensor, Tensor]:
        """Returns the storage of A and B of a projection."""
        return self._host.running(f"{module}.{DOWN}"), self._host.running(f"{module}.{UP}")

    @torch.no_grad()
    def _chosen_weights(self, layer: MoeLayer, own: FrozenExperts, source: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the weights of every slot's expert, [S, p·I, H] and [S, H, I], copied when `source` changes."""
        name, version = layer.info.name, -1 if source.is_inference() else source._version
        kept = self._chosen.get(name)
        if kept is None or kept[0] != version or version < 0:
            index = source.long()
            kept = self._chosen[name] = version, own.gate_up[index], own.down[index]
        return kept[1:]

    @torch.no_grad()
    def _measure(self, current: Pass, losses: Tensor, layer: MoeLayer, hidden: Tensor, output: Tensor) -> None:
        """Adds a layer's losses of a pass to `losses` [S, M]."""
        slot, keep, own = current.slot_of_token(len(hidden), hidden.device), current.keep(len(hidden)), layer.frozen()
        at_once = 1 if hidden.device.type in ONE_BY_ONE else max(1, ELEMENTS // max(1, hidden.numel()))
        for first in range(0, layer.info.num_experts, at_once):
            last = min(first + at_once, layer.info.num_experts)
            outputs = plain_expert(own, first, hidden) if at_once == 1 else plain_experts(own, first, last, hidden)
            squares = (output - outputs).double().square().sum(dim=-1).view(last - first, -1)
            squares = squares if keep is None else squares.masked_fill(~keep, 0.0)
            losses[:, first:last].index_add_(0, slot, squares.T)


def plain_experts(own: FrozenExperts, first: int, last: int, hidden: Tensor) -> Tensor:
    """Returns E_j(x) [E, N, H] of the frozen experts from `first` to below `last` for [N, H]."""
    z = hidden @ own.gate_up[first:last].transpose(1, 2)
    h = own.gate(z.flatten(0, 1)).unflatten(0, (last - first, -1))
    outputs: Tensor = h @ own.down[first:last].transpose(1, 2)
    return outputs


def plain_expert(own: FrozenExperts, expert: int, hidden: Tensor) -> Tensor:
    """Returns E_j(x) [N, H] of a frozen expert for [N, H]."""
    return own.gate(hidden @ own.gate_up[expert].t()) @ own.down[expert].t()


def source_name(block: str) -> str:
    """Returns the name of the index of a block's grafted expert."""
    return f"{block}.graft.source"
