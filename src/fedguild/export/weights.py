"""How a deployment changes the weights of its backbone, as pure functions over names and tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedguild.model.plan import EXPERT_PROJECTIONS, AdapterPlan, ModelInfo, targeted_linears
from fedguild.server.method import Deployment


def adapted_weights(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[str, ...]]:
    """Returns the name of every adapted weight with the modules whose LoRA applies to it.

    Several modules share a weight where transformers fuses them: the rows of an expert's gate
    lie above those of its up projection in `gate_up_proj` [M, 2I, H].
    """
    weights: dict[str, tuple[str, ...]] = {
        f"{linear.name}.weight": (linear.name,) for linear in targeted_linears(model, plan)
    }
    for moe in model.moe:
        if "router" in plan.targets:
            weights[f"{moe.router}.weight"] = (moe.router,)
        if "experts" in plan.targets:
            gate, up, down = (f"{moe.experts}.{projection}" for projection in EXPERT_PROJECTIONS)
            weights[f"{moe.experts}.gate_up_proj"] = (gate, up)
            weights[f"{moe.experts}.down_proj"] = (down,)
    return weights


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
