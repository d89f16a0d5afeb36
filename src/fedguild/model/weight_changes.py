"""Low-rank changes of a backbone's own weights, W = W_0 + sum_v B_v A_v, for the duration of a `with` block.

Some methods add their result to the frozen weights in every round instead of keeping it in an adapter (FLoRA, FLoRIST,
FedEx-LoRA). The sum over all rounds is computed in fp32 and always starts from the original W_0, so a bf16 backbone is
rounded once, not once per round. The added factors are never trained and cost nothing in a forward pass.

This module also maps each weight of a backbone to the modules that it consists of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from fedguild.core.errors import ModelError
from fedguild.model.folding import CHANGE
from fedguild.model.info import ModelInfo
from fedguild.model.sharding import own_part

Factors = tuple[Tensor, Tensor]
"""A [.., R, in] and B [.., out, R] of the change B A."""
Change = Factors | Tensor
"""Factors, or the dense change [.., out, in] of many versions."""


def weight_modules(model: ModelInfo) -> dict[str, tuple[str, ...]]:
    """Returns weight name -> the modules that it consists of, for every weight that an adapter may change.

    Several modules share a weight if transformers fuses them: in `gate_up_proj` [M, 2I, H] the rows of an expert's gate
    come before those of its up projection.
    """
    weights: dict[str, tuple[str, ...]] = {f"{linear.name}.weight": (linear.name,) for linear in model.linears}
    for moe in model.moe:
        weights[f"{moe.router}.weight"] = (moe.router,)
        *inner, down = (f"{moe.experts}.{projection}" for projection in moe.projections)
        weights[f"{moe.experts}.gate_up_proj" if len(inner) > 1 else inner[0]] = tuple(inner)
        weights[down] = (down,)
    return weights


def require_unquantised(model: nn.Module, name: str, hint: str) -> None:
    """Raises ModelError with the hint if a model's weights are in 4 bit, since nothing can be added to them."""
    if getattr(model, "hf_quantizer", None) is not None:
        raise ModelError(f"{name} was loaded in 4 bit, and changes cannot be merged into 4-bit weights.", hint)


def changes(merges: Mapping[str, Tensor]) -> dict[str, list[Change]]:
    """Returns module -> its changes, oldest first.

    Args:
        merges: `{version}/{module}.lora_A` [.., R, in] and `{version}/{module}.lora_B` [.., out, R], or
            `{version}/{module}.change` [.., out, in] of all versions up to that one (`folding`).

    Raises:
        ModelError: a name has another form, or one of two factors is missing.
    """
    by_module: dict[str, dict[int, dict[str, Tensor]]] = {}
    for name, tensor in merges.items():
        version, _, rest = name.partition("/")
        module, _, leaf = rest.rpartition(".")
        if not version.isdecimal() or leaf not in ("lora_A", "lora_B", CHANGE):
            raise ModelError(
                f"'{name}' is not a factor that can be merged.", "Names are VERSION/MODULE.lora_A or lora_B."
            )
        by_module.setdefault(module, {}).setdefault(int(version), {})[leaf] = tensor
    lone = [
        f"{number}/{module}"
        for module, pairs in by_module.items()
        for number, pair in pairs.items()
        if CHANGE not in pair and len(pair) < 2
    ]
    if lone:
        raise ModelError(f"The change {lone[0]} has only one of its two factors, lora_A and lora_B.")
    return {
        module: [
            pair[CHANGE] if CHANGE in pair else (pair["lora_A"], pair["lora_B"]) for _, pair in sorted(pairs.items())
        ]
        for module, pairs in by_module.items()
    }


def with_changes(weight: Tensor, modules: Sequence[str], found: Mapping[str, Sequence[Change]]) -> Tensor:
    """Returns W + D + sum_v B_v A_v as a new tensor, in fp32 or in the weight's dtype if that is wider.

    Args:
        weight: W [.., n·out, in] of n modules with concatenated outputs.
        found: Module -> its changes, as `changes` returns them; a module may have none.

    Raises:
        ModelError: a change does not fit its module.
    """
    wide = weight.detach().to(torch.promote_types(weight.dtype, torch.float32), copy=True)
    for part, module in zip(wide.chunk(len(modules), dim=-2), modules, strict=True):
        for change in found.get(module, ()):
            if isinstance(change, Tensor):
                if change.shape != part.shape:
                    raise ModelError(
                        f"A change {list(change.shape)} does not fit {module} {list(part.shape)}.",
                        "It is of another model.",
                    )
                part += change.to(wide)
                continue
            down, up = change
            if (*up.shape[:-1], down.shape[-1]) != part.shape or (*down.shape[:-2], up.shape[-1]) != down.shape[:-1]:
                raise ModelError(
                    f"A change B {list(up.shape)}, A {list(down.shape)} does not fit {module} {list(part.shape)}.",
                    "The factors are of another model.",
                )
            part += up.to(wide) @ down.to(wide)
    return wide


@contextmanager
def merged(model: nn.Module, info: ModelInfo, merges: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
    """Adds changes to a model's weights and restores the weights bit for bit, however the block ends.

    Yields weight name -> its original, or this process's part of it, of every weight that is changed.

    The original weights are kept in host memory meanwhile. Weights without a change, and weights tied to them, are not
    touched.

    Args:
        merges: The changes, as in `changes`; if empty, nothing is done.

    Raises:
        ModelError: the weights are in 4 bit, or a change fits no weight.
    """
    if not merges:
        yield {}
        return
    require_unquantised(model, info.name, "Set model.load_in_4bit=false: the method adds its rounds to the weights.")
    found = changes(merges)
    places = {weight: parts for weight, parts in weight_modules(info).items() if not found.keys().isdisjoint(parts)}
    unknown = sorted(found.keys() - {module for parts in places.values() for module in parts})
    if unknown:
        raise ModelError(
            f"{info.name} has no {unknown[0]} to merge a change into.", "The factors are of another model."
        )
    originals: dict[str, Tensor] = {}
    try:
        for name, modules in places.items():
            weight, rows = own_part(model.get_parameter(name).detach())
            changed = with_changes(
                weight, modules, {module: _of_rows(found.get(module, ()), rows) for module in modules}
            )
            originals[name] = weight.to("cpu", copy=True)
            weight.copy_(changed)
        yield originals
    finally:
        for name, original in originals.items():
            own_part(model.get_parameter(name).detach())[0].copy_(original)


@contextmanager
def exchanged(model: nn.Module, weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Sets some weights for the duration of a block; names and tensors as `merged` yields them."""
    places = {name: own_part(model.get_parameter(name).detach())[0] for name in weights}
    before = {name: place.to("cpu", copy=True) for name, place in places.items()}
    try:
        for name, place in places.items():
            place.copy_(weights[name])
        yield
    finally:
        for name, place in places.items():
            place.copy_(before[name])


def _of_rows(found: Sequence[Change], rows: slice) -> list[Change]:
    """Returns the changes of a part of a weight's first axis: some experts, or some outputs."""
    if rows == slice(None):
        return list(found)
    return [
        change[rows]
        if isinstance(change, Tensor)
        else (change[0][rows] if change[0].dim() > 2 else change[0], change[1][rows])
        for change in found
    ]
