"""The gradient of a loss with respect to adapted weights, from a plain model whose weights take gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedguild.data.batches import Encoded
from fedguild.model.info import ModelInfo


def weight_gradients(
    model: Any, info: ModelInfo, rows: Sequence[Encoded], active: int | None, modules: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Returns module -> gradient of the mean loss over the rows' response tokens.

    Args:
        model: A plain transformers model with fused experts.
        info: What it looks like.
        rows: The rows, run one at a time.
        active: Active experts per token; None for the model's own.
        modules: The modules that are wanted.
    """
    routers = [model.get_submodule(moe.router) for moe in info.moe]
    native = [router.top_k for router in routers]
    for router in routers:
        router.top_k = active or router.top_k
    own = {name: weight.detach().clone().requires_grad_() for name, weight in model.named_parameters()}
    losses = []
    for row in rows:
        inputs = {"input_ids": torch.tensor([list(row.input_ids)]), "use_cache": False}
        log_p = torch.func.functional_call(model, own, (), inputs).logits[0].log_softmax(dim=-1)
        losses += [-log_p[at - 1, row.input_ids[at]] for at in range(row.prompt_length, len(row.input_ids))]
    torch.stack(losses).mean().backward()
    for router, top_k in zip(routers, native, strict=True):
        router.top_k = top_k
    return {module: _of(own, module) for module in modules}


def _of(weights: Mapping[str, Tensor], module: str) -> Tensor:
    """Returns the gradient of a module; gate and up projection lie one above the other in one weight."""
    block, _, leaf = module.rpartition(".")
    if leaf in ("gate_proj", "up_proj") and f"{block}.gate_up_proj" in weights:
        gradient = weights[f"{block}.gate_up_proj"].grad
        assert gradient is not None
        return gradient.chunk(2, dim=1)[leaf == "up_proj"]
    found = weights[module if module in weights else f"{module}.weight"].grad
    assert found is not None
    return found
