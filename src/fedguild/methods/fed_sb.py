"""Fed-SB: LoRA with an r×r matrix R between frozen A and B, which start from the clients' gradient.

R. Singhal, K. Ponkshe, R. Vartak, L. R. Varshney, P. Vepakomma, "Fed-SB: A Silver Bullet for Extreme
Communication Efficiency and Performance in (Private) Federated LoRA Fine-Tuning", 2025; the start is
LoRA-SB's (Ponkshe, Singhal et al., "Initialization using Update Approximation is a Silver Bullet for
Extremely Efficient Low-Rank Fine-Tuning", 2024).

The algorithm, in our words:
    1  first round, for the sampled clients c:
    2      client: G_c = the mean gradient of its loss with respect to every adapted W, on about 1/1000 of
               its examples
    3      server: D = -eta sign(sum_c w_c G_c / sum_c w_c);  U S V^T = the leading r of its SVD
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
    - G_c is as large as the model, so clients send two narrow products of it, G_c Omega and Psi G_c, from
      which the server rebuilds its mean (`server/sketch.py`); `dense` sends G_c itself. They are the
      gradients of a LoRA with A = [Omega^T; 0] and B = [0, Psi^T], which changes nothing.
    - eta is an option: in the paper it is the learning rate over (warm-up ratio times total steps), which
      a method does not know.
    - Where no client has a gradient (an expert that nobody activated) B and A are random with orthonormal
      columns and rows, and R = 0.
    - A and B are sent once to each client, which keeps them; the first round trains nothing.
    - The scale is 1 (alpha = r). Clients run with their budget's active experts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.gradients import (
    full_weight_plan,
    mean_gradients,
    probes,
    rows_of_psi,
    sketch_of,
    sketch_plan,
    sketching_factors,
)
from fedguild.errors import ConfigError
from fedguild.methods.common import ADAPTER, active_experts_of, in_part, new_seed, without, zero_adapter
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.targets import targeted_shapes
from fedguild.payload import Payload, with_part
from fedguild.seeding import torch_rng
from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Deployment, Upload
from fedguild.server.sketch import leading, random_orthonormal, reconstructed

BASIS, GRADIENT = "basis", "gradient"
"""Payload parts: A and B; G_c or its sketch."""
STAGE, SEED = "stage", "seed"
"""Scalars of the state and of every download: `gradient` or `training`, and what the server draws from."""
LOST = "lost"
"""A scalar of an upload: whether the client should have kept A and B but no longer has them."""
HOLDERS = "server/holders"
"""In the state: indices of the clients that keep A and B."""


class FedSBSettings(BaseModel):
    """The options of Fed-SB."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    rank: int = Field(20, ge=1, description="r, the size of R")
    targets: tuple[str, ...] = Field(
        ("attention", "experts"),
        description="what is adapted: leaf names of linear layers, or the groups attention, mlp, router, experts",
    )
    weights: Literal["size", "uniform"] = Field(
        "size", description="a client's weight in both averages: its number of examples, or the same for all"
    )
    start: Literal["sketch", "dense", "random"] = Field(
        "sketch",
        description="where A and B come from: sketches of the clients' gradients, the gradients themselves, or "
        "nowhere (random, with R = 0 and no first round of its own)",
    )
    step_size: float = Field(
        1e-5, gt=0, description="eta: learning rate over (warm-up ratio times total steps) in the paper"
    )
    sample: float = Field(
        0.001, gt=0, le=1, description="part of a client's examples that its gradient is of; at least an optimizer step"
    )
    sketch_rank: int | None = Field(
        None, ge=1, description="rank up to which a sketch is exact; null: twice the rank of the adapter"
    )
    send_basis: Literal["once", "always"] = Field(
        "once", description="once: A and B go only to clients that do not keep them yet; always: to all, in every round"
    )


