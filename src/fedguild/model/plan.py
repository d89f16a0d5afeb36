"""What a client trains, and what a model looks like, as plain facts without weights.

Every name and shape of an adapter follows from (`ModelInfo`, `AdapterPlan`): `adapter_shapes` is what
a client loads, `trainable_shapes` what it trains of that. The adapters build from the first, the
server validates uploads against the second, and the profile counts with both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

    @property
    def expert_parameters(self) -> int:
        """Parameters of one expert: its gate, where it has one, up and down projection."""
        return len(self.projections) * self.hidden * self.width


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

    def require_active_experts(self, count: int, who: str) -> int:
        """Returns a number of active experts per token that this model can run.

        Args:
            count: The number.
            who: Who asks for it, for the message.

        Raises:
            ModelError: the model is dense.
            ConfigError: the number is not from 1 to the model's own.
        """
        self.require_experts(who)
        if not 1 <= count <= self.top_k:
            raise ConfigError(
                f"{who} has active_experts {count}, but {self.name} runs {self.top_k} of {self.moe[0].num_experts} "
                "experts per token.",
                f"Choose active_experts from 1 to {self.top_k}.",
            )
        return count


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
            model: The slots, their storage allocated (`model.loaded[name].stored`).
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
        middle: Whether an r×r factor R stands between A and B: the product is s · B R A.
        frozen: Leaf names (`lora_A`) of what is loaded but not trained: it has no gradient and no optimizer
            state, and is not part of what a client reads out after training.
    """

    rank: int
    scale: float
    targets: tuple[str, ...]
    active_experts: int | None = None
    output_scale: OutputScaleKind = "none"
    output_scale_start: float = 1.0
    dropout: float = 0.0
    parts: tuple[AdapterPart, ...] = ()
    middle: bool = False
    frozen: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ConfigError(f"A LoRA rank must be at least 1, but is {self.rank}.")
        if self.middle and not {"lora_A", "lora_B"} <= set(self.frozen):
            raise ConfigError("With a factor between A and B, A and B must be frozen.", "frozen: lora_A, lora_B.")
        if self.active_experts is not None and self.active_experts < 1:
            raise ConfigError(f"active_experts must be at least 1, but is {self.active_experts}.")

    @property
    def cohort_key(self) -> tuple[Any, ...]:
        """What the plans of one cohort have in common."""
        return (self.targets, self.output_scale, self.middle, self.frozen, tuple(type(part) for part in self.parts))


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


def leaf(name: str) -> str:
    """Returns the last part of a name: `lora_A` of `model.layers.0.self_attn.q_proj.lora_A`."""
    return name.rsplit(".", 1)[-1]


def trainable_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of everything that the plan trains: `adapter_shapes` without what is frozen."""
    return {name: shape for name, shape in adapter_shapes(model, plan).items() if leaf(name) not in plan.frozen}


def targeted_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns module -> shape of every weight that the targets name: [out, in], of experts [M, out, in].

    Raises:
        ConfigError: a target names no layer of this model.
    """
    shapes = _linear_shapes(model, plan)
    for moe in model.moe:
        shapes.update(_moe_shapes(moe, plan))
    return shapes


def adapter_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of everything that a client of the plan loads, without the slot axis.

    Raises:
        ConfigError: a target names no layer of this model, or what is frozen is not part of the adapter.
    """
    shapes = lora_shapes(model, plan)
    for part in plan.parts:
        shapes.update(part.shapes(model))
    unknown = set(plan.frozen) - {leaf(name) for name in shapes}
    if unknown:
        raise ConfigError(f"The adapter has no {', '.join(sorted(unknown))} that could be frozen.")
    return shapes


def lora_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of what the plan loads without its parts, without the slot axis.

    LoRA: `{module}.lora_A` [r, in] and `{module}.lora_B` [out, r], and `{module}.lora_R` [r, r] where there is a
    factor between them. Experts: `{experts}.{gate,up,down}_proj.lora_A` [M, r, in], `.lora_B` [M, out, r] and
    `.lora_R` [M, r, r]. Output scale: `{block}.output_scale` [] per layer, or `output_scale` [] where it is shared.
    """
    shapes = _factor_shapes(_linear_shapes(model, plan), plan)
    for moe in model.moe:
        shapes.update(_factor_shapes(_moe_shapes(moe, plan), plan))
        if plan.output_scale == "per_layer":
            shapes[f"{moe.name}.output_scale"] = ()
    if plan.output_scale == "shared" and model.moe:
        shapes["output_scale"] = ()
    return shapes


def _linear_shapes(model: ModelInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    return {linear.name: (linear.outputs, linear.inputs) for linear in targeted_linears(model, plan)}


def _moe_shapes(moe: MoeInfo, plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    if "router" in plan.targets:
        shapes[moe.router] = (moe.num_experts, moe.hidden)
    if "experts" in plan.targets:
        for projection in moe.projections:
            inner = (moe.hidden, moe.width) if projection == "down_proj" else (moe.width, moe.hidden)
            shapes[f"{moe.experts}.{projection}"] = (moe.num_experts, *inner)
    return shapes


def _factor_shapes(weights: Mapping[str, tuple[int, ...]], plan: AdapterPlan) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {}
    for module, (*experts, outputs, inputs) in weights.items():
        shapes[f"{module}.lora_A"] = (*experts, plan.rank, inputs)
        shapes[f"{module}.lora_B"] = (*experts, outputs, plan.rank)
        if plan.middle:
            shapes[f"{module}.lora_R"] = (*experts, plan.rank, plan.rank)
    return shapes
