"""Settings of a client's local training in one round."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedguild.config.base import Section

Objective = Literal["auto", "sft", "dpo"]


class TrainingSettings(Section):
    """The optimizer, its schedule, and how much a client trains per round."""

    objective: Objective = Field(
        default="auto",
        description="Loss of local training; sft: cross-entropy of the responses (of preference pairs, of the chosen "
        "ones); dpo: Direct Preference Optimization of preference pairs, against the backbone without the adapter; "
        "auto: dpo for preference pairs, else sft.",
    )
    dpo_beta: float = Field(
        default=0.1, gt=0, description="beta of dpo: how strongly a model is held to the backbone without the adapter."
    )
    optimizer: Literal["adamw", "adam", "sgd"] = Field(
        default="adamw", description="Optimizer, created afresh each round."
    )
    learning_rate: float = Field(default=1e-3, gt=0, description="Peak learning rate of the first round.")
    betas: tuple[float, float] = Field(
        default=(0.9, 0.999), description="Decay rates of Adam's moments, each in [0, 1)."
    )
    eps: float = Field(default=1e-8, gt=0, description="Added to Adam's denominator.")
    weight_decay: float = Field(
        default=0.0, ge=0, description="Weight decay: decoupled for adamw, added to the gradient for adam and sgd."
    )
    momentum: float = Field(default=0.0, ge=0, lt=1, description="Momentum of sgd.")
    batch_size: int = Field(default=8, ge=1, description="Examples per client in one forward pass.")
    gradient_accumulation_steps: int = Field(
        default=1, ge=1, description="Forward passes whose gradients are accumulated for one optimizer step."
    )
    epochs: float | None = Field(
        default=None,
        gt=0,
        description="Passes of a client over its data per round, may be fractional; 1 by default.",
    )
    steps: int | None = Field(
        default=None, ge=1, description="Optimizer steps per client and round, instead of `epochs`."
    )
    lr_scheduler: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate schedule over the steps of a round; linear and cosine decay to 0.",
    )
    warmup: float = Field(
        default=0.0, ge=0, lt=1, description="Share of a round's steps over which the learning rate warms up."
    )
    round_decay: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Factor by which the learning rate is multiplied from one round to the next.",
    )
    round_schedule: Literal["constant", "linear", "cosine"] = Field(
        default="constant",
        description="Learning rate schedule over the rounds, which multiplies the others; linear and cosine anneal the "
        "rate of the first round to `round_final` of it in the last.",
    )
    round_warmup: int = Field(
        default=0,
        ge=0,
        description="Rounds before the first at the full learning rate: round r of W gets r / (W + 1) of it.",
    )
    round_final: float = Field(
        default=0.1,
        gt=0,
        le=1,
        description="Share of the learning rate that `round_schedule` leaves in the last round.",
    )
    round_horizon: int | None = Field(
        default=None,
        ge=1,
        description="Round in which `round_schedule` reaches `round_final`, where it stays; null: the last, "
        "`federation.rounds`.",
    )
    max_grad_norm: float | None = Field(
        default=1.0,
        gt=0,
        description="Maximum L2 norm of a client's gradient; larger gradients are scaled down. null: no clipping.",
    )

    loss_limit: Literal["auto"] | Annotated[float, Field(gt=0)] | None = Field(
        default="auto",
        description="Training loss of a round's median client, in nats per response token (dpo: per pair), above which "
        "a run stops as diverged; auto: nearly that of guessing every token with equal probability, and 1.5 times the "
        "backbone's own (dpo: twice ln 2, that of the backbone); null: no limit.",
    )

    @model_validator(mode="before")
    @classmethod
    def _one_epoch_by_default(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("epochs") is None and given.get("steps") is None:
            return {**given, "epochs": 1.0}
        return given

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.epochs is not None and self.steps is not None:
            raise ValueError("set either epochs or steps, not both (null switches one off)")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and less than 1, got {list(self.betas)}")
        return self

    @property
    def rows(self) -> int:
        """Rows of a client in one forward pass: a preference pair has two."""
        return self.batch_size * (2 if self.objective == "dpo" else 1)

    @property
    def moments(self) -> int:
        return int(self.momentum > 0) if self.optimizer == "sgd" else 2
