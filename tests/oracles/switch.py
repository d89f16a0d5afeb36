"""A client's adapter on SwitchTransformers merged into a plain transformers model, expert by expert."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.plan import AdapterPlan


def merged_switch(model: Any, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns name -> weight of every weight that the adapter changes, differentiable in the adapter.

    `wi` is the experts' up projection and `wo` their down projection; an output scale multiplies `wo`.
    """
    merged: dict[str, Tensor] = {}
    for name, weight in model.named_parameters():
        module = name.removesuffix(".weight")
        before, expert, leaf = module.rpartition(".experts.expert_")
        if expert:
            index, _, linear = leaf.partition(".")
            projection = f"{before}.experts.{'up_proj' if linear == 'wi' else 'down_proj'}"
            change = _change(projection, plan, adapter, int(index))
            scale = _output_scale(before, plan, adapter) if linear == "wo" else 1.0
            merged[name] = scale * (weight + change)
        elif f"{module}.lora_A" in adapter:
            merged[name] = weight + _change(module, plan, adapter)
    return merged


class MergedSwitch:
    """A client's own plain transformers model, run on one text at a time.

    Args:
        model: The plain model.
        plan: The client's plan.
        adapter: The client's trainables; losses are differentiable in them.
    """

    def __init__(self, model: Any, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> None:
        self.model = model
        self.weights = merged_switch(model, plan, adapter)

    def logits(self, source: Sequence[int], target: Sequence[int]) -> Tensor:
        """Returns [U, V], the logits after each of the decoder's input tokens."""
        inputs = {"input_ids": torch.tensor([[*source]]), "decoder_input_ids": torch.tensor([[*target]])}
        return torch.func.functional_call(self.model, self.weights, (), {**inputs, "use_cache": False}).logits[0]

    def losses(self, source: Sequence[int], response: Sequence[int], start: int) -> Tensor:
        """Returns the negative log-likelihood of every token of the response."""
        log_p = self.logits(source, [start, *response[:-1]]).log_softmax(dim=-1)
        return torch.stack([-log_p[at, token] for at, token in enumerate(response)])

    @torch.no_grad()
    def greedy(self, source: Sequence[int], length: int, start: int, end: int) -> list[int]:
        """Returns the greedy response, each token from a whole forward pass; cut before `end`."""
        ids = [start]
        for _ in range(length):
            token = int(self.logits(source, ids)[-1].argmax())
            if token == end:
                break
            ids.append(token)
        return ids[1:]


def _change(module: str, plan: AdapterPlan, adapter: Mapping[str, Tensor], expert: int | None = None) -> Tensor | float:
    if f"{module}.lora_A" not in adapter:
        return 0.0
    down, up = adapter[f"{module}.lora_A"], adapter[f"{module}.lora_B"]
    return plan.lora.scale * (up @ down if expert is None else up[expert] @ down[expert])


def _output_scale(block: str, plan: AdapterPlan, adapter: Mapping[str, Tensor]) -> Tensor | float:
    return adapter[f"{block}.output_scale"] if plan.part(OutputScale) else 1.0
