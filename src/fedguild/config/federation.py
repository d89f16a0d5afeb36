"""Settings of the federation: the clients, what they can afford, and what a round asks of them."""

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


class FederationSettings(Section):
    """Who takes part, how often, and what the server insists on."""

    clients: int = Field(default=8, ge=1, description="Number of clients.")
    rounds: int = Field(default=6, ge=1, description="Number of communication rounds.")
    participation: float = Field(
        default=1.0, gt=0, le=1, description="Share of the clients that is asked in each round."
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of the asked clients whose uploads must be valid, else the run stops.",
    )
    cohort_size: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto", description="Clients trained in one forward and backward pass; auto: as many as memory holds."
    )
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
