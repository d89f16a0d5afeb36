"""Fed-SB: an r by r matrix between frozen factors that start from the gradient.

R. Singhal, K. Ponkshe, R. Vartak, L. R. Varshney, P. Vepakomma, "Fed-SB: A Silver Bullet for Extreme
Communication Efficiency and Performance in (Private) Federated LoRA Fine-Tuning", 2025; the start is
LoRA-SB's (Ponkshe, Singhal et al., "Initialization using Update Approximation is a Silver Bullet for
Extremely Efficient Low-Rank Fine-Tuning", 2024).

The algorithm, in our words:
    1  first round, for the sampled clients c:
    2      client: G_c = the mean gradient of its loss with respect to every adapted W, on about 1/1000 of
               its examples  -> gradient.py, or sketch.py for two narrow products of it
    3      server: D = -eta sign(sum_c w_c G_c / sum_c w_c);  U S V^T = the leading r of its SVD
               -> singular_vectors.py
    4      server: B = U, A = V^T, R = diag(S)
    5  each later round, for the sampled clients c:
    6      client: load B, A and the global R; the update of W is B R A
    7      client: minimise the mean loss over its response tokens in R alone
    8      server: R = sum_c w_c R_c / sum_c w_c

With A and B the same everywhere, sum_c w_c (B R_c A) = B (sum_c w_c R_c) A: the mean is exact. The model
starts off W, at W + B R A.

Symbols: w_c `weights` (|D_c| or 1), r `rank`, eta `step_size`, A `lora_A`, B `lora_B`, R `lora_R`.

Readings and deviations (docs/methods/fed-sb.md):
    - The released code takes the gradient of pooled data. Here clients send theirs and the server averages.
    - Where G_c is small enough (`dense_limit_bytes`) clients send it. It is as large as the model, so elsewhere they
      send two narrow products of it, G_c Omega and Psi G_c, from which the server rebuilds its mean (sketch.py).
      They are the gradients of a LoRA with A = [Omega^T; 0] and B = [0, Psi^T], which changes nothing.
    - eta is an option: in the paper it is the learning rate over (warm-up ratio times total steps), which
      a method does not know.
    - If no client has a gradient (an expert that no client activated), B and A are random with orthonormal columns and
      rows, and R = 0.
    - A and B are sent once to each client, which keeps them (basis.py); the first round trains nothing.
    - The scale is 1 (alpha = r). Clients run with their budget's active experts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.config.privacy import Unit
from fedguild.core.errors import ConfigError
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import new_seed, torch_rng
from fedguild.methods.fed_sb.basis import BASIS, LOST, Holders, basis_of
from fedguild.methods.fed_sb.gradient import GRADIENT, full_weight_plan, mean_gradients, mean_upload
from fedguild.methods.fed_sb.singular_vectors import leading, random_orthonormal
from fedguild.methods.fed_sb.sketch import rebuilt, sketch_of, sketch_plan, sketch_shapes, sketching
from fedguild.model.adapters.lora import DOWN, MIDDLE, UP, Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes, zero_adapter
from fedguild.model.targets import targeted_shapes
from fedguild.server.aggregation import WeightedMean
from fedguild.server.limits import active_experts_of
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, Own, Roster, ServerCosts
from fedguild.server.schema import Schema, entries
from fedguild.server.settings import MethodSettings, Targets, Weights
from fedguild.server.terms import Upload, weight_of

STAGE, SEED = "stage", "seed"
"""Scalars of the state and of every download: `gradient` or `training`, and the server's seed."""


class FedSBSettings(MethodSettings):
    """The options of Fed-SB."""

    rank: int = Field(20, ge=1, description="r, the size of R")
    targets: Targets = ("attention", "experts")
    weights: Weights = "size"
    start: Literal["auto", "dense", "sketch", "random"] = Field(
        "auto",
        description="where A and B come from: the clients' gradients themselves (dense, exact), sketches, or "
        "nowhere (random, with R = 0 and no first round of its own); auto: dense up to `dense_limit_bytes`, or sketch",
    )
    dense_limit_bytes: int = Field(
        2**30,
        ge=0,
        description="for auto: the largest size of a client's gradients, in fp32, that are sent whole",
    )
    step_size: float = Field(
        1e-5, gt=0, description="eta: learning rate over (warm-up ratio times total steps) in the paper"
    )
    sample: float = Field(
        0.001,
        gt=0,
        le=1,
        description="share of a client's examples that its gradient uses; at least an optimizer step",
    )
    sketch_rank: int | None = Field(
        None, ge=1, description="rank up to which a sketch is exact; null: twice the rank of the adapter"
    )
    send_basis: Literal["once", "always"] = Field(
        "once", description="once: A and B go only to clients that do not keep them yet; always: to all, in every round"
    )


