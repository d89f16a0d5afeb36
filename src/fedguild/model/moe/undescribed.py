"""Mixtures of experts whose family has no description: they run as transformers has them, frozen.

Adapters must not reach their routers and experts, whose tokens are not those of the pass row by row, and costs count
them; so only their places and sizes are looked up.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig

from fedguild.model.info import UndescribedMoe

ROUTED = frozenset({"experts", "router", "gate"})
"""Names in a block of what chooses experts, and of the experts."""
_NUMBER = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts")


def undescribed_moe(model: Any) -> tuple[UndescribedMoe, ...]:
    """Returns every mixture of experts of a model, in module order; also works on meta tensors."""
    settings = _settings(model.config.get_text_config())
    number, active = _first(settings, _NUMBER), _first(settings, _ACTIVE)
    return tuple(_described(name, block, number, active) for name, block in _blocks(model, number))


def _blocks(model: nn.Module, number: int | None) -> Iterator[tuple[str, nn.Module]]:
    """Yields the outermost modules with a module `experts`, or with parameters stacked over all experts."""
    last = None
    for name, block in model.named_modules():
        if name and (last is None or not name.startswith(last)):
            stacked = any(number and _is_stacked(child, number) for child in block.children())
            if isinstance(getattr(block, "experts", None), nn.Module) or stacked:
                last = f"{name}."
                yield name, block


def _is_stacked(module: nn.Module, number: int) -> bool:
    """Whether a module holds a matrix for each of `number` experts; a convolution's weight has three dimensions too."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)):
        return False
    return any(weight.dim() == 3 and weight.shape[0] == number for weight in module.parameters(recurse=False))


def _described(name: str, block: nn.Module, number: int | None, active: int | None) -> UndescribedMoe:
    experts, routers, linears = 0, 0, []
    for path, weight in block.named_parameters():
        if _of_experts(block, path, weight, number):
            experts += weight.numel()
        elif ROUTED & set(path.split(".")):
            routers += weight.numel()
    for path, module in block.named_modules():
        if isinstance(module, nn.Linear) and ROUTED & set(path.split(".")):
            linears.append(f"{name}.{path}")
    return UndescribedMoe(name, number, active, experts, routers, tuple(linears))


def _of_experts(block: nn.Module, path: str, weight: Tensor, number: int | None) -> bool:
    *modules, _ = path.split(".")
    if "router" in modules or "gate" in modules:
        return False
    return "experts" in modules or (number is not None and _is_stacked(block.get_submodule(".".join(modules)), number))


def _settings(config: PreTrainedConfig) -> list[Any]:
    """Returns a config and the configs in it, such as DBRX's `ffn_config`."""
    return [config, *(value for value in vars(config).values() if isinstance(value, PreTrainedConfig))]


def _first(settings: list[Any], names: tuple[str, ...]) -> int | None:
    found = (getattr(config, name, None) for config in settings for name in names)
    return next((value for value in found if isinstance(value, int)), None)
