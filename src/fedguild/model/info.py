"""Description of a backbone's layers without weights, as plans, validation and cost accounting need it.

`describe_config` and `Backbone.info` give a `ModelInfo`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Seq2Seq

Routing = Literal["softmax", "sigmoid", "groups"]
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
        num_experts: M, the number of experts that the router chooses from.
        top_k: Active experts per token in the model as published.
        hidden: Width of the layer's input and output.
        width: Inner width of one expert.
        projections: An expert's matrices: its input projections, then its output projection.
        routing: `softmax` over all experts, `sigmoid` of each, or `groups`: a softmax of which limited groups of
            experts are chosen.
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

    @property
    def expert_parameters(self) -> int:
        return len(self.projections) * self.hidden * self.width


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
        """Raises ModelError if the model is dense but `who` needs experts."""
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
                f"({self.family}) {'scores by sigmoid' if other == 'sigmoid' else 'limits expert groups'}.",
                "Choose OLMoE, Mixtral, Qwen2-MoE, Qwen3-MoE or a DeepSeek-V2 without groups.",
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
