"""Description of a backbone's layers without weights, as plans, validation and cost accounting need it.

`describe_config` and `Backbone.info` give a `ModelInfo`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Seq2Seq

Group = Literal["attention", "mixer", "mlp"]
Routing = Literal["softmax", "sigmoid", "groups", "biased", "sparsemixer"]
_NO_SOFTMAX = {
    "sigmoid": "scores by sigmoid",
    "groups": "limits expert groups",
    "biased": "adds a bias for the choice",
    "sparsemixer": "leaves out experts far from the best",
}
EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LinearInfo:
    """A linear layer: its module path, its group (`model/linears.py`) and its two widths."""

    name: str
    group: Group
    inputs: int
    outputs: int


@dataclass(frozen=True)
class ExpertLayout:
    """How transformers stores an expert's matrices.

    Attributes:
        transposed: Whether they are [in, out], not [out, in].
        interleaved: Whether the rows of gate and up alternate, and do not lie one above the other.
        declared: Whether the module says if they are transposed, as peft expects.
    """

    transposed: bool = False
    interleaved: bool = False
    declared: bool = True


@dataclass(frozen=True)
class MoeInfo:
    """A mixture-of-experts layer.

    Attributes:
        name: Module path of the block; `router` and `experts` are the paths of its two parts.
        num_experts: M, the number of experts that the router chooses from.
        top_k: Active experts per token in the model as published.
        hidden: Width of the layer's input and output.
        width: Inner width of one expert.
        projections: An expert's matrices: its input projections, then its output projection.
        routing: `softmax` over all experts, `sigmoid` of each, `groups` (a softmax of which limited groups of experts
            are chosen), `biased` (a softmax, the experts chosen with a bias), or `sparsemixer`.
        layout: How transformers' own model stores the experts' matrices.
        biased: Whether the experts' projections have biases.
        weighs_input: Whether a routing weight scales an expert's input and not its output; `top_k` is 1 then.
    """

    name: str
    router: str
    experts: str
    num_experts: int
    top_k: int
    hidden: int
    width: int
    projections: tuple[str, ...] = EXPERT_PROJECTIONS
    routing: Routing = "softmax"
    layout: ExpertLayout = ExpertLayout()
    biased: bool = False
    weighs_input: bool = False

    @property
    def expert_parameters(self) -> int:
        return len(self.projections) * self.hidden * self.width


@dataclass(frozen=True)
class UndescribedMoe:
    """A mixture of experts of a family without a description: frozen, and not adaptable.

    Attributes:
        name: Module path of the block.
        num_experts: Experts that the router chooses from, and `top_k`, those that a token uses; None if the config
            names neither in a known way.
        expert_parameters: Parameters of all its experts.
        router_parameters: Parameters of its router.
        linears: Linear layers in its router and experts, which are no adapter's target.
    """

    name: str
    num_experts: int | None
    top_k: int | None
    expert_parameters: int
    router_parameters: int
    linears: tuple[str, ...] = ()

    @property
    def active_parameters(self) -> int:
        """Expert parameters that a token uses; all of them if the config does not say how many experts that are."""
        if self.num_experts is None or self.top_k is None:
            return self.expert_parameters
        return self.expert_parameters * min(self.top_k, self.num_experts) // self.num_experts


@dataclass(frozen=True)
class ModelInfo:
    """The description of a backbone that planning, validation and cost accounting need.

    Attributes:
        name: Hub id or path, as in the config.
        family: The architecture's `model_type` in transformers, for example `olmoe`.
        hidden: Hidden size.
        layers: Number of layers, those of an encoder and of a decoder together.
        vocabulary: Rows of the output embedding.
        parameters: All parameters of the backbone.
        linears: Every linear layer that an adapter may target, in module order.
        moe: Every mixture-of-experts layer, in module order; empty for a dense model.
        seq2seq: The input form of an encoder-decoder model; None for a causal model.
        masked_span: The longest row of which a mask of the attention alone decides what a token depends on; 0 if none,
            None if any.
        undescribed: The mixtures of experts of a family without a description, in place of `moe`; with them
            `described_families`, for messages: those that have one.
        eager_heads: Heads of all layers whose attention computes its scores as whole matrices; 0 if it runs in fused
            kernels. No part of the model's identity: it follows from the attention's implementation.
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
    masked_span: int | None = None
    undescribed: tuple[UndescribedMoe, ...] = ()
    described_families: tuple[str, ...] = ()
    eager_heads: int = field(default=0, compare=False, repr=False)

    @property
    def active_by_config(self) -> set[int]:
        """Active experts per token of a family without a description, where its config names them."""
        return {moe.top_k for moe in self.undescribed if moe.top_k is not None}

    @property
    def top_k(self) -> int:
        """Active experts per token in the model as published; 0 for a dense model."""
        return self.moe[0].top_k if self.moe else 0

    def require_experts(self, who: str) -> None:
        """Raises ModelError if the model is dense, or its family has no description, but `who` needs experts."""
        if self.undescribed:
            raise ModelError(
                f"{who} needs routers and experts, but the family '{self.family}' of {self.name} has no description of "
                "its own: they run frozen, as transformers has them.",
                f"Choose a model of a family with a description ({', '.join(self.described_families)}), or what needs "
                "neither, for example fedit with method.targets=[attention].",
            )
        if not self.moe:
            raise ModelError(
                f"{who} needs a mixture-of-experts model, but {self.name} ({self.family}) has no experts.",
                "Choose a model of a family with experts (`fedguild doctor` lists them), or a method for dense models, "
                "for example fedit.",
            )

    def require_softmax(self, who: str) -> None:
        """Raises ModelError if a router is not a softmax over all experts, or there is none, but `who` needs one."""
        self.require_experts(who)
        other = next((moe.routing for moe in self.moe if moe.routing != "softmax"), None)
        if other is not None:
            raise ModelError(
                f"{who} needs a router that is a softmax over all experts; the router of {self.name} "
                f"({self.family}) {_NO_SOFTMAX[other]}.",
                "Choose a model of another family, for example OLMoE, Mixtral, Qwen3-MoE or gpt-oss.",
            )

    def require_causal(self, who: str) -> None:
        """Raises ModelError if the model is an encoder-decoder model but `who` needs a causal one."""
        if self.seq2seq is not None:
            raise ModelError(
                f"{who} needs a causal model, but {self.name} is an encoder-decoder model.",
                "Choose a causal language model, or a method with LoRA, for example fedit.",
            )

    def require_active_experts(self, count: int, who: str) -> int:
        """Returns a number of active experts per token that this model can run.

        Args:
            who: The name of the caller for the message.

        Raises:
            ModelError: the model is dense, or its family has no description.
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
