"""Adapter targets: the layers of a model that a plan's targets name.

A target is the leaf name of linear layers (`q_proj`), a group of them (`model/linears.py`: `attention`; `mixer`, the
other token mixers of hybrid models; `mlp`, dense MLPs and shared experts), `router`, or `experts` (every projection of
every expert). Routers and experts of a family without a description are no target's, under no name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

from fedguild.core.errors import ConfigError, ModelError
from fedguild.model.info import Group, LinearInfo, ModelInfo, MoeInfo

MOE_TARGETS = ("router", "experts")


def targeted_linears(model: ModelInfo, targets: tuple[str, ...]) -> tuple[LinearInfo, ...]:
    """Returns the linear layers that the targets name.

    Raises:
        ConfigError: a target names no layer of this model.
        ModelError: a target needs routers or experts, and the model's family has no description; or no target names
            anything, because the model has no linear layers.
    """
    if targets and not (model.linears or model.moe):
        raise ModelError(
            f"{model.name} ({model.family}) has no linear layers that LoRA could adapt: projections of GPT-2's "
            "kind are transformers' Conv1D.",
            "Choose another model, or a method with soft prompts: fedprompt or fedptuning.",
        )
    if model.undescribed and (wanted := [target for target in MOE_TARGETS if target in targets]):
        model.require_experts(f"LoRA on {' and '.join(wanted)}")
    chosen, used = [], set()
    for linear in model.linears:
        hits = {linear.group, leaf(linear.name)} & set(targets)
        if hits:
            chosen.append(linear)
            used |= hits
    unknown = [target for target in targets if target not in used and target not in MOE_TARGETS]
    missing = unknown or sorted(set(MOE_TARGETS) & set(targets) if not model.moe else ())
    if missing:
        known = sorted({leaf(linear.name) for linear in model.linears})
        groups = sorted({linear.group for linear in model.linears})
        raise ConfigError(
            f"LoRA target(s) {', '.join(missing)} name no layer of {model.name} ({model.family}).",
            f"Known: {', '.join([*groups, *(MOE_TARGETS if model.moe else ()), *known])}.",
        )
    return tuple(chosen)


def targeted_shapes(model: ModelInfo, targets: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    """Returns module -> shape of every weight that the targets name: [out, in], of experts [M, out, in].

    Raises:
        ConfigError: a target names no layer of this model.
    """
    shapes: dict[str, tuple[int, ...]] = {
        linear.name: (linear.outputs, linear.inputs) for linear in targeted_linears(model, targets)
    }
    for moe in model.moe:
        shapes.update(_moe_shapes(moe, targets))
    return shapes


def fitting_targets(model: ModelInfo, defaults: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those of a method's default targets that this model has.

    For a dense model, or one of a family without a description, `router` and `experts` are left out. If its linear
    layers have other names than the default targets, all of attention is used instead, and of a model without attention
    all other token mixers.
    """
    known = {name for linear in model.linears for name in (linear.group, leaf(linear.name))}
    linear = tuple(target for target in defaults if target not in MOE_TARGETS)
    moe = tuple(target for target in defaults if target in MOE_TARGETS and model.moe)
    if known.issuperset(linear) and len(linear + moe) == len(defaults):
        return defaults
    mixing = "attention" if any(each.group == "attention" for each in model.linears) else "mixer"
    return (linear if linear and known.issuperset(linear) else (mixing,)) + moe


@dataclass(frozen=True)
class Named:
    """What a target names in a model.

    Attributes:
        target: A group of linear layers, `router` or `experts`.
        weights: Number of weights: a matrix of each linear layer, of every projection of all experts of a layer.
        leaves: The leaf names of its weights, each of which is a target by itself if they are linear layers.
        parameters: The parameters of its weights.
    """

    target: str
    weights: int
    leaves: tuple[str, ...]
    parameters: int


def named_targets(model: ModelInfo) -> list[Named]:
    """Returns every target that names something in a model, in the order attention, mixer, mlp, router, experts."""
    found: dict[str, dict[str, int]] = {target: {} for target in (*get_args(Group), *MOE_TARGETS)}
    for linear in model.linears:
        found[linear.group][linear.name] = linear.inputs * linear.outputs
    for moe in model.moe:
        for target in MOE_TARGETS:
            found[target].update({name: math.prod(shape) for name, shape in _moe_shapes(moe, (target,)).items()})
    return [
        Named(target, len(sizes), tuple(dict.fromkeys(map(leaf, sizes))), sum(sizes.values()))
        for target, sizes in found.items()
        if sizes
    ]


def leaf(name: str) -> str:
    """Returns the last part of a name: `lora_A` of `model.layers.0.self_attn.q_proj.lora_A`."""
    return name.rsplit(".", 1)[-1]


def layer_of(name: str) -> str:
    """Returns the path of the experts that a tensor belongs to: `….experts` of `….experts.up_proj.lora_A`."""
    return name.rsplit(".", 2)[0]


def _moe_shapes(moe: MoeInfo, targets: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if "router" in targets:
        shapes[moe.router] = (moe.num_experts, moe.hidden)
    if "experts" in targets:
        for projection in moe.projections:
            inner = (moe.hidden, moe.width) if projection == "down_proj" else (moe.width, moe.hidden)
            shapes[f"{moe.experts}.{projection}"] = (moe.num_experts, *inner)
    return shapes
