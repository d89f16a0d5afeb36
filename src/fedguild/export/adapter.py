"""A deployment as a PEFT adapter folder, which plain peft and transformers load.

LoRA on linear layers goes into `target_modules`. What transformers holds as bare parameters
(routers, and experts fused into `gate_up_proj` and `down_proj`) goes into `target_parameters`.
An expert's gate and up projection each have their own A and B here but are one parameter there,
so they become one adapter of twice the rank, B block-diagonal, with twice the alpha to keep the
scale. Source: peft 0.21, `tuners/lora/layer.py`, `ParamWrapper.get_delta_factors`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.core.files import write_json
from fedguild.export.weights import (
    adapted_weights,
    beyond_weights,
    changed_weights,
    in_one_adapter,
    is_dense,
    merged_beyond,
    output_scales,
    own_factors,
    parted_factors,
    published_factors,
    published_modules,
    stacked_factors,
    summed_rank,
)
from fedguild.model.adapters.lora import Lora
from fedguild.model.families import FAMILIES
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.model.targets import leaf
from fedguild.server.method import Deployment

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
_WITHOUT_OUT_PROJ = {"falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h"}
"""peft 0.21's `_check_lora_target_modules_mamba`: kernels for training read this layer's weight past its adapter."""


def obstacle(model: ModelInfo, deployment: Deployment) -> str:
    """Returns why an adapter alone cannot carry this deployment; empty if it can."""
    beyond, changed = beyond_weights(deployment.plan), changed_weights(model, deployment.plan)
    adapted = adapted_weights(model, deployment.plan)
    if beyond:
        return f"it trains more than LoRA, namely {', '.join(beyond)}"
    if changed:
        return f"{len(changed)} of its weights are trained in full, for example {next(iter(changed))}"
    if deployment.plan.part(Lora) is None:
        return "it trains no LoRA"
    if apart := merged_beyond(deployment):
        return f"its run merged changes beside the adapter's modules, for example into {apart[0]}"
    if is_dense(deployment):
        return "its run folded its many changes into whole weights"
    rank = summed_rank(deployment)
    if deployment.merged and rank > model.hidden:
        return f"what its run merged makes it an adapter of rank {rank}, beyond the model's width of {model.hidden}"
    active = deployment.plan.active_experts or model.top_k
    if active != model.top_k:
        return f"it runs {active} of the model's {model.top_k} active experts"
    scales = [scale for scale in output_scales(model, deployment).values() if scale != 1.0]
    if scales:
        return f"it scales the output of the experts, by {min(scales):.3g} to {max(scales):.3g}"
    if model.family in _WITHOUT_OUT_PROJ and any(weight.endswith(".out_proj.weight") for weight in adapted):
        return f"peft refuses the targets out_proj of '{model.family}' models"
    return ""


def require_carried(model: ModelInfo, deployment: Deployment) -> None:
    missing = obstacle(model, deployment)
    if missing:
        raise ModelError(
            f"An adapter alone cannot carry the model: {missing}.", "Export the merged form (--format merged)."
        )


def write_adapter(
    folder: Path, model: ModelInfo, deployment: Deployment, *, base: str, revision: str | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` into a folder.

    What a run merged into the backbone becomes part of the adapter, which gets the summed rank.

    Args:
        folder: Where to write; it must exist.
        base: The base model: a hub id, or the name of a folder.
        revision: The base model's branch, tag or commit on the hub.

    Raises:
        ModelError: an adapter alone cannot carry the deployment.
    """
    require_carried(model, deployment)
    deployment = in_one_adapter(deployment)
    write_json(folder / CONFIG_FILE, peft_config(model, deployment.plan, base=base, revision=revision))
    save_file(peft_tensors(model, deployment), folder / WEIGHTS_FILE, metadata={"format": "pt"})


def peft_config(model: ModelInfo, plan: AdapterPlan, *, base: str, revision: str | None = None) -> dict[str, Any]:
    weights = adapted_weights(model, plan)
    linears = [name for name in weights if not _is_parameter(model, name)]
    adapted = {module for name in linears for module in _modules(model, name)}
    others = {_in_layer(linear.name) for linear in model.linears if linear.name not in adapted}
    modules = [module if _in_layer(module) in others else _in_layer(module) for module in adapted]
    parameters = [_in_layer(name) for name in weights if _is_parameter(model, name)]
    alpha = plan.lora.scale * plan.lora.rank
    fused = {leaf(name): len(parts) for name, parts in weights.items() if len(parts) > 1}
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if model.seq2seq else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": plan.lora.rank,
        "lora_alpha": alpha,
        "rank_pattern": {leaf: parts * plan.lora.rank for leaf, parts in fused.items()},
        "alpha_pattern": {leaf: parts * alpha for leaf, parts in fused.items()},
        "target_modules": sorted(set(modules)),
        "target_parameters": sorted(set(parameters)) or None,
        "lora_dropout": 0.0,
        "bias": "none",
    }


