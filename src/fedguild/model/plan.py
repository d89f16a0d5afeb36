"""What a client trains, and what a model looks like, as plain facts without weights.

Every name and shape of a trainable follows from (`ModelInfo`, `AdapterPlan`) by
`trainable_shapes`: the adapters build from it, the server validates uploads against it, and
the profile counts with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from fedguild.data.batches import Seq2Seq
from fedguild.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from fedguild.model.slots import SlotModel

OutputScaleKind = Literal["none", "per_layer", "shared", "fixed"]
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LinearInfo:
    """A linear layer: its module path, its group (`attention` or `mlp`) and its two widths."""

    name: str
    group: Literal["attention", "mlp"]
    inputs: int
    outputs: int


@dataclass(frozen=True)
class MoeInfo:
    """A mixture-of-experts layer.

    Attributes:
        name: Module path of the block; `router` and `experts` are the paths of its two parts.
        num_experts: M, experts that a router chooses from.
        top_k: Active experts per token in the model as published.
        hidden: Width of the layer's input and output.
        width: Inner width of one expert.
        projections: An expert's matrices: those of its input, then the one of its output.
    """

    name: str
    router: str
    experts: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    projections: tuple[str, ...] = EXPERT_PROJECTIONS


@dataclass(frozen=True)
class ModelInfo:
    """What a backbone looks like: enough to plan, to validate and to count.

    Attributes:
        name: Hub id or path, as in the config.
        family: The architecture's `model_type` in transformers, for example `olmoe`.
        hidden: Hidden size.
        layers: Number of layers, those of an encoder and of a decoder together.
        vocabulary: Rows of the output embedding.
        parameters: All parameters of the backbone.
        linears: Every linear layer that an adapter may target, in module order.
        moe: Every mixture-of-experts layer, in module order; empty for a dense model.
        seq2seq: How an encoder-decoder model takes a text; None for a causal model.
    """

    name: str
    family: str
    hidden: int
    layers: int
    vocabulary: int
    parameters: int
    linears: tuple[LinearInfo, ...]
    moe: tuple[MoeInfo, ...] = ()
    seq2seq: Seq2Seq | None = None

    @property
    def top_k(self) -> int:
        """Active experts per token in the model as published; 0 for a dense model."""
        return self.moe[0].top_k if self.moe else 0

    def require_experts(self, who: str) -> None:
        """Raises ModelError where the model is dense but `who` needs experts."""
        if not self.moe:
            raise ModelError(
                f"{who} needs a mixture-of-experts model, but {self.name} ({self.family}) has no experts.",
                "Choose an MoE model (OLMoE, Mixtral, Qwen2-MoE, Qwen3-MoE, DeepSeek-V2, SwitchTransformers) or a "
                "method for dense models, for example fedit.",
            )


class AdapterPart(Protocol):
    """A kind of trainable beyond LoRA and the output scale, for example a mixture of LoRA experts.

    A part is a frozen dataclass in `model/adapters/`. Parts of one cohort's slots are of the same
    types in the same order; their numbers may differ where the part says so.
    """

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of what the part trains, without the slot axis.

        Raises:
            ConfigError: the part does not fit the model.
        """
        ...

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns the start of one of its trainables."""
        ...

    def slot_axis(self, name: str) -> int:
        """Returns the position of the slot axis in a trainable's storage."""
        ...

    def decays(self, name: str) -> bool:
        """Whether weight decay applies to a trainable."""
        ...

    def attach(self, model: SlotModel, parts: Sequence[Any]) -> None:
        """Hooks the trainables into the backbone; undone by what it gives to `model.on_close`.

        Args:
            model: The slots, their storage allocated (`model.trainables[name].stored`).
            parts: Each slot's own part, in slot order; `self` is the first.
        """
        ...