class FedSB:
    """A federated r×r matrix between frozen factors; see the module's docstring."""

    name: ClassVar[str] = "fed-sb"
    title: ClassVar[str] = "Fed-SB: an r by r matrix between frozen factors that start from the gradient"
    needs_experts: ClassVar[bool] = False
    Settings: ClassVar[type[BaseModel]] = FedSBSettings

    def __init__(self, settings: FedSBSettings) -> None:
        self.settings = settings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns B R A of which R trains, with the budget's active experts."""
        plan = AdapterPlan(
            rank=self.settings.rank,
            scale=1.0,
            targets=self.settings.targets,
            active_experts=active_experts_of(model, budget),
            middle=True,
            frozen=("lora_A", "lora_B"),
        )
        for module, (*_, outputs, inputs) in targeted_shapes(model, plan).items():
            if min(outputs, inputs) < plan.rank:
                raise ConfigError(
                    f"method.rank is {plan.rank}, but {module} has {outputs} outputs and {inputs} inputs.",
                    f"Set method.rank to at most {min(outputs, inputs)}, or leave it out of method.targets.",
                )
        return plan

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Returns a state without A and B, or with random ones where they come from nowhere."""
        plans = [self.plan(model, budget) for budget in budgets]
        seed = new_seed(rng)
        holders = {HOLDERS: torch.zeros(0, dtype=torch.int64)}
        if self.settings.start != "random":
            return Payload(holders, {STAGE: "gradient", SEED: seed})
        nothing = {module: torch.zeros(shape) for module, shape in targeted_shapes(model, plans[0]).items()}
        return Payload({**holders, **self._factors(nothing.items(), seed)}, {STAGE: "training", SEED: seed})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Lines 1 and 6: what the round is for; R, and A and B to a client that does not have them."""
        known = Payload(state.tensors)
        holds = self.settings.send_basis == "once" and client.index in state.tensors[HOLDERS].tolist()
        basis = {} if holds else with_part(BASIS, known.part(BASIS))
        return Payload({**with_part(ADAPTER, known.part(ADAPTER)), **basis}, state.scalars)

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Line 2, or lines 6 and 7."""
        if cohort.work[0].download.scalars[STAGE] == "gradient":
            return self._gradients(cohort)
        bases = [_basis(work) for work in cohort.work]
        for slot, (work, basis) in enumerate(zip(cohort.work, bases, strict=True)):
            cohort.load(slot, {**basis, **work.download.part(ADAPTER)})
            if self.settings.send_basis == "once":
                cohort.keep(slot, work.download.part(BASIS))
        for step in cohort.steps():
            nll = step.forward()
            step.backward(nll)
            step.apply()
        return [Payload(with_part(ADAPTER, cohort.read(slot)), {LOST: not basis}) for slot, basis in enumerate(bases)]

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of every R, or in the first round of the gradient or its sketch."""
        plan = self.plan(model, client.budget)
        if download.scalars[STAGE] == "training":
            return in_part(ADAPTER, trainable_shapes(model, plan))
        if self.settings.start == "dense":
            return in_part(GRADIENT, trainable_shapes(model, full_weight_plan(plan)))
        size, shapes = self._sketch_rank, targeted_shapes(model, plan).items()
        left = {f"{module}.lora_B": (*shape[:-1], size) for module, shape in shapes}
        right = {f"{module}.lora_A": (*shape[:-2], rows_of_psi(size), shape[-1]) for module, shape in shapes}
        return in_part(GRADIENT, {**left, **right})

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Lines 3 and 4, or line 8; the R of a client without A and B does not count."""
        part = GRADIENT if state.scalars[STAGE] == "gradient" else ADAPTER
        mean, holders = WeightedMean(), set(state.tensors[HOLDERS].tolist())
        shapes: dict[str, torch.Size] = {}
        for upload in uploads:
            sent = upload.payload.part(part)
            if upload.payload.scalars.get(LOST):
                holders.discard(upload.client.index)
                continue
            if not sent:  # a gradient that came late, when A and B were found already
                continue
            if part == ADAPTER:
                holders.add(upload.client.index)
            weight = float(upload.client.examples) if self.settings.weights == "size" else 1.0
            mean.add(sent, weight)
            shapes |= {name: value.shape for name, value in sent.items()}
        kept = {HOLDERS: torch.tensor(sorted(holders), dtype=torch.int64)}
        if part == ADAPTER:
            trained = mean.result(state.part(ADAPTER))
            return Payload({**state.tensors, **with_part(ADAPTER, trained), **kept}, state.scalars)
        if not shapes:
            return state
        seed = int(state.scalars[SEED])
        gradients = mean.result({name: torch.zeros(()).expand(shape) for name, shape in shapes.items()})
        return Payload(
            {**kept, **self._factors(whole_gradients(gradients, seed), seed)}, {STAGE: "training", SEED: seed}
        )

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns B R A; before the first round it is zero."""
        plan, known = self.plan(model, budget), Payload(state.tensors)
        return Deployment(plan, {**known.part(BASIS), **known.part(ADAPTER)} or zero_adapter(model, plan))

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns the state without who took part."""
        return without(state, HOLDERS)

    def personalize(self, state: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns the global model: A and B, which a client keeps, are the same for all."""
        return self.deploy(state, model, client.budget)

    @property
    def _sketch_rank(self) -> int:
        return self.settings.sketch_rank or 2 * self.settings.rank

    def _gradients(self, cohort: Cohort) -> list[Payload]:
        """Line 2: G_c, or its sketch."""
        model, plans, seed = cohort.model.backbone.info, cohort.model.plans, int(cohort.work[0].download.scalars[SEED])
        size, slots = self._sketch_rank, range(len(cohort.work))
        if self.settings.start == "dense":
            with cohort.afresh([full_weight_plan(plan) for plan in plans]) as again:
                gradients = mean_gradients(again, self.settings.sample)
            return [Payload(with_part(GRADIENT, gradients[slot])) for slot in slots]
        factors = sketching_factors(targeted_shapes(model, plans[0]), seed, size)
        with cohort.afresh([sketch_plan(plan, size) for plan in plans]) as again:
            for slot in slots:
                again.load(slot, factors)
            gradients = mean_gradients(again, self.settings.sample)
        return [Payload(with_part(GRADIENT, sketch_of(gradients[slot], size))) for slot in slots]

    def _factors(self, gradients: Iterable[tuple[str, Tensor]], seed: int) -> dict[str, Tensor]:
        """Lines 3 and 4 for every module, as the state holds them."""
        tensors = {}
        for module, gradient in gradients:
            rng = torch_rng(seed, "start", module)
            up, middle, down = initial_factors(gradient, self.settings.rank, self.settings.step_size, rng)
            tensors[f"{BASIS}/{module}.lora_A"], tensors[f"{BASIS}/{module}.lora_B"] = down, up
            tensors[f"{ADAPTER}/{module}.lora_R"] = middle
        return tensors


