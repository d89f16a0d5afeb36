"""How a deployment changes the weights of its backbone, as pure functions over names and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes
from fedguild.server.method import Deployment


def adapted_weights(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[str, ...]]:
    """Returns the name of every weight that LoRA adapts with the modules that it consists of."""
    return _weights_with("lora_A", model, trainable_shapes(model, replace(plan, parts=())))


def changed_weights(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[str, ...]]:
    """Returns the name of every weight W that becomes W + D with the modules that it consists of.

    D is `{module}.delta`, of the module's own shape: experts and routers trained in full.
    """
    return _weights_with("delta", model, trainable_shapes(model, plan))


def beyond_weights(plan: AdapterPlan) -> list[str]:
    """Returns the parts of a plan that the backbone's weights cannot hold, by name: they act beside them."""
    return [type(part).__name__ for part in plan.parts if not isinstance(part, FullExperts | FullRouter)]


def _weights_with(leaf: str, model: ModelInfo, trainables: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns the name of every weight whose modules have a trainable `{module}.{leaf}`, with its modules.

    Several modules share a weight where transformers fuses them: the rows of an expert's gate
    lie above those of its up projection in `gate_up_proj` [M, 2I, H].
    """
    names = set(trainables)
    weights: dict[str, tuple[str, ...]] = {f"{linear.name}.weight": (linear.name,) for linear in model.linears}
    for moe in model.moe:
        weights[f"{moe.router}.weight"] = (moe.router,)
        *inner, down = (f"{moe.experts}.{projection}" for projection in moe.projections)
        weights[f"{moe.experts}.gate_up_proj" if len(inner) > 1 else inner[0]] = tuple(inner)
        weights[down] = (down,)
    return {weight: modules for weight, modules in weights.items() if f"{modules[0]}.{leaf}" in names}


def stacked_factors(tensors: Mapping[str, Tensor], modules: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns the LoRA of n modules with a common input, one output above the other, as one.

    Args:
        tensors: Name -> `{module}.lora_A` [.., r, in] and `{module}.lora_B` [.., out, r].
        modules: The n modules, in the order of their outputs.

    Returns:
        A [.., n·r, in], stacked, and B [.., n·out, n·r], block-diagonal.
    """
    downs = [tensors[f"{module}.lora_A"] for module in modules]
    ups = [tensors[f"{module}.lora_B"] for module in modules]
    rank, outputs = downs[0].shape[-2], ups[0].shape[-2]
    up = ups[0].new_zeros(*ups[0].shape[:-2], len(ups) * outputs, len(ups) * rank)
    for index, block in enumerate(ups):
        up[..., index * outputs : (index + 1) * outputs, index * rank : (index + 1) * rank] = block
    return torch.cat(downs, dim=-2), up


def output_scales(model: ModelInfo, deployment: Deployment) -> dict[str, float]:
    """Returns the path of every mixture-of-experts layer with the factor s on its routed output."""
    plan, tensors = deployment.plan, deployment.tensors
    scales = {}
    for moe in model.moe:
        if plan.output_scale == "none":
            scales[moe.name] = 1.0
        elif plan.output_scale == "fixed":
            scales[moe.name] = plan.output_scale_start
        else:
            name = "output_scale" if plan.output_scale == "shared" else f"{moe.name}.output_scale"
            scales[moe.name] = float(tensors[name])
    return scales
