"""What several methods say in the same words: pure functions over plans, payloads and state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.errors import ConfigError
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import initial_value
from fedguild.model.plan import AdapterPart, AdapterPlan, ModelInfo, adapter_shapes
from fedguild.payload import Payload
from fedguild.seeding import derive, torch_rng
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, State, Upload

ADAPTER = "adapter"
"""The payload part that holds the trainables that are aggregated."""
ROUTING = "routing"
"""The payload part with how often a client activated its experts: for each layer's experts one tensor [M]."""

ADAPTER_SEED = "adapter_seed"
"""The scalar from which clients draw fresh adapters: the run's own in the state, a client's in its download."""


def initial_adapter(model: ModelInfo, plan: AdapterPlan, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns the start of everything that a plan loads: LoRA's A random, B zero, so that BA = 0."""
    own = {name: part for part in plan.parts for name in part.shapes(model)}
    return {
        name: own[name].initial(name, shape, rng)
        if name in own
        else initial_value(name, shape, plan.output_scale_start, rng)
        for name, shape in adapter_shapes(model, plan).items()
    }


def in_part(part: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Returns `shapes` under `part/…`, as an upload names them."""
    return {f"{part}/{name}": shape for name, shape in shapes.items()}


def require_within_top_k(model: ModelInfo, budget: Budget) -> int:
    """Returns the budget's active experts.

    Raises:
        ModelError: the model is dense.
        ConfigError: the model runs fewer.
    """
    return model.require_active_experts(budget.active_experts, f"federation.budgets: '{budget.name}'")


def active_experts_of(model: ModelInfo, budget: Budget) -> int | None:
    """Returns the budget's active experts; None for a dense model.

    Raises:
        ConfigError: the model runs fewer.
    """
    return require_within_top_k(model, budget) if model.moe else None


def without(state: State, *names: str) -> State:
    """Returns a state without some of its tensors."""
    return State({name: value for name, value in state.tensors.items() if name not in names}, state.scalars)


class AveragingSettings(BaseModel):
    """What trains under plain averaging (FedAvg, FedProx): the gate, the experts, LoRA elsewhere."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    gate: Literal["full", "lora", "none"] = Field(
        "full", description="what trains of the gates: their weights, LoRA, or nothing"
    )
    experts: Literal["lora", "full", "none"] = Field(
        "lora", description="what trains of the experts: LoRA, their weights, or nothing"
    )
    rank: int = Field(8, ge=1, description="LoRA rank r")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; the scale is alpha / rank")
    targets: tuple[str, ...] = Field(
        (), description="what else LoRA adapts: leaf names of linear layers, or the groups attention and mlp"
    )
    personal: bool = Field(
        False, description="whether a client's own model is the one that it trained, before the average"
    )


def averaging_plan(model: ModelInfo, settings: AveragingSettings) -> AdapterPlan:
    """Returns what the settings say that trains; every budget trains the same.

    Raises:
        ConfigError: nothing would train, gate or experts are named twice, or the model has neither.
    """
    if taken := {"router", "experts"} & set(settings.targets):
        raise ConfigError(
            f"method.targets: {' and '.join(sorted(taken))} cannot be among the targets.",
            "method.gate and method.experts say what trains of them; `targets` names what else does: [attention].",
        )
    if not model.moe and (settings.gate, settings.experts) != ("none", "none"):
        raise ConfigError(
            f"method.gate and method.experts train what {model.name} ({model.family}) does not have: it is dense.",
            "Set method.gate=none method.experts=none, and method.targets to what LoRA adapts, as in [attention].",
        )
    if (settings.gate, settings.experts, settings.targets) == ("none", "none", ()):
        raise ConfigError(
            "method.gate and method.experts are none and method.targets is empty: nothing would train.",
            "Set method.targets to what LoRA adapts, for example [attention].",
        )
    in_full: list[AdapterPart] = [FullRouter()] if settings.gate == "full" else []
    in_full += [FullExperts()] if settings.experts == "full" else []
    low_rank = {"router": settings.gate, "experts": settings.experts}
    return AdapterPlan(
        rank=settings.rank,
        scale=settings.alpha / settings.rank,
        targets=(*settings.targets, *(target for target, how in low_rank.items() if how == "lora")),
        parts=tuple(in_full),
    )


def mean_by_size(state: State, uploads: Iterable[Upload]) -> State:
    """Returns a state of the uploads' size-weighted mean, sum_c n_c theta_c / sum_c n_c; without uploads the old one.

    Args:
        state: The trainables by name, nothing else.
        uploads: With the trainables in the part `adapter`.
    """
    mean = WeightedMean()
    for upload in uploads:
        mean.add(upload.payload.part(ADAPTER), float(upload.client.examples))
    return State(mean.result(state.tensors))


def kept_or_global(memory: Payload, global_model: Deployment) -> Deployment:
    """Returns the global model with the trainables that a client kept in place of its own, if it kept any."""
    return replace(global_model, tensors=memory.tensors) if memory.tensors else global_model


def activation_frequency(cohort: Cohort, slot: int, unit: str = "token") -> dict[str, Tensor]:
    """Returns how often a client activated each expert in this round's training: experts' path -> [M] fp32.

    Args:
        cohort: The clients, after their training.
        slot: Whose.
        unit: What is counted; see `RoutingStatistics.frequency`.
    """
    assert cohort.routing is not None
    shares = cohort.routing.frequency(unit)[:, slot].float().cpu()
    layers = cohort.model.backbone.info.moe
    return {layer.experts: share[: layer.num_experts] for layer, share in zip(layers, shares, strict=True)}


def require_within_rank(budget: Budget, rank: int) -> int:
    """Returns the budget's rank.

    Raises:
        ConfigError: the global adapter's rank is lower.
    """
    if not 1 <= budget.rank <= rank:
        raise ConfigError(
            f"Budget '{budget.name}' has rank {budget.rank}, but the global adapter has rank {rank}.",
            f"Set federation.budgets[].rank from 1 to {rank}, or raise method.rank.",
        )
    return budget.rank


def collected(uploads: Iterable[Upload]) -> list[Upload]:
    """Returns copies of all uploads, in the order of their clients: for a sum that needs them all at once."""
    held = [replace(upload, payload=_copy(upload.payload)) for upload in uploads]
    return sorted(held, key=lambda upload: (upload.client.index, upload.round))


def size_shares(uploads: Sequence[Upload]) -> list[float]:
    """Returns p_c = n_c / sum n of each upload; nothing where no client has an example."""
    examples = sum(upload.client.examples for upload in uploads)
    return [upload.client.examples / examples for upload in uploads] if examples else []


def scaled_products(
    uploads: Sequence[Upload], scale_of: Callable[[Budget], float]
) -> list[tuple[dict[str, Tensor], float]]:
    """Returns (A_c and B_c, p_c s_c) of each upload, as `weighted_product` takes them.

    Args:
        uploads: With LoRA in the part `adapter`.
        scale_of: The scale s_c on the product B A of a budget's clients.

    Returns:
        A pair for each upload; none where no client has an example.
    """
    shares = size_shares(uploads)
    weighed = zip(uploads, shares, strict=True) if shares else ()
    return [(upload.payload.part(ADAPTER), share * scale_of(upload.client.budget)) for upload, share in weighed]


def zero_adapter(model: ModelInfo, plan: AdapterPlan) -> dict[str, Tensor]:
    """Returns zeros for everything that a plan loads: an adapter that changes nothing."""
    return {name: torch.zeros(shape) for name, shape in adapter_shapes(model, plan).items()}


def new_seed(rng: torch.Generator) -> int:
    """Returns a seed that a run draws once, for what its clients later draw by themselves."""
    return int(torch.randint(2**62, (), generator=rng))


def fresh_seed(seed: int, count: int, client: ClientInfo) -> int:
    """Returns the seed of a client's fresh adapter; `count` tells the rounds apart."""
    return derive(seed, "fresh adapter", count, client.index)


def fresh_adapter(model: ModelInfo, plan: AdapterPlan, seed: int) -> dict[str, Tensor]:
    """Returns the start that a client draws by itself: LoRA's A random, B zero."""
    return initial_adapter(model, plan, torch_rng(seed, "adapter"))


def _copy(payload: Payload) -> Payload:
    return Payload({name: tensor.detach().clone() for name, tensor in payload.tensors.items()}, payload.scalars)