class FedSB(Method):
    """A federated r×r matrix between frozen factors; see the module's docstring."""

    Settings = FedSBSettings
    facts = Facts(
        costs=ServerCosts(
            "O(n); in the first round one module's gradient [out, in]",
            "O(C n), n = r² a module; once O(out in r) a module for A and B",
            note="The first round only sends sketches of gradients up; A and B go down once to each client.",
            rounds=3,
        ),
        not_linear="it records of every client whether it still holds A and B",
    )
    settings: FedSBSettings

    def privacy_refusal(self, unit: Unit) -> str:
        """Returns why its uploads tell more than an account could hold."""
        if self.settings.start == "random":
            return ""
        return "sends gradients in the first round (with method.start=random it does not)"

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns B R A of which R trains, with the budget's active experts.

        Beside it is the plan whose gradients the first round sends, whole or as sketches.
        """
        lora = Lora(self.settings.rank, 1.0, self.settings.targets, middle=True, frozen=(DOWN, UP))
        require_narrower(model, lora)
        plan, kind = AdapterPlan((lora,), active_experts_of(model, budget)), self.start_on(model)
        if kind == "random":
            return plan
        watched = full_weight_plan(plan) if kind == "dense" else sketch_plan(plan, self.sketch_rank)
        return replace(plan, beside=watched, beside_until=1)

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns a state without A and B, or with random ones if they are not derived from a gradient."""
        seed = new_seed(rng)
        if self.start_on(model) != "random":
            return Payload(Holders().tensors(), {STAGE: "gradient", SEED: seed})
        weights = targeted_shapes(model, self.settings.targets)
        nothing = ((module, torch.zeros(shape)) for module, shape in weights.items())
        return self.with_factors(Holders(), nothing, seed)

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Lines 1 and 6: the round's purpose; R, and A and B for a client that does not have them."""
        holds = self.settings.send_basis == "once" and client in Holders(state)
        return Payload.of({ADAPTER: state.part(ADAPTER), BASIS: {} if holds else state.part(BASIS)}, state.scalars)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 2, or lines 6 and 7."""
        if cohort.work[0].download.scalars[STAGE] == "gradient":
            with self.watching(cohort) as again:
                gradients = mean_gradients(again, self.settings.sample)  # line 2
            for slot in range(len(gradients)):
                cohort.leave(slot, {})  # nothing has been trained
            return [Payload.of({GRADIENT: sketch_of(each, self.sketch_rank)}) for each in gradients]
        bases = [basis_of(work) for work in cohort.work]
        for slot, (work, basis) in enumerate(zip(cohort.work, bases, strict=True)):
            cohort.load(slot, {**basis, **work.download.part(ADAPTER)})  # line 6
            if self.settings.send_basis == "once":
                cohort.keep(slot, work.download.part(BASIS))
        train(cohort)  # line 7
        return [Payload.of({ADAPTER: cohort.read(slot)}, {LOST: not basis}) for slot, basis in enumerate(bases)]

    def watching(self, cohort: Cohort) -> AbstractContextManager[Cohort]:
        """Returns the clients in slots whose gradients are G_c, or give its sketch, for the duration of a block."""
        if self.start_on(cohort.model.backbone.info) == "dense":
            return cohort.afresh([full_weight_plan(plan) for plan in cohort.model.plans])
        return sketching(cohort, self.sketch_rank, int(cohort.work[0].download.scalars[SEED]))

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 3 and 4, or line 8; the R of a client without A and B does not count."""
        holders = Holders(state)
        if state.scalars[STAGE] == "gradient":
            seed, mean_gradient = int(state.scalars[SEED]), mean_upload(uploads, self.settings.weights)
            return self.with_factors(holders, rebuilt(mean_gradient, seed), seed) if mean_gradient else state
        mean = WeightedMean()
        for upload in uploads:
            if holders.trained(upload):
                mean.add(upload.payload.part(ADAPTER), weight_of(upload.client, self.settings.weights)[1])
        middles = with_part(ADAPTER, mean.result(state.part(ADAPTER)))  # line 8
        return Payload({**state.tensors, **middles, **holders.tensors()}, state.scalars)

    def with_factors(self, holders: Holders, gradients: Iterable[tuple[str, Tensor]], seed: int) -> Payload:
        """Returns the state with every module's B, R and A from its mean gradient (lines 3 and 4)."""
        tensors = holders.tensors()
        for module, gradient in gradients:
            rng = torch_rng(seed, "start", module)
            up, middle, down = initial_factors(gradient, self.settings.rank, self.settings.step_size, rng)
            tensors |= with_part(BASIS, {f"{module}.{DOWN}": down, f"{module}.{UP}": up})
            tensors |= with_part(ADAPTER, {f"{module}.{MIDDLE}": middle})
        return Payload(tensors, {STAGE: "training", SEED: seed})

    def schema(self, model: ModelInfo, client: ClientInfo, download: Payload, round_index: int = 0) -> Schema:
        """Returns the gradient or its sketch in the stage before training, R_i in training."""
        plan = self.plan(model, client.budget)
        if download.scalars[STAGE] == "training":
            return Schema(entries(ADAPTER, trainable_shapes(model, plan)), {LOST: bool})
        if self.start_on(model) == "dense":
            return Schema(entries(GRADIENT, trainable_shapes(model, full_weight_plan(plan))))
        return Schema(entries(GRADIENT, sketch_shapes(model, plan.lora.targets, self.sketch_rank)))

    def start_on(self, model: ModelInfo) -> Literal["dense", "sketch", "random"]:
        """Returns where A and B come from on this model."""
        if self.settings.start != "auto":
            return self.settings.start
        weights = targeted_shapes(model, self.settings.targets).values()
        return "dense" if 4 * sum(map(math.prod, weights)) <= self.settings.dense_limit_bytes else "sketch"

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Returns B R A; before the first round it is zero."""
        plan = self.plan(model, budget)
        return Deployment(plan, {**state.part(BASIS), **state.part(ADAPTER)} or zero_adapter(model, plan))

    @property
    def sketch_rank(self) -> int:
        """k, the rank up to which a sketch is exact."""
        return self.settings.sketch_rank or 2 * self.settings.rank


def initial_factors(
    gradient: Tensor, rank: int, step_size: float, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns B [.., out, r], R [.., r, r] and A [.., r, in] of a weight (lines 3 and 4).

    B R A is the best approximation of -eta sign(G) of rank r; if all of G is zero, so is R.

    Args:
        gradient: G, [out, in], or [M, out, in] of a layer's experts.
        rank: r.
        step_size: eta.
        rng: Draws the start of the search for singular vectors, and those of a zero matrix.
    """
    *experts, outputs, inputs = gradient.shape
    up = random_orthonormal((*experts, outputs, rank), rng)
    down = random_orthonormal((*experts, inputs, rank), rng).mT
    middle = torch.zeros(*experts, rank, rank)
    seen = gradient.flatten(-2).any(-1)[..., None, None]
    if bool(seen.any()):
        svd = leading(-step_size * gradient.sign(), rank, rng)  # line 3
        up, down = torch.where(seen, svd.u, up), torch.where(seen, svd.vh, down)  # line 4
        middle = torch.where(seen, torch.diag_embed(svd.s), middle)
    return up.contiguous(), middle, down.contiguous()


def require_narrower(model: ModelInfo, lora: Lora) -> None:
    """Checks that B and A can have orthonormal columns and rows.

    Raises:
        ConfigError: a targeted layer is narrower than the rank.
    """
    for module, (*_, outputs, inputs) in targeted_shapes(model, lora.targets).items():
        if min(outputs, inputs) < lora.rank:
            raise ConfigError(
                f"method.rank is {lora.rank}, but {module} has {outputs} outputs and {inputs} inputs.",
                f"Set method.rank to at most {min(outputs, inputs)}, or leave it out of method.targets.",
            )
