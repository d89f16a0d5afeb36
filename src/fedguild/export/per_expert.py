"""An adapter with a key for every expert, as inference servers load it, in place of peft's fused form.

Names are those of the model's hub repository, so an expert's factors are `experts.{e}.gate_proj.lora_A.weight` [r, in]
and `.lora_B.weight` [out, r], or `w1`, `w2`, `w3` where the repository has these. One rank and one alpha hold for all.

Sources of the rules, read in November 2026:
- vLLM, `vllm/lora/utils.py` (`parse_fine_tuned_lora_name`): a key is `base_model.model.{module}.lora_A.weight`;
  `vllm/lora/lora_model.py` (`from_local_checkpoint`): a module's name from `experts` on is one of the names of the
  model's `get_expert_mapping`; `vllm/lora/lora_weights.py` (`pack_moe`): every expert has all three projections;
  `vllm/lora/peft_helper.py`: the scale is `lora_alpha / r` for all modules, `rank_pattern` and `alpha_pattern` are not
  read, `modules_to_save` must be empty. Its issues 41384 and 52198 say what becomes of the fused form.
- SGLang, pull request 27381: keys of the fused form match no expert, and their weights are dropped without a word;
  per-expert keys are what its loader resolves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion

from fedguild.core.errors import ModelError
from fedguild.core.files import write_json
from fedguild.export.adapter import CONFIG_FILE, PREFIX, WEIGHTS_FILE, found, require_carried
from fedguild.export.weights import adapted_weights, in_one_adapter, published_modules
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.server.method import Deployment


def write_per_expert(
    folder: Path, backbone: Backbone, deployment: Deployment, *, base: str, revision: str | None = None
) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` into a folder.

    Args:
        folder: Where to write; it must exist.
        base: The base model: a hub id, or the name of a folder.
        revision: The base model's branch, tag or commit on the hub.

    Raises:
        ModelError: an adapter alone cannot carry the deployment, or a weight has another form on the hub.
    """
    require_carried(backbone.info, deployment)
    deployment = in_one_adapter(deployment)
    tensors = per_expert_tensors(backbone, deployment)
    write_json(folder / CONFIG_FILE, per_expert_config(backbone, deployment, tensors, base=base, revision=revision))
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def per_expert_tensors(backbone: Backbone, deployment: Deployment) -> dict[str, Tensor]:
    """Returns the content of `adapter_model.safetensors`, fp32: A [r, in] and B [out, r] of every linear layer.

    Raises:
        ModelError: a weight has another form on the hub.
    """
    tensors: dict[str, Tensor] = {}
    for weight, modules in adapted_weights(backbone.info, deployment.plan).items():
        stacked = deployment.tensors[f"{modules[0]}.lora_A"]
        names = published_names(backbone, weight, len(modules), len(stacked) if stacked.dim() == 3 else 0)
        for part, module in enumerate(modules):
            down, up = (deployment.tensors[f"{module}.{leaf}"] for leaf in ("lora_A", "lora_B"))
            each = zip(down, up, strict=True) if down.dim() == 3 else [(down, up)]
            for expert, (own_down, own_up) in enumerate(each):
                where = names[expert][part]
                tensors[f"{PREFIX}{where}.lora_A.weight"] = own_down.float().cpu().contiguous()
                tensors[f"{PREFIX}{where}.lora_B.weight"] = own_up.float().cpu().contiguous()
    return tensors


def factors_from_experts(backbone: Backbone, plan: AdapterPlan, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns an adapter's factors by FedGuild's names from the content of its file.

    Raises:
        ModelError: a tensor is missing.
    """
    factors: dict[str, Tensor] = {}
    shapes = adapter_shapes(backbone.info, plan)
    for weight, modules in adapted_weights(backbone.info, plan).items():
        shape = shapes[f"{modules[0]}.lora_A"]
        names = published_names(backbone, weight, len(modules), shape[0] if len(shape) == 3 else 0)
        for part, module in enumerate(modules):
            for leaf in ("lora_A", "lora_B"):
                each = [found(tensors, f"{PREFIX}{where[part]}.{leaf}.weight") for where in names]
                factors[f"{module}.{leaf}"] = torch.stack(each) if len(shape) == 3 else each[0]
    return factors


def per_expert_config(
    backbone: Backbone,
    deployment: Deployment,
    tensors: dict[str, Tensor],
    *,
    base: str,
    revision: str | None = None,
) -> dict[str, Any]:
    """Returns the content of `adapter_config.json`: one rank and one alpha, and no pattern."""
    lora = deployment.plan.lora
    return {
        "peft_type": "LORA",
        "task_type": "SEQ_2_SEQ_LM" if backbone.info.seq2seq else "CAUSAL_LM",
        "base_model_name_or_path": base,
        "revision": revision,
        "inference_mode": True,
        "r": lora.rank,
        "lora_alpha": lora.scale * lora.rank,
        "target_modules": sorted({name.split(".")[-3] for name in tensors}),
        "lora_dropout": 0.0,
        "bias": "none",
    }


def published_names(backbone: Backbone, weight: str, parts: int, experts: int) -> list[list[str]]:
    """Returns the linear layers on the hub that a weight consists of, [expert][part]; one expert if not stacked.

    The names come from transformers' own conversion of the weights, applied to a tensor whose entries encode their
    place.

    Args:
        parts: Number of modules whose outputs are stacked in it.
        experts: M, or 0 for a weight of two dimensions.

    Raises:
        ModelError: the conversion does more than rename and split.
    """
    if modules := published_modules(backbone.info, weight):
        return [[module] for module in modules]
    places = torch.arange(max(1, experts) * parts, dtype=torch.float32)
    coded = places.view(experts, parts, 1) if experts else places.view(parts, 1)
    converted: dict[str, Tensor] = revert_weight_conversion(backbone.model, {weight: coded})
    names = {int(value.flatten()[0]): name for name, value in converted.items() if value.numel() == 1}
    if sorted(names) != list(range(max(1, experts) * parts)):
        raise ModelError(
            f"{weight} is not stored as linear layers, one for each expert, in the model's repository.",
            "Export with --format peft or merged.",
        )
    flat = [names[place].removesuffix(".weight") for place in range(len(names))]
    return [flat[start : start + parts] for start in range(0, len(flat), parts)]