def peft_tensors(model: ModelInfo, deployment: Deployment) -> dict[str, Tensor]:
    """Returns the content of `adapter_model.safetensors`, fp32.

    Experts' factors are two-dimensional in peft: A [M·R, in] with the expert slowest, B [out, R·M] with the expert
    fastest.
    """
    tensors: dict[str, Tensor] = {}
    for weight, modules in adapted_weights(model, deployment.plan).items():
        down, up = stacked_factors(deployment.tensors, modules)
        if _is_parameter(model, weight):
            if down.dim() == 3:
                down, up = published_factors(model, weight, down, up)
                down, up = down.flatten(0, 1), up.permute(1, 2, 0).flatten(1)
            places = [(_wrapper(weight), down, up)]
        else:
            each = (factor.unbind() if factor.dim() == 3 else (factor,) for factor in (down, up))
            places = list(zip(_modules(model, weight), *each, strict=True))
        for where, own_down, own_up in places:
            tensors[f"{PREFIX}{where}.lora_A.weight"] = own_down.float().cpu().contiguous()
            tensors[f"{PREFIX}{where}.lora_B.weight"] = own_up.float().cpu().contiguous()
    return tensors


def factors_from_peft(model: ModelInfo, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter's factors by FedGuild's names from the content of its file; the inverse of `peft_tensors`.

    Raises:
        ModelError: a tensor is missing.
    """

    def pair(where: str) -> tuple[Tensor, Tensor]:
        return found(tensors, f"{PREFIX}{where}.lora_A.weight"), found(tensors, f"{PREFIX}{where}.lora_B.weight")

    factors: dict[str, Tensor] = {}
    shapes = adapter_shapes(model, plan)
    for weight, modules in adapted_weights(model, plan).items():
        experts = shapes[f"{modules[0]}.lora_A"][0] if len(shapes[f"{modules[0]}.lora_A"]) == 3 else 0
        if not _is_parameter(model, weight):
            pairs = [pair(module) for module in _modules(model, weight)]
            down, up = (torch.stack(each) if experts else each[0] for each in zip(*pairs, strict=True))
        else:
            down, up = pair(_wrapper(weight))
            if experts:
                down, up = down.unflatten(0, (experts, -1)), up.unflatten(1, (-1, experts)).permute(2, 0, 1)
                down, up = own_factors(model, weight, down, up)
        factors |= parted_factors(modules, down, up)
    return factors


def found(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """Returns a tensor of an adapter's file; raises ModelError if it is missing."""
    if name not in tensors:
        raise ModelError(f"{WEIGHTS_FILE} lacks '{name}'.", "Export the model again.")
    return tensors[name]


def _modules(model: ModelInfo, weight: str) -> list[str]:
    """Returns the linear layers of a weight in transformers: one, or one for each expert."""
    return published_modules(model, weight) or [weight.removesuffix(".weight")]


def _is_parameter(model: ModelInfo, weight: str) -> bool:
    """Whether peft must reach a weight through `target_parameters`.

    Routers and experts are not linear layers in transformers, unless their family says so. The other MLPs (shared
    experts, dense layers) are, but peft takes the names of their projections for the experts'
    (`utils/transformers_weight_conversion.py`, `_MOE_TARGET_MODULE_MAPPING`).
    """
    mixing = {f"{linear.name}.weight" for linear in model.linears if linear.group != "mlp"}
    experts = bool(model.undescribed) or (bool(model.moe) and not FAMILIES.load(model.family).linear)
    return experts and weight not in mixing


def _wrapper(weight: str) -> str:
    """Returns the path of peft's wrapper around a weight.

    The wrappers of a module's parameters are nested in the order of the parameters, so that of the experts' input
    projections lies inside that of `down_proj`.
    """
    module, leaf = weight.rsplit(".", 1)
    return f"{module}.base_layer" if leaf in ("gate_up_proj", "up_proj") else module


def _in_layer(weight: str) -> str:
    """Returns a weight's name within its layer, by which peft finds it in every layer."""
    return re.sub(r"^.*?\.\d+\.", "", weight)
