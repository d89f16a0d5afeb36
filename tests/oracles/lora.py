"""A client's adapter merged into a copy of the weights: the plain transformers model that it stands for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.info import ExpertLayout, ModelInfo
from fedguild.model.plan import AdapterPlan


def merged_parameters(
    model: Any, info: ModelInfo, plan: AdapterPlan, adapter: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Returns name -> W + s·BA (or s·BRA) of every weight that the adapter changes, differentiable in the adapter.

    Linear layers and experts trained in full are W + D, as are routers. The output scale is folded into the
    experts' down projection. `model` is a plain transformers model with fused experts.
    """
    own = dict(model.named_parameters())
    merged: dict[str, Tensor] = {}
    for linear in info.linears:
        if f"{linear.name}.lora_A" in adapter:
            merged[f"{linear.name}.weight"] = own[f"{linear.name}.weight"] + _product(linear.name, plan, adapter)
        if f"{linear.name}.delta" in adapter:
            weight = merged.get(f"{linear.name}.weight", own[f"{linear.name}.weight"])
            merged[f"{linear.name}.weight"] = weight + adapter[f"{linear.name}.delta"]
    for moe in info.moe:
        if f"{moe.router}.lora_A" in adapter:
            merged[f"{moe.router}.weight"] = own[f"{moe.router}.weight"] + _product(moe.router, plan, adapter)
        if f"{moe.router}.delta" in adapter:
            router = merged.get(f"{moe.router}.weight", own[f"{moe.router}.weight"])
            merged[f"{moe.router}.weight"] = router + adapter[f"{moe.router}.delta"]
        *inner, last = (f"{moe.experts}.{projection}" for projection in moe.projections)
        first = f"{moe.experts}.gate_up_proj" if len(inner) > 1 else inner[0]
        before, down = own[first], own[last]
        if f"{last}.lora_A" in adapter:
            before = before + _input_change([_product(name, plan, adapter) for name in inner], moe.layout)
            down = down + _as_stored(_product(last, plan, adapter), moe.layout)
        if f"{last}.delta" in adapter:
            before = before + _input_change([adapter[f"{name}.delta"] for name in inner], moe.layout)
            down = down + _as_stored(adapter[f"{last}.delta"], moe.layout)
        scale = _output_scale(moe.name, plan, adapter)
        merged |= {first: before, last: down * scale}
        if moe.biased:
            merged[f"{last}_bias"] = own[f"{last}_bias"] * scale
    return merged


def _input_change(parts: Sequence[Tensor], layout: ExpertLayout) -> Tensor:
    """Returns the change of a layer's input projections, of each [M, F, H], as transformers stores them together."""
    rows = torch.stack(parts, dim=2 if layout.interleaved else 1).flatten(1, 2)
    return _as_stored(rows, layout)


def _as_stored(change: Tensor, layout: ExpertLayout) -> Tensor:
    return change.transpose(1, 2) if layout.transposed else change


class MergedModel:
    """A client's own plain transformers model: adapter merged, its active experts set on the routers."""

    def __init__(self, model: Any, info: ModelInfo, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> None:
        self.model = model
        self.active = plan.active_experts
        self.routers = [_with_top_k(model, moe.router) for moe in info.moe]
        self.weights = merged_parameters(model, info, plan, adapter)

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Returns [T, V], the logits of one row alone, without padding."""
        native = [router.top_k for router in self.routers]
        inputs = {"input_ids": torch.tensor([list(ids)]), "use_cache": False}
        for router in self.routers:
            router.top_k = self.active or router.top_k
        try:
            logits: Tensor = torch.func.functional_call(self.model, self.weights, (), inputs).logits[0]
        finally:
            for router, top_k in zip(self.routers, native, strict=True):
                router.top_k = top_k
        return logits

    def losses(self, ids: Sequence[int], prompt: int) -> Tensor:
        """Returns the negative log-likelihood of every token of `ids[prompt:]`."""
        log_p = self.logits(ids).log_softmax(dim=-1)
        return torch.stack([-log_p[at - 1, ids[at]] for at in range(prompt, len(ids))])

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int, end: int) -> list[int]:
        """Returns the greedy continuation, each token from a whole forward pass; cut before `end`."""
        ids = list(prompt)
        for _ in range(length):
            token = int(self.logits(ids)[-1].argmax())
            if token == end:
                break
            ids.append(token)
        return ids[len(prompt) :]


def _with_top_k(model: Any, path: str) -> Any:
    """Returns the router: the module of this path, or the one above if its linear layer is a module of its own."""
    found = model.get_submodule(path)
    return found if hasattr(found, "top_k") else model.get_submodule(path.rpartition(".")[0])


def _product(module: str, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> Tensor:
    up, down = adapter[f"{module}.lora_B"], adapter[f"{module}.lora_A"]
    return plan.lora.scale * (up @ adapter[f"{module}.lora_R"] @ down if plan.lora.middle else up @ down)


def _output_scale(block: str, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> Tensor | float:
    part = plan.part(OutputScale)
    if part is None:
        return 1.0
    if part.kind == "fixed":
        return part.start
    return adapter["output_scale" if part.kind == "shared" else f"{block}.output_scale"]
