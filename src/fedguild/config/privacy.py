"""Settings of differential privacy: what is protected, with how much noise, and when a client stops."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from fedguild.config.base import Section

Unit = Literal["client", "example"]
"""What one guarantee protects: all of a client's data, or one training example."""


class PrivacySettings(Section):
    """Differential privacy of the clients' data; needs the extra `privacy`."""

    unit: Literal["none", "client", "example"] = Field(
        default="none",
        description="What is protected; none: no differential privacy; client: all of a client's data, by noise on its "
        "clipped change; example: one training example, by DP-SGD in the client's training.",
    )
    trust_model: Literal["central", "local"] = Field(
        default="local",
        description="Who adds the noise where the unit is a client; local: the client, before anything leaves it; "
        "central: the server, which is trusted with the uploads. The noise of the unit example is always the client's.",
    )
    clip: float = Field(
        default=1.0,
        gt=0,
        description="C, the L2 norm to which a client's change, or an example's gradient, is clipped; with the "
        "unit example it replaces training.max_grad_norm.",
    )
    noise_multiplier: float | None = Field(
        default=None,
        gt=0,
        description="sigma, the noise's standard deviation over C; null: it follows from target_epsilon.",
    )
    target_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="epsilon of a client that takes part in every round, from which each client's noise is "
        "computed; null: noise_multiplier is used.",
    )
    delta: float = Field(default=1e-5, gt=0, lt=1, description="delta of every guarantee; below 1 / examples.")
    max_epsilon: float | None = Field(
        default=None,
        gt=0,
        description="A client's budget: a client whose next round would exceed it stops taking part. null: "
        "target_epsilon, if that is set.",
    )
    sampling: Literal["public", "secret"] = Field(
        default="public",
        description="What central noise assumes of the draw of a round's clients; public: everybody may know who takes "
        "part, and a client pays for its own rounds; secret: nobody who sees the models knows; all clients pay in "
        "every round, which costs less only if few of many are drawn (simulations only; the run's folder, report and "
        "config say who took part, and must not be shown).",
    )
    sample_rate: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="Unit example: probability with which an example enters a step; null: training.batch_size times "
        "training.gradient_accumulation_steps over the client's number of examples, which must then be public.",
    )
    public: tuple[Literal["sizes", "scores"], ...] = Field(
        default=(),
        description="What may leave a client without noise, and is declared in the report; sizes: its numbers of "
        "examples, which weights, steps and sampling follow; scores: those of its own models. The rest is withheld.",
    )

    @property
    def is_central(self) -> bool:
        return self.unit == "client" and self.trust_model == "central"

    @property
    def budget(self) -> float | None:
        """The epsilon beyond which a client stops taking part; None for no limit."""
        return self.target_epsilon if self.max_epsilon is None else self.max_epsilon

    @model_validator(mode="after")
    def _check(self) -> Self:
        given = self.model_fields_set - {"unit"}
        changed = sorted(name for name in given if getattr(self, name) != type(self).model_fields[name].default)
        if self.unit == "none":
            if changed:
                raise ValueError(f"{changed[0]} is set, but unit is none: set unit to client or example")
            return self
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("set either noise_multiplier or target_epsilon")
        if self.sampling == "secret" and not self.is_central:
            raise ValueError("sampling: secret is about central noise (unit: client, trust_model: central)")
        if self.sample_rate is not None and self.unit != "example":
            raise ValueError("sample_rate is about the unit example")
        return self
