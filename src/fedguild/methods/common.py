"""What several methods say in the same words: pure functions over plans, payloads and state."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.errors import ConfigError
from fedguild.model.adapters.lora import initial_value
from fedguild.model.plan import AdapterPlan, ModelInfo, trainable_shapes

ADAPTER = "adapter"
"""The payload part that holds the trainables that are aggregated."""


def initial_adapter(model: ModelInfo, plan: AdapterPlan, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns the start of every trainable of a plan: LoRA's A random, B zero, so that BA = 0."""
    own = {name: part for part in plan.parts for name in part.shapes(model)}
    return {
        name: own[name].initial(name, shape, rng)
        if name in own
        else initial_value(name, shape, plan.output_scale_start, rng)
        for name, shape in trainable_shapes(model, plan).items()
    }


def in_part(part: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns `shapes` under `part/…`, as an upload names them."""
    return {f"{part}/{name}": shape for name, shape in shapes.items()}


def require_within_top_k(model: ModelInfo, budget: Budget) -> int:
    """Returns the budget's active experts.

    Raises:
        ConfigError: the model runs fewer.
    """
    if not 1 <= budget.active_experts <= model.top_k:
        raise ConfigError(
            f"Budget '{budget.name}' has active_experts {budget.active_experts}, but {model.name} runs "
            f"{model.top_k} of {model.moe[0].num_experts} experts per token.",
            f"Set federation.budgets[].active_experts from 1 to {model.top_k}.",
        )
    return budget.active_experts