def initial_factors(
    gradient: Tensor, rank: int, step_size: float, rng: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns B [.., out, r], R [.., r, r] and A [.., r, in] of a weight (lines 3 and 4).

    B R A is the best approximation of -eta sign(G) of rank r; where all of G is zero, R is.

    Args:
        gradient: G, [out, in], or [M, out, in] of a layer's experts.
        rank: r.
        step_size: eta.
        rng: Draws what the singular vectors are found from, and those of a zero.
    """
    *experts, outputs, inputs = gradient.shape
    up = random_orthonormal((*experts, outputs, rank), rng)
    down = random_orthonormal((*experts, inputs, rank), rng).mT
    middle = torch.zeros(*experts, rank, rank)
    seen = gradient.flatten(-2).any(-1)[..., None, None]
    if bool(seen.any()):
        found = leading(-step_size * gradient.sign(), rank, rng)
        up, down = torch.where(seen, found.u, up), torch.where(seen, found.vh, down)
        middle = torch.where(seen, torch.diag_embed(found.s), middle)
    return up.contiguous(), middle, down.contiguous()


def whole_gradients(gradients: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields every module with its gradient [.., out, in], rebuilt where it is given by its sketches."""
    for name, value in gradients.items():
        module, leaf = name.rsplit(".", 1)
        if leaf == "delta":
            yield module, value
        elif leaf == "lora_B":
            right = gradients[f"{module}.lora_A"]
            _, psi = probes(seed, module, value.shape[-2], right.shape[-1], value.shape[-1])
            found = reconstructed(value, right, psi)
            yield module, found.up @ found.down


def _basis(work: LocalWork) -> dict[str, Tensor]:
    """Returns A and B, from the download or from the client's memory; nothing where neither has them."""
    return work.download.part(BASIS) or dict(work.memory.tensors)
