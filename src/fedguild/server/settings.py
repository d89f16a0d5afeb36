"""Options that several methods have, each declared once: LoRA's, and those of plain averaging."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedguild.client.budget import Budget
from fedguild.core.errors import ConfigError
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.model.targets import fitting_targets

Rank = Annotated[int, Field(ge=1, description="LoRA rank r")]
Alpha = Annotated[float, Field(gt=0, description="LoRA's alpha; the scale is alpha / rank")]
Targets = Annotated[
    tuple[str, ...],
    Field(description="what LoRA adapts: leaf names of linear layers, or the groups attention, mlp, router, experts"),
]
Scale = Annotated[
    Literal["common", "own"] | Annotated[float, Field(gt=0)],
    Field(
        description="factor on a client's product B A: common, alpha / the highest rank; own, alpha / its own rank; "
        "or a number, the same for all"
    ),
]
Dropout = Annotated[float, Field(ge=0, lt=1, description="dropout on the input of LoRA on linear layers")]
BasisOfRanks = Annotated[
    Literal["singular", "received"],
    Field(
        description="basis of the ranks in which a client trains: singular, where the rows of A are orthogonal and of "
        "one norm, and the columns of B orthogonal; or as received"
    ),
]
BasisNorm = Annotated[float, Field(gt=0, description="c: the norm of A's rows in the basis singular")]
StartNorm = Annotated[
    float | None,
    Field(
        gt=0,
        description="norm of A's rows at initialization, each made orthogonal to those before; null keeps LoRA's own "
        "initialization, of norm 0.58 or so",
    ),
]
Mix = Annotated[
    float,
    Field(ge=0, le=1, description="lambda of a client's own model: 0 for the received model and 1 for the trained one"),
]
Weights = Annotated[
    Literal["size", "uniform"],
    Field(description="a client's weight in the average: its number of examples, or the same for all that have any"),
]


class MethodSettings(BaseModel):
    """A method's options: unknown keys are refused, and values never change after validation."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Self:
        """Returns the options as the method runs with them; called before data or weights are read.

        An option that the config sets (`model_fields_set`) is kept or refused; one left at its default may be replaced
        by a value that fits. By default this is done for targets that the model does not have.

        Args:
            model: The backbone's description.
            clients: The number of clients.
            exact: Whether payloads arrive as they were sent, bit for bit (`federation.wire_dtype` fp32).

        Raises:
            ConfigError: the options do not fit.
        """
        defaults: tuple[str, ...] = getattr(self, "targets", ())
        targets = defaults if "targets" in self.model_fields_set else fitting_targets(model, defaults)
        return self if targets == defaults else self.model_copy(update={"targets": targets})


class LoraSettings(MethodSettings):
    """The options of a method whose clients train LoRA."""

    rank: Rank = 20
    alpha: Alpha = 16.0
    targets: Targets = ("attention", "experts")
    start_norm: StartNorm = None

    @property
    def scale(self) -> float:
        """Factor on the product of a LoRA of rank r, alpha / r."""
        return self.alpha / self.rank

    @property
    def lora(self) -> Lora:
        """The LoRA that these options describe."""
        return Lora(self.rank, self.scale, self.targets, start_norm=self.start_norm)


class DropoutLoraSettings(LoraSettings):
    """The same, with dropout on the input of LoRA."""

    dropout: Dropout = 0.0

    @property
    def lora(self) -> Lora:
        """The LoRA that these options describe."""
        return Lora(self.rank, self.scale, self.targets, self.dropout, start_norm=self.start_norm)


class InBasisSettings(LoraSettings):
    """The options of a method whose clients train LoRA in a singular basis and mix it with what they receive."""

    targets: Targets = ("attention", "router", "experts")
    basis: BasisOfRanks = "singular"
    basis_norm: BasisNorm = 5
    mix: Mix = 0.5

    @model_validator(mode="after")
    def _starts_in_its_basis(self) -> Self:
        if self.basis == "singular" and self.start_norm is not None:
            raise ValueError("start_norm has no effect without basis: received; in a singular basis it is basis_norm")
        return self

    @property
    def norm(self) -> float | None:
        """c, the norm of A's rows in which a client trains; None where it trains in the basis as received."""
        return self.basis_norm if self.basis == "singular" else None


class UnequalRanksSettings(MethodSettings):
    """The options of a method whose clients train LoRA of unequal ranks, up to the rank that the server keeps."""

    rank: int = Field(20, ge=1, description="the highest LoRA rank of all clients")
    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; `scale` says what divides it")
    scale: Scale = "own"
    targets: Targets = ("attention", "experts")
    dropout: Dropout = 0.0
    start_norm: StartNorm = None

    def lora_of(self, budget: Budget) -> Lora:
        """Returns the LoRA of a budget's clients."""
        return Lora(budget.rank, self.scale_of(budget), self.targets, self.dropout, start_norm=self.start_norm)

    def scale_of(self, budget: Budget) -> float:
        """Returns the factor on the product of a budget's LoRA; see `scale_by_rank`."""
        return scale_by_rank(self.scale, self.alpha, self.rank, budget)


