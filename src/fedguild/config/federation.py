"""Settings of the federation: the clients, their budgets, and the rules of a round."""

from __future__ import annotations

import math
from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from fedguild.config.base import NAME, Section
from fedguild.core.score_names import SCORES


def wanted_count(clients: int, client_fraction: float) -> int:
    """Returns the number of uploads that a round wants: client_fraction * clients, a half rounded up, at least 1."""
    return max(math.floor(client_fraction * clients + 0.5), 1)


class BudgetSettings(Section):
    """A compute tier shared by some of the clients."""

    name: str = Field(
        pattern=NAME,
        description="The tier's name in tables and files: letters, digits, dot, dash and underscore; not that of a "
        f"mean ({', '.join(SCORES)}).",
    )
    active_experts: int = Field(
        default=0,
        ge=0,
        description="Active experts per token that the tier can run; 0: the model's default, or a dense model.",
    )
    rank: int = Field(default=8, ge=1, description="LoRA rank that the tier can train under rank-based methods.")
    share: float = Field(default=1.0, gt=0, description="Number of clients in this tier, relative to the other tiers.")

    @field_validator("name")
    @classmethod
    def _is_no_mean(cls, name: str) -> str:
        if name in SCORES:
            raise ValueError(f"must not be the name of a mean ({', '.join(SCORES)}), got '{name}'")
        return name


class RaySettings(Section):
    """The `ray` engine's cluster, and the resources of each of its actors."""

    address: str | None = Field(
        default=None,
        min_length=1,
        description="Address of a Ray cluster, for example auto or 10.0.0.1:6379; null: start Ray on this machine. "
        "In a file an address other than auto counts after `fedguild trust` of that file.",
    )
    actors: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Number of actors, processes that each hold the backbone; auto: as many as the GPUs hold, or one "
        "if there is no GPU.",
    )
    gpu_fraction: float = Field(
        default=1.0,
        gt=0,
        le=1,
        description="Fraction of a GPU and of its memory that an actor gets; ignored if there is no GPU.",
    )
    cpus_per_actor: int = Field(default=1, ge=1, description="CPU cores and threads of each actor.")
    gpus_per_actor: int = Field(
        default=1,
        ge=1,
        description="GPUs of an actor, over which the backbone's layers are sharded; each trains different "
        "clients. Without GPUs: its processes on CPUs.",
    )

    @model_validator(mode="after")
    def _shard_whole_gpus(self) -> Self:
        if self.gpus_per_actor > 1 and self.gpu_fraction < 1:
            raise ValueError("with gpus_per_actor above 1, gpu_fraction must be 1")
        return self


class EngineSettings(Section):
    """The engine that trains the clients. Results depend on it only by floating-point rounding."""

    name: Literal["local", "ray", "flower"] = Field(
        default="local",
        description="local: one cohort after the other in this process, or in those that torchrun started; ray: "
        "cohorts spread over the GPUs and machines that Ray sees; flower: real clients over the network.",
    )
    timeout_seconds: float = Field(
        default=1800.0,
        gt=0,
        description="How long the processes of a sharded backbone wait for one of them before the run stops.",
    )
    ray: RaySettings = Field(default_factory=RaySettings, description="The `ray` engine.")


