"""Settings of the federation: the clients, their budgets, and the rules of a round."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedguild.config.base import Section


class BudgetSettings(Section):
    """A tier of compute that some clients share."""

    name: str = Field(
        pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$",
        description="The tier's name in tables and files: letters, digits, dot, dash and underscore.",
    )
    active_experts: int = Field(
        default=0,
        ge=0,
        description="Active experts per token that the tier can run; 0: the model's own, or a dense model.",
    )
    rank: int = Field(default=8, ge=1, description="LoRA rank that the tier can train under rank-based methods.")
    share: float = Field(default=1.0, gt=0, description="Number of clients in this tier, relative to the other tiers.")


class RaySettings(Section):
    """The `ray` engine's cluster, and the resources of each of its actors."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="Address of a Ray cluster, for example auto or 10.0.0.1:6379; null: start Ray on this machine.",
    )
    actors: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Processes that each hold the backbone; auto: as many as the GPUs hold, or one where there is "
        "no GPU.",
    )
    gpu_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Part of a GPU and of its memory that an actor gets; ignored where there is no GPU.",
    )
    cpus_per_actor: int = Field(default=1, ge=1, description="CPU cores of an actor, and threads it computes with.")


class EngineSettings(Section):
    """The engine that trains the clients. Results depend on it only by floating-point rounding."""

    name: Literal["local", "ray", "flower"] = Field(
        default="local",
        description="local: one cohort after the other in this process; ray: cohorts spread over the GPUs and machines "
        "that Ray sees; flower: real clients over the network.",
    )
    ray: RaySettings = Field(default_factory=RaySettings, description="The `ray` engine.")


class FederationSettings(Section):
    """The clients, the rounds, and the server's conditions for a round."""

    clients: int = Field(default=8, ge=1, description="Number of clients.")
    rounds: int = Field(default=6, ge=1, description="Number of communication rounds.")
    participation: float = Field(
        default=1.0, gt=0, le=1, description="Share of the clients whose uploads each round wants."
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the uploads that a round wants which must arrive and be valid, else the run stops.",
    )
    over_selection: float = Field(
        default=0.0,
        ge=0,
        description="Clients asked beyond what participation says, as a share of that; the round closes as soon as as "
        "many have delivered as participation says.",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        description="How long each attempt of a round waits for its clients; null: as long as it takes. The engines "
        "local and ray finish a cohort that has begun.",
    )
    retries: int = Field(
        default=0, ge=0, description="How often clients that failed are asked again in the same round."
    )
    late: Literal["drop", "next_round"] = Field(
        default="drop",
        description="What becomes of an upload that arrives in the round after its own; next_round: it is aggregated "
        "there, unless its client delivered a newer one.",
    )
    upload_limit_bytes: int | None = Field(
        default=None, ge=1, description="Largest encoded upload; beyond it the upload is rejected. null: no limit."
    )
    cohort_size: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="Clients trained in one forward and backward pass; auto: as many as memory holds."
    )
    codec: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="How large tensors travel: fp32 exactly; bf16 rounded; int8 rounded, with a scale per row. The "
        "same on every engine, and counted.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="Where the clients train.")
    budgets: tuple[BudgetSettings, ...] = Field(
        default=(BudgetSettings(name="all"),),
        min_length=1,
        description="Tiers of compute, largest first; clients are dealt to them in turn, in proportion to `share`.",
    )
    norm_limit: float | None = Field(
        default=None,
        gt=0,
        description="Largest L2 norm of an upload; beyond it the upload is rejected. null: no limit.",
    )
    keep_checkpoints: int = Field(default=2, ge=1, description="Number of rounds whose checkpoints stay on disk.")

    @model_validator(mode="after")
    def _name_each_budget_once(self) -> Self:
        names = [budget.name for budget in self.budgets]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"budgets must have names of their own, got {', '.join(repeated)} more than once")
        return self

    def budget_per_client(self) -> tuple[BudgetSettings, ...]:
        """Returns each client's tier, in client order.

        Smooth weighted round robin: equal shares deal the tiers in turn, and any first n clients
        follow the shares as closely as whole numbers allow.
        """
        total = sum(budget.share for budget in self.budgets)
        credit = [0.0] * len(self.budgets)
        tiers = []
        for _ in range(self.clients):
            credit = [owed + budget.share for owed, budget in zip(credit, self.budgets, strict=True)]
            chosen = max(range(len(credit)), key=lambda index: (round(credit[index], 9), -index))
            credit[chosen] -= total
            tiers.append(self.budgets[chosen])
        return tuple(tiers)
