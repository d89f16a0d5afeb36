"""A deployment merged into its backbone: a complete Hugging Face checkpoint that does not need FedGuild.

Every adapted weight becomes s (W + C + scale · BA + D), computed in fp32 and cast to the backbone's dtype. C are the
low-rank changes that the run merged into the backbone, D is the change of what is trained in full (experts, routers),
and s, the output scale of the layer, applies to the experts' down projection only. The weights are merged, converted to
the names of the model's hub repository and written one after the other; the backbone itself does not change.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers.core_model_loading import revert_weight_conversion
from transformers.dynamic_module_utils import custom_object_save
from transformers.utils import GENERATION_CONFIG_NAME

from fedguild.core.errors import DataError, ModelError
from fedguild.core.files import write_json
from fedguild.data.rendering import ends_of
from fedguild.export.weights import (
    adapted_weights,
    beyond_weights,
    changed_weights,
    folded,
    output_scales,
    published_modules,
    published_weight,
    stacked_factors,
)
from fedguild.model.backbone import Backbone
from fedguild.model.families import FAMILIES
from fedguild.model.weight_changes import changes, require_unquantised, weight_modules, with_changes
from fedguild.server.method import Deployment

SHARD_BYTES = 5_000_000_000


def write_merged(
    folder: Path,
    backbone: Backbone,
    deployment: Deployment,
    *,
    shard_bytes: int = SHARD_BYTES,
    further: Mapping[str, Tensor] | None = None,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Writes weights, config and tokenizer into a folder.

    Args:
        folder: Where to write; it must exist.
        backbone: The model to merge into; not changed.
        deployment: The adapter, and the active experts for the config.
        shard_bytes: Size at which a new file of weights is started.
        further: Additional tensors to write, by name.
        settings: Additional entries of the config.

    Raises:
        ModelError: the backbone's weights are quantised, or cannot hold what is trained.
    """
    require_mergeable(backbone)
    beyond = beyond_weights(deployment.plan)
    if beyond:
        raise ModelError(
            f"A merged checkpoint cannot hold {', '.join(beyond)}, which acts beside the backbone's weights.",
            "Score the model with `fedguild evaluate`, which needs no export.",
        )
    model = backbone.model
    _write_config(folder, backbone, deployment.plan.active_experts, settings or {})
    if model.can_generate():
        _write_generation_config(folder, model, backbone.tokenizer)
    if backbone.tokenizer is not None:
        backbone.tokenizer.save_pretrained(folder)
    weights = (
        pair for name, weight in merged_weights(backbone, deployment) for pair in _published(backbone, name, weight)
    )
    _write_shards(folder, chain(weights, (further or {}).items()), shard_bytes)


def _write_generation_config(folder: Path, model: Any, tokenizer: Any) -> None:
    """Writes the model's generation config, which also stops at the tokens that end an answer in training."""
    given = model.generation_config
    given.save_pretrained(folder)
    known = {*(given.eos_token_id if isinstance(given.eos_token_id, list) else [given.eos_token_id])} - {None}
    end = getattr(tokenizer, "eos_token_id", None)
    ends = set[int]() if end is None else {end}
    if getattr(tokenizer, "chat_template", None):
        with suppress(DataError):  # one that cannot be trained with
            ends |= ends_of(tokenizer)
    if not ends <= known:  # into the file, as transformers validates a changed config anew
        file = folder / GENERATION_CONFIG_NAME
        write_json(file, json.loads(file.read_text("utf-8")) | {"eos_token_id": sorted(known | ends)})


def has_own_code(backbone: Backbone) -> bool:
    """Whether a model's code, its config's or its tokenizer's comes with the model instead of from transformers."""
    return any(map(is_own, (backbone.model, backbone.model.config, backbone.tokenizer)))


def is_own(loaded: Any) -> bool:
    """Whether the class of a model, config or tokenizer comes from a model's folder or repository."""
    return bool(getattr(type(loaded), "_auto_class", None))


def require_mergeable(backbone: Backbone) -> None:
    require_unquantised(
        backbone.model,
        backbone.info.name,
        "Export the adapter alone, or run the config again with model.load_in_4bit=false and merge that.",
    )