class FederationSettings(Section):
    """The clients, the rounds, and the server's rules for a round."""

    clients: int = Field(default=8, ge=1, description="Number of clients.")
    rounds: int = Field(default=6, ge=1, description="Number of communication rounds.")
    client_fraction: float = Field(
        default=1.0, gt=0, le=1, description="Target share of the clients whose uploads a round aggregates."
    )
    quorum: float = Field(
        default=0.5,
        gt=0,
        le=1,
        description="Share of a round's target uploads that must arrive and be valid; otherwise the run stops.",
    )
    over_selection: float = Field(
        default=0.0,
        ge=0,
        description="Extra clients asked to train, as a share of the target set by `client_fraction`; the round closes "
        "as soon as the target number have delivered.",
    )
    deadline_seconds: float | None = Field(
        default=None,
        gt=0,
        description="How long each attempt of a round waits for its clients; null: as long as it takes. The engines "
        "local and ray finish a cohort that has started.",
    )
    retries: int = Field(
        default=0, ge=0, description="How often clients that failed are asked again in the same round."
    )
    straggler_policy: Literal["drop", "next_round"] = Field(
        default="drop",
        description="What happens to an upload that arrives one round late; drop: it is discarded; next_round: it is "
        "aggregated in that round, unless its client has delivered a newer one.",
    )
    upload_limit_bytes: int | None = Field(
        default=None, ge=1, description="Maximum size of an encoded upload; larger ones are rejected. null: no limit."
    )
    byte_limit: int | None = Field(
        default=None,
        ge=1,
        description="Maximum bytes that all clients together receive and send in the whole run; the run ends before a "
        "round that could pass it, and asks no client again beyond it. null: no limit.",
    )
    cohort_size: Literal["auto"] | Annotated[int, Field(ge=1)] = Field(
        default="auto",
        description="Clients trained in one forward and backward pass; auto: as many as fit half of the free memory, "
        "and on a CPU 4,096 tokens a thread.",
    )
    wire_dtype: Literal["fp32", "bf16", "int8"] = Field(
        default="fp32",
        description="Encoding of large tensors on the wire: fp32: exact; bf16: rounded; int8: rounded, with a scale "
        "per row. The same on every engine, and reflected in the byte counts.",
    )
    engine: EngineSettings = Field(default_factory=EngineSettings, description="Where the clients train.")
    budgets: tuple[BudgetSettings, ...] = Field(
        default=(BudgetSettings(name="all"),),
        min_length=1,
        description="Compute tiers, largest first; clients are assigned to them in turn, in proportion to `share`.",
    )
    max_update_norm: float | None = Field(
        default=None,
        gt=0,
        description="Maximum L2 norm of an upload; uploads beyond it are rejected. null: no limit.",
    )
    norm_factor: Literal["auto"] | Annotated[float, Field(gt=0)] | None = Field(
        default="auto",
        description="Largest norm of an upload's change, as a multiple of the round's median, for each part, in "
        "rounds with at least 4 uploads. Longer changes are shortened to it, and an upload with one beyond 10 times "
        "the median (or this factor, if larger) is left out. auto: 3 with real clients, none in a simulation. null: "
        "no limit.",
    )
    aggregator: Literal["auto", "none", "trimmed_mean", "median", "clipped", "centered_clipping"] = Field(
        default="auto",
        description="Robust estimate instead of the mean over the clients, for methods whose server takes means. auto: "
        "trimmed_mean with real clients if a round has at least 4, unless federation.secure or central noise keeps "
        "single uploads from it; else none. none: the method's mean. trimmed_mean: the method's mean of each value "
        "without the extremes. median: the median of each value, which weighs clients equally; both are over the "
        "clients that hold the value. clipped: the mean of changes that are clipped to the round's median norm. "
        "centered_clipping: the mean of changes that are clipped to the median distance from the last round's change.",
    )
    trim: float = Field(
        default=0.2, gt=0, lt=0.5, description="Share of the clients that trimmed_mean leaves out at either end."
    )
    secure: bool = Field(
        default=False,
        description="Whether the server sees sums over the clients only (secure aggregation): each upload is masked, "
        "and the masks cancel in the sum. Needs a method whose aggregate is linear.",
    )
    secure_share: float = Field(
        default=2 / 3,
        gt=0.5,
        le=1,
        description="More than this share of a round's clients (all for 1) must be left after every step of "
        "secure aggregation; otherwise the round fails and no values are opened.",
    )
    secure_clients: int = Field(
        default=3,
        ge=3,
        description="Fewest clients, after dropouts, in any mean of secure aggregation; values that fewer "
        "clients hold, or have a weight for, are not sent or not opened, and keep the server's value.",
    )
    secure_unheld: Literal["omit", "zeros"] = Field(
        default="omit",
        description="What a client sends in secure aggregation for values that it does not hold; omit: nothing; "
        "zeros: masked zeros.",
    )
    secure_disclose: tuple[str, ...] = Field(
        default=(),
        description="Parts of an upload that may go to the server unmasked, for methods whose server needs them "
        "from each client; `scores`: the scores of the clients' own models, which are otherwise summed.",
    )
    server_step: float = Field(
        default=1.0,
        gt=0,
        description="eta, the server's learning rate, for methods whose aggregate is a mean: the adapter moves by eta "
        "times the clients' mean change; 1: the mean itself.",
    )
    server_momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="beta, the server's momentum, for methods whose aggregate is a mean: the share of the last round's "
        "step that is added to this round's mean change before eta; 0: none.",
    )
    save_total_limit: int = Field(default=2, ge=1, description="Number of rounds whose checkpoints stay on disk.")

    @model_validator(mode="after")
    def _name_each_budget_once(self) -> Self:
        names = [budget.name for budget in self.budgets]
        repeated = sorted({name for name in names if names.count(name) > 1})
        if repeated:
            raise ValueError(f"budgets must have distinct names, got {', '.join(repeated)} more than once")
        return self

    @property
    def wanted_uploads(self) -> int:
        return wanted_count(self.clients, self.client_fraction)

    def budget_per_client(self) -> tuple[BudgetSettings, ...]:
        """Returns each client's tier, in client order.

        Smooth weighted round robin: equal shares assign the tiers in turn, and any first n clients
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
