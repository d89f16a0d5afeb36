"""Changes of a backbone's weights by a deployment, as pure functions over names and tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.families import FAMILIES
from fedguild.model.folding import CHANGE
from fedguild.model.info import ModelInfo, MoeInfo
from fedguild.model.moe.layout import canonical, published
from fedguild.model.plan import AdapterPlan, adapter_shapes
from fedguild.model.weight_changes import Factors, changes, weight_modules
from fedguild.server.aggregation import pad_rank
from fedguild.server.low_rank import DOWN, UP
from fedguild.server.method import Deployment


def adapted_weights(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[str, ...]]:
    """Returns weight -> the modules that it consists of, for every weight with LoRA."""
    lora = plan.part(Lora)
    return _weights_with("lora_A", model, lora.shapes(model) if lora else ())


def changed_weights(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[str, ...]]:
    """Returns weight -> the modules that it consists of, for every weight W that becomes W + D.

    D is `{module}.delta`, of the module's own shape: linear layers, experts and routers trained in full.
    """
    return _weights_with("delta", model, adapter_shapes(model, plan))


def published_modules(model: ModelInfo, weight: str) -> list[str]:
    """Returns the linear layers of transformers that a weight was stacked from, expert by expert; else none."""
    for moe in model.moe:
        if weight.startswith(f"{moe.experts}."):
            return FAMILIES.load(model.family).published(weight, moe.num_experts)
    return []


def published_weight(model: ModelInfo, weight: str, value: Tensor) -> Tensor:
    """Returns a weight as transformers' own model has it: experts in their published layout."""
    moe, leaf = _experts_with(model, weight)
    return value if moe is None else published(value, leaf, moe.layout)