class AnyRanksSettings(MethodSettings):
    """The options of a method whose clients train LoRA of any ranks, as the server keeps none of them."""

    alpha: float = Field(16.0, gt=0, description="LoRA's alpha; `scale` says what divides it")
    scale: Scale = "own"
    highest_rank: int = Field(20, ge=1, description="the highest LoRA rank of all clients, which scale common needs")
    targets: Targets = ("attention", "experts")
    dropout: Dropout = 0.0
    start_norm: StartNorm = None

    def lora_of(self, budget: Budget) -> Lora:
        """Returns the LoRA of a budget's clients."""
        return Lora(budget.rank, self.scale_of(budget), self.targets, self.dropout, start_norm=self.start_norm)

    def scale_of(self, budget: Budget) -> float:
        """Returns the factor on the product of a budget's LoRA; see `scale_by_rank`.

        Raises:
            ConfigError: the scale is common, and the budget's rank is above the highest.
        """
        if self.scale == "common" and budget.rank > self.highest_rank:
            raise ConfigError(
                f"Budget '{budget.name}' has rank {budget.rank}, but method.highest_rank is {self.highest_rank}.",
                "Set method.highest_rank to the highest rank of federation.budgets.",
            )
        return scale_by_rank(self.scale, self.alpha, self.highest_rank, budget)


def scale_by_rank(scale: Literal["common", "own"] | float, alpha: float, highest: int, budget: Budget) -> float:
    """Returns the factor on the product of a budget's LoRA.

    Args:
        scale: `common`, alpha / `highest`; `own`, alpha / the budget's rank; or the factor.
        alpha: LoRA's alpha.
        highest: The highest rank of all clients.
        budget: Whose.
    """
    if scale == "own":
        return alpha / budget.rank
    return alpha / highest if scale == "common" else scale


class AveragingSettings(MethodSettings):
    """Options of plain averaging (FedAvg, FedProx): how gates and experts train, and other layers with LoRA."""

    gate: Literal["full", "lora", "none"] = Field(
        "full", description="how the gates train: their full weights, LoRA, or not at all"
    )
    experts: Literal["lora", "full", "none"] = Field(
        "lora", description="how the experts train: LoRA, their full weights, or not at all"
    )
    rank: Rank = 8
    alpha: Alpha = 16.0
    targets: tuple[str, ...] = Field(
        (), description="other layers that LoRA adapts: leaf names of linear layers, or the groups attention and mlp"
    )
    start_norm: StartNorm = None
    personal: bool = Field(
        False, description="whether a client's own model is the one that it trained, before the average"
    )

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Self:
        """Without experts that can be adapted, LoRA on attention takes their place, unless `targets` says otherwise."""
        if model.moe:
            return self
        fitting = {"gate": "none", "experts": "none", "targets": fitting_targets(model, ("attention",))}
        changes = {name: value for name, value in fitting.items() if name not in self.model_fields_set}
        return self.model_copy(update=changes) if changes else self


def averaging_plan(model: ModelInfo, settings: AveragingSettings) -> AdapterPlan:
    """Returns the plan that the settings describe, the same for every budget.

    Raises:
        ConfigError: nothing would train, gate or experts are among the targets, or the model has neither.
    """
    if taken := {"router", "experts"} & set(settings.targets):
        raise ConfigError(
            f"method.targets: {' and '.join(sorted(taken))} cannot be among the targets.",
            "method.gate and method.experts set how they train; `targets` names other layers, for example [attention].",
        )
    if not model.moe and (settings.gate, settings.experts) != ("none", "none"):
        if model.undescribed:
            model.require_experts("Training gates and experts (method.gate, method.experts)")
        raise ConfigError(
            f"method.gate and method.experts need experts, but {model.name} ({model.family}) is dense.",
            "Set method.gate=none method.experts=none, and method.targets to layers for LoRA, such as [attention].",
        )
    if (settings.gate, settings.experts, settings.targets) == ("none", "none", ()):
        raise ConfigError(
            "method.gate and method.experts are none and method.targets is empty: nothing would train.",
            "Set method.targets to layers for LoRA, for example [attention].",
        )
    low_rank = {"router": settings.gate, "experts": settings.experts}
    targets = (*settings.targets, *(target for target, kind in low_rank.items() if kind == "lora"))
    lora = Lora(settings.rank, settings.alpha / settings.rank, targets, start_norm=settings.start_norm)
    parts: list[AdapterPart] = [lora] if targets else []
    parts += [FullRouter()] if settings.gate == "full" else []
    parts += [FullExperts()] if settings.experts == "full" else []
    return AdapterPlan(tuple(parts))