def merged_weights(backbone: Backbone, deployment: Deployment) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of the backbone by its name, merged, in the backbone's dtype and on its device."""
    info, deployment = backbone.info, folded(deployment)
    adapted, changed = adapted_weights(info, deployment.plan), changed_weights(info, deployment.plan)
    modules, merges = weight_modules(info), changes(deployment.merged)
    scales = output_scales(info, deployment)
    factors = {
        f"{moe.experts}.{name}": scales[moe.name] for moe in info.moe for name in ("down_proj", "down_proj_bias")
    }
    for name, weight in backbone.model.state_dict().items():
        if name not in backbone.model.all_tied_weights_keys:
            is_changed = not merges.keys().isdisjoint(modules.get(name, ()))
            before = with_changes(weight, modules[name], merges) if is_changed else weight
            lora, full = adapted.get(name, ()), changed.get(name, ())
            yield name, _merged(before, lora, full, factors.get(name, 1.0), deployment).to(weight.dtype)


def _merged(
    weight: Tensor, adapted: Sequence[str], changed: Sequence[str], factor: float, deployment: Deployment
) -> Tensor:
    """Returns factor · (W + scale · BA + D) in the weight's dtype; the weight itself if it does not change.

    Args:
        weight: W, or W + C in fp32, [.., n·out, in], of n modules with a common input, their outputs stacked.
        adapted: The modules, if they have LoRA; else empty.
        changed: The modules, if they are trained in full; else empty.
        factor: The layer's output scale, or 1.
    """
    if not adapted and not changed and factor == 1.0:
        return weight
    wide = weight.to(torch.promote_types(weight.dtype, torch.float32))
    if adapted:
        down, up = (part.to(wide) for part in stacked_factors(deployment.tensors, adapted))
        wide = wide + deployment.plan.lora.scale * (up @ down)
    if changed:
        wide = wide + torch.cat([deployment.tensors[f"{module}.delta"] for module in changed], dim=-2).to(wide)
    return (wide * factor).to(weight.dtype)


def _published(backbone: Backbone, name: str, weight: Tensor) -> Iterable[tuple[str, Tensor]]:
    if modules := published_modules(backbone.info, name):
        return ((f"{module}.weight", part) for module, part in zip(modules, weight.unbind(), strict=True))
    weight = published_weight(backbone.info, name, weight)
    converted: dict[str, Tensor] = revert_weight_conversion(backbone.model, {name: weight})
    return converted.items()


def _write_config(folder: Path, backbone: Backbone, active_experts: int | None, settings: Mapping[str, Any]) -> None:
    config = copy.deepcopy(backbone.model.config)
    config.architectures = [type(backbone.model).__name__]
    config.dtype = str(backbone.dtype).removeprefix("torch.")
    info = backbone.info
    if active_experts not in (None, info.top_k):
        key = FAMILIES.load(info.family).active
        if not hasattr(config.get_text_config(), key):
            raise ModelError(
                f"No config makes '{info.family}' models run {active_experts} of their {info.top_k} active experts.",
                "Export a budget with all of them.",
            )
        setattr(config.get_text_config(), key, active_experts)
    if is_own(backbone.model):
        custom_object_save(backbone.model, folder, config=config)
    for name, value in settings.items():
        setattr(config, name, value)
    config.save_pretrained(folder)


def _write_shards(folder: Path, weights: Iterator[tuple[str, Tensor]], shard_bytes: int) -> None:
    """Writes weights to `model.safetensors`, or to several numbered shards with an index."""
    shards: list[list[str]] = []
    shard: dict[str, Tensor] = {}
    held_bytes = total_bytes = 0

    def close_shard() -> None:
        save_file(shard, folder / f"{len(shards)}.part", metadata={"format": "pt"})
        shards.append(list(shard))
        shard.clear()

    for name, weight in weights:
        if shard and held_bytes + weight.nbytes > shard_bytes:
            close_shard()
            held_bytes = 0
        shard[name] = weight.detach().cpu().contiguous()
        held_bytes += weight.nbytes
        total_bytes += weight.nbytes
    close_shard()
    if len(shards) == 1:
        (folder / "0.part").rename(folder / "model.safetensors")
        return
    places = {}
    for index, names in enumerate(shards):
        file = f"model-{index + 1:05d}-of-{len(shards):05d}.safetensors"
        (folder / f"{index}.part").rename(folder / file)
        places.update(dict.fromkeys(names, file))
    index_content = {"metadata": {"total_size": total_bytes}, "weight_map": places}
    write_json(folder / "model.safetensors.index.json", index_content)