def published_factors(model: ModelInfo, weight: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns A [M, r, in] and B [M, out, r] of stacked experts as peft takes them for transformers' own weight.

    Peft takes a weight for [M, out, in], unless the module says that it is transposed.
    """
    moe, leaf = _experts_with(model, weight)
    if moe is None:
        return down, up
    up = published(up, leaf, replace(moe.layout, transposed=False))
    return (up.mT, down.mT) if moe.layout.transposed and not moe.layout.declared else (down, up)


def own_factors(model: ModelInfo, weight: str, down: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Returns A [M, r, in] and B [M, out, r] of stacked experts from peft's; the inverse of `published_factors`."""
    moe, leaf = _experts_with(model, weight)
    if moe is None:
        return down, up
    if moe.layout.transposed and not moe.layout.declared:
        down, up = up.mT, down.mT
    return down, canonical(up, leaf, replace(moe.layout, transposed=False))


def _experts_with(model: ModelInfo, weight: str) -> tuple[MoeInfo | None, str]:
    """Returns the layer whose experts have a weight of three dimensions, and the weight's own name."""
    path, _, leaf = weight.rpartition(".")
    found = next((moe for moe in model.moe if moe.experts == path), None)
    return (None, leaf) if leaf.endswith("_bias") else (found, leaf)


def beyond_weights(plan: AdapterPlan) -> list[str]:
    """Returns the names of a plan's parts that the backbone's weights cannot hold."""
    return [type(part).__name__ for part in plan.parts if not part.folds_into_weights]


def folded(deployment: Deployment) -> Deployment:
    """Returns a deployment whose product B R A is stored as two factors: B and R A, computed in fp32.

    Returned unchanged if there is no factor in the middle.
    """
    plan, tensors = deployment.plan, dict(deployment.tensors)
    for name in [name for name in tensors if name.endswith(".lora_R")]:
        module = name.removesuffix(".lora_R")
        tensors[f"{module}.{DOWN}"] = tensors.pop(name).float() @ tensors[f"{module}.{DOWN}"].float()
    return replace(
        deployment, plan=plan.with_lora(middle=False, frozen=()) if plan.part(Lora) else plan, tensors=tensors
    )


def _weights_with(leaf: str, model: ModelInfo, adapter: Iterable[str]) -> dict[str, tuple[str, ...]]:
    """Returns weight -> its modules, for every weight whose modules have a `{module}.{leaf}` in the adapter."""
    names = set(adapter)
    return {weight: modules for weight, modules in weight_modules(model).items() if f"{modules[0]}.{leaf}" in names}


def is_dense(deployment: Deployment) -> bool:
    """Whether some of the merged changes no longer exist as factors."""
    return any(name.endswith(f".{CHANGE}") for name in deployment.merged)


def summed_rank(deployment: Deployment) -> int:
    """Returns the rank of an adapter that also holds what is merged beneath it; dense changes have none."""
    changed = _pairs(deployment).values()
    return deployment.plan.lora.rank + max((sum(down.shape[-2] for down, _ in pairs) for pairs in changed), default=0)


def _pairs(deployment: Deployment) -> dict[str, list[Factors]]:
    found = changes(deployment.merged).items()
    return {module: [each for each in each_change if not isinstance(each, Tensor)] for module, each_change in found}


def merged_beyond(deployment: Deployment) -> list[str]:
    """Returns the modules with merged changes that are not part of the adapter."""
    adapted = {name.removesuffix(f".{DOWN}") for name in deployment.tensors if name.endswith(f".{DOWN}")}
    return sorted(changes(deployment.merged).keys() - adapted)


def in_one_adapter(deployment: Deployment) -> Deployment:
    """Returns a deployment without merged changes, whose adapter holds them: of the summed rank, with scale 1.

    A factor in the adapter's middle is folded first. The ranks of the adapter, its scale in B, come before those of the
    changes; a module with fewer ranks than another is padded with zeros. The model is the same, up to rounding, unless
    `merged_beyond` names modules.
    """
    deployment = folded(deployment)
    if not deployment.merged:
        return deployment
    plan, changed, rank = deployment.plan, _pairs(deployment), summed_rank(deployment)
    tensors = dict(deployment.tensors)
    for module in (name.removesuffix(f".{DOWN}") for name in deployment.tensors if name.endswith(f".{DOWN}")):
        down, up = (tensors[f"{module}.{leaf}"].float() for leaf in (DOWN, UP))
        pairs = [(down, plan.lora.scale * up), *changed.get(module, ())]
        joined = {
            f"{module}.{DOWN}": torch.cat([down.to(up) for down, _ in pairs], dim=-2),
            f"{module}.{UP}": torch.cat([other.to(up) for _, other in pairs], dim=-1),
        }
        tensors |= pad_rank(joined, rank)
    return Deployment(plan.with_lora(rank=rank, scale=1.0), tensors)


def stacked_factors(tensors: Mapping[str, Tensor], modules: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Returns the LoRA of n modules with a common input, their outputs stacked, as one.

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


def parted_factors(modules: Sequence[str], down: Tensor, up: Tensor) -> dict[str, Tensor]:
    """Returns the LoRA of n modules whose outputs are stacked; the inverse of `stacked_factors`."""
    rank, outputs = down.shape[-2] // len(modules), up.shape[-2] // len(modules)
    tensors = {}
    for index, module in enumerate(modules):
        ranks = slice(index * rank, (index + 1) * rank)
        tensors[f"{module}.{DOWN}"] = down[..., ranks, :].contiguous()
        tensors[f"{module}.{UP}"] = up[..., index * outputs : (index + 1) * outputs, ranks].contiguous()
    return tensors


def output_scales(model: ModelInfo, deployment: Deployment) -> dict[str, float]:
    """Returns the path of every mixture-of-experts layer with the factor s on its routed output."""
    part = deployment.plan.part(OutputScale)
    if part is None:
        return {moe.name: 1.0 for moe in model.moe}
    if part.kind == "fixed":
        return {moe.name: part.start for moe in model.moe}
    return {moe.name: float(deployment.tensors[part.name_in(moe)]) for moe in model.moe}