@dataclass(frozen=True)
class AdapterPlan:
    """What one client trains and how it runs, decided by a method from the client's budget.

    Attributes:
        rank: LoRA rank r.
        scale: Factor on the low-rank product, alpha / r in LoRA's notation.
        targets: Leaf names of linear layers (`q_proj`), the groups `attention` and `mlp` (dense
            MLPs and shared experts), `router`, and `experts` (gate, up and down of every expert).
        active_experts: Active experts per token, k_i; None keeps the model's own.
        output_scale: Factor s_i on each MoE layer's routed output: trained per layer, trained and
            shared by all layers, held at `output_scale_start`, or absent.
        output_scale_start: Where s_i starts (or stays).
        dropout: Dropout rate on the input of the low-rank product, in training.
        parts: What is trained beyond LoRA and the output scale.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]
    active_experts: int | None = None
    output_scale: OutputScaleKind = "none"
    output_scale_start: float = 1.0
    dropout: float = 0.0
    parts: tuple[AdapterPart, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"A LoRA rank must be at least 1, but is {self.rank}.")
        if self.active_experts is not None and self.active_experts < 1:
            raise ConfigError(f"active_experts must be at least 1, but is {self.active_experts}.")

    @property
    def cohort_key(self) -> tuple[Any, ...]:
        """What the plans of one cohort have in common."""
        return (self.targets, self.output_scale, tuple(type(part) for part in self.parts))


def targeted_linears(model: ModelInfo, plan: AdapterPlan) -> tuple[LinearInfo, ...]:
    """Returns the linear layers that the plan's targets name.

    Raises:
        ConfigError: a target names no layer of this model.
    """
    chosen, used = [], set()
    for linear in model.linears:
        hits = {linear.group, linear.name.rsplit(".", 1)[-1]} & set(plan.targets)
        if hits:
            chosen.append(linear)
            used |= hits
    unknown = [t for t in plan.targets if t not in used and t not in ("router", "experts")]
    if unknown or (not model.moe and {"router", "experts"} & set(plan.targets)):
        missing = unknown or sorted({"router", "experts"} & set(plan.targets))
        known = sorted({linear.name.rsplit(".", 1)[-1] for linear in model.linears})
        extra = ["router", "experts"] if model.moe else []
        raise ConfigError(
            f"LoRA target(s) {', '.join(missing)} name no layer of {model.name} ({model.family}).",
            f"Known: {', '.join(['attention', 'mlp', *extra, *known])}.",
        )
    return tuple(chosen)


def trainable_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of everything that the plan trains, without the slot axis.

    LoRA: `{module}.lora_A` [r, in] and `{module}.lora_B` [out, r]. Experts:
    `{experts}.{gate,up,down}_proj.lora_A` [M, r, in] and `.lora_B` [M, out, r]. Output scale:
    `{block}.output_scale` [] per layer, or `output_scale` [] where it is shared. Parts: as their `shapes` say.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for linear in targeted_linears(model, plan):
        shapes[f"{linear.name}.lora_A"] = (plan.rank, linear.inputs)
        shapes[f"{linear.name}.lora_B"] = (linear.outputs, plan.rank)
    for moe in model.moe:
        if "router" in plan.targets:
            shapes[f"{moe.router}.lora_A"] = (plan.rank, moe.hidden)
            shapes[f"{moe.router}.lora_B"] = (moe.num_experts, plan.rank)
        if "experts" in plan.targets:
            for projection in moe.projections:
                inputs, outputs = (moe.width, moe.hidden) if projection == "down_proj" else (moe.hidden, moe.width)
                shapes[f"{moe.experts}.{projection}.lora_A"] = (moe.num_experts, plan.rank, inputs)
                shapes[f"{moe.experts}.{projection}.lora_B"] = (moe.num_experts, outputs, plan.rank)
        if plan.output_scale == "per_layer":
            shapes[f"{moe.name}.output_scale"] = ()
    if plan.output_scale == "shared" and model.moe:
        shapes["output_scale"] = ()
    for part in plan.parts:
        shapes.update(part.shapes(model))
    return shapes
