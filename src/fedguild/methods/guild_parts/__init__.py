"""Guild-parts: Guild with the parts that its ablation took out: a rescaler, smaller k, balancing, mixtures, sketches.

For that ablation (`guild/ablation-english`), and for whoever wants to try a part elsewhere: with all of them off it is
Guild, bit for bit. The lines are those of `fedguild.methods.guild`; each part is an option, off by default:
    a  in line 4 a factor s_i on the routed outputs of each layer, which the client trains, keeps and sends; s_k is the
           mean over the clients of a budget (FLAME's rescaler)
    b  in line 4, with probability rho, a step at a smaller k of the federation's  -> smaller_steps.py
    c  route by top-k(logits + phi), with the model's own weights of the chosen  -> selection_bias.py; a client sends
           u_i / k_i, each expert's share of its activations, the server takes their mean u by n_i and moves
           phi = clip(phi + zeta sign(1 / M - u))  -> balancing.py
    d  in line 7 the lambda_i in {0, 1/4, 1/2, 3/4, 1} of the least loss on examples that the client holds out; by
           expert less for those that it did not use  -> mixture.py
    e  in lines 5 and 6 the mean of the products B_i A_i in place of those of A_i and of B_i: a client sends two
           sketches of B_i A_i - B A, and the server recovers its factors from their mean  -> sketch.py
    f  in line 3 rows of R A that are orthogonal and of norm c, but not turned to the singular vectors

Symbols: s `rescaler`, rho `smaller_probability`, zeta `balance_step`, clip `balance_limit`, M `num_experts`, lambda_i
`choose_mix`, and `mix` for a client that could not choose yet; part f `turned`.

Every line that the server takes is a mean, so it may be a secure sum; what leaves a client is a change of what it
received, so that one clipping and one noise cover it. Readings (docs/methods/guild-parts.md):
    - A lambda_i is chosen when a round begins: of the theta that the client has just received, and the theta_i that it
      kept in its last round.
    - A client begins with s_i = 1 and goes on with its own, as in FLAME. It receives u and s_k so that what it sends in
      their place is a change; its training does not depend on them.
    - Sketches are added to the theta that the client received, in its shapes, so that they are a change of it, too.
    - A step at a smaller k uses the client's s_i; the static ratio is that of the smaller k.
    - With the basis as received and lambda = 0 it is FLAME at t = 0 with the same rescaler, bit for bit from one
      start.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import train
from fedguild.config.privacy import Unit
from fedguild.errors import ConfigError
from fedguild.methods.guild_parts.balancing import balanced, usage_of, within_reach
from fedguild.methods.guild_parts.mixture import USAGE, chosen_mixes, mixture
from fedguild.methods.guild_parts.observations import observations
from fedguild.methods.guild_parts.selection_bias import PHI, SelectionBias
from fedguild.methods.guild_parts.sketch import SEED, changes, refactored, sketched, zeros
from fedguild.methods.guild_parts.smaller_steps import at_active_experts, below, drawn_experts
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter, trainable_shapes
from fedguild.payload import ADAPTER, Payload, with_part
from fedguild.secure.form import Contribution, Form
from fedguild.seeding import new_seed
from fedguild.server.aggregation import WeightedMean
from fedguild.server.limits import require_within_top_k
from fedguild.server.linear import EXAMPLES, SecureMeans, changes_of, means_of, one, values_of
from fedguild.server.method import RUNNING_MEAN, Deployment, Method, NotPrivate, Observation, Upload, in_part
from fedguild.server.rescaler import RESCALER, Rescaler, scale_parts, split_scales
from fedguild.server.settings import InBasisSettings
from fedguild.server.singular_basis import change_basis, out_of_basis, started
from fedguild.server.uploads import weight_of

ACTIVE = "active_experts"
"""The part with k: all of the federation's in the state, those below a client's own in its download."""
MIX = "mix"
"""lambda_i in a client's memory."""


class GuildPartsSettings(InBasisSettings):
    """The options of Guild, and those of the parts."""

    rescaler: Rescaler = "none"
    balance_step: float = Field(
        0, ge=0, description="zeta: how far phi moves in a round, in units of the routers' logits; 0 for no phi"
    )
    balance_limit: float = Field(1.0, gt=0, description="the largest magnitude of phi")
    smaller_probability: float = Field(
        0,
        ge=0,
        le=1,
        description="rho: share of a client's steps that run one of the federation's smaller numbers of active experts",
    )
    choose_mix: bool = Field(
        False,
        description="whether a client chooses its lambda_i by itself, on examples that it holds out; `mix` is then the "
        "first one",
    )
    mix_by: Literal["client", "expert"] = Field(
        "client",
        description="what has a lambda: a client; or each of its experts, lambda_i times min(1, M u_i / k_i), which is "
        "0 for one that it did not activate",
    )
    held_out: float = Field(
        0.1, gt=0, lt=1, description="share of a client's examples that is held out of training to choose lambda_i"
    )
    held_out_examples: int = Field(32, ge=1, description="largest number of examples that a client holds out")
    mean: Literal["apart", "sketch"] = Field(
        "apart",
        description="what the server takes the mean of: A and B apart; or the products B A, of which clients send two "
        "sketches in as many numbers (needs `mix: 0`)",
    )
    turned: bool = Field(
        True, description="whether the rows of A in the basis singular are turned to the singular vectors"
    )

    @model_validator(mode="after")
    def _has_no_option_without_effect(self) -> Self:
        needs: dict[str, tuple[bool, str]] = {
            "turned": (self.norm is not None, "a singular basis"),
            "balance_limit": (self.balance_step > 0, "balance_step above 0"),
            "held_out": (self.choose_mix, "choose_mix: true"),
            "held_out_examples": (self.choose_mix, "choose_mix: true"),
            "mix_by": (
                (self.choose_mix or self.mix > 0) and not {*self.targets} <= {"attention", "mlp", "router"},
                "a mix above 0 or choose_mix: true, and LoRA on experts",
            ),
        }
        for name, (takes_effect, needed) in needs.items():
            if not takes_effect and getattr(self, name) != type(self).model_fields[name].default:
                raise ValueError(f"{name} has no effect without {needed}")
        return self

    @model_validator(mode="after")
    def _mixes_no_sketches(self) -> Self:
        if self.mean == "sketch" and (self.mix > 0 or self.choose_mix):
            raise ValueError(
                "mean: sketch gives other factors of theta after each round, which cannot be mixed with those that a "
                "client trained: set mix: 0 and choose_mix: false"
            )
        return self

    @property
    def has_means_beside(self) -> bool:
        """Whether the aggregate has means beside that of the part `adapter`."""
        return self.rescaler in ("per_layer", "shared") or self.balance_step > 0


class GuildParts(Method):
    """Guild with further parts; see the module's docstring.

    The state's adapter is theta, a client's memory its theta_i, s_i and lambda_i.
    """

    Settings = GuildPartsSettings
    settings: GuildPartsSettings
    needs_experts = True
    costs = replace(
        RUNNING_MEAN,
        note="Steps at a smaller k are counted as those at a client's own; with `choose_mix` the choice of lambda runs "
        "forward passes that are not counted.",
    )
    is_stepped = True  # theta's weights are plain; s, u and phi come beside it
    not_private = NotPrivate(example="may count activations and choose a mix on examples that it holds out")
    keeps_for_training = True  # its s_i
    starts_as = "guild"

    def __init__(self, settings: GuildPartsSettings) -> None:
        super().__init__(settings)
        self.sketches = settings.mean == "sketch"
        if self.sketches:
            self.is_mean = not settings.has_means_beside
            self.not_adapters = "sends sketches of its products' changes (method.mean=sketch)"

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns LoRA at full rank with the budget's k_i active experts, the rescaler s_i, and phi."""
        model.require_experts("Guild-parts")
        settings, active = self.settings, require_within_top_k(model, budget)
        scales = scale_parts(settings.rescaler, model.top_k / active)
        phi = (SelectionBias(),) if settings.balance_step else ()
        return AdapterPlan((settings.lora, *scales, *phi), active)

    def start(self, model: ModelInfo, budgets: Sequence[Budget], rng: torch.Generator) -> Payload:
        """Line 1; every budget's mean s starts at 1, phi at 0, u evenly."""
        theta = started(model, self.settings.lora, self.settings.norm, rng)
        scales = initial_adapter(model, AdapterPlan(scale_parts(self.settings.rescaler, 1.0)), rng)
        counts = sorted({float(budget.active_experts) for budget in budgets})
        return Payload.of(
            {
                ADAPTER: theta,
                RESCALER: {f"{budget.name}/{name}": scale for budget in budgets for name, scale in scales.items()},
                PHI: {name: torch.zeros(shape) for name, shape in self.phi_shapes(model).items()},
                USAGE: {name: torch.full(shape, 1 / shape[0]) for name, shape in self.usage_shapes(model).items()},
                ACTIVE: {"k": torch.tensor(counts)} if self.settings.smaller_probability else {},
            },
            {SEED: new_seed(rng)} if self.sketches else {},
        )

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Line 2, and the smaller k of part b; phi is with theta, which clients of a secure round find to be equal."""
        return Payload.of(
            {
                ADAPTER: {**state.part(ADAPTER), **state.part(PHI)},
                RESCALER: state.part(f"{RESCALER}/{client.budget.name}"),
                USAGE: state.part(USAGE),
                ACTIVE: {name: torch.tensor(below(k, client)) for name, k in state.part(ACTIVE).items()},
            },
            state.scalars,
        )

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 3 to 5, and before them the choice of part d."""
        settings, slots = self.settings, range(len(cohort.work))
        for slot in slots:
            self._load(cohort, slot)
        mixes: list[float] = []
        if settings.choose_mix:
            held_out = [cohort.hold_out(slot, settings.held_out, settings.held_out_examples) for slot in slots]
            mixes = chosen_mixes(cohort, held_out, settings.mix)
            for slot in slots:
                self._load(cohort, slot)
        bases = change_basis(cohort, settings.norm, turned=settings.turned)  # part f
        begun = [cohort.read(slot) for slot in slots] if self.sketches else []
        self._train(cohort)
        mixes_any = settings.mix > 0 or settings.choose_mix
        by_expert = mixes_any and settings.mix_by == "expert"
        uploads = []
        for slot in slots:  # line 5
            trained = cohort.read(slot)
            theta, scales = split_scales(out_of_basis(trained, bases[slot]))
            if begun:  # part e
                theta = sketched(cohort.work[slot].download, begun[slot], trained, cohort.round)
            usage = usage_of(cohort, slot) if settings.balance_step or by_expert else {}
            uploads.append(
                Payload.of({ADAPTER: theta, RESCALER: scales, USAGE: usage if settings.balance_step else {}})
            )
            cohort.keep(slot, with_part(RESCALER, scales))
            if mixes_any:
                cohort.keep(slot, with_part(ADAPTER, theta))
            if by_expert:
                layers = cohort.model.backbone.info.moe
                cohort.keep(slot, with_part(USAGE, {layer.experts: usage[layer.name] for layer in layers}))
            if mixes:
                cohort.keep(slot, {MIX: torch.tensor(mixes[slot])})
        return uploads

    def _load(self, cohort: Cohort, slot: int) -> None:
        """Sets a client's slot to the theta and phi that it received, and to the s_i that it kept."""
        work = cohort.work[slot]
        cohort.load(slot, {**work.download.part(ADAPTER), **work.memory.part(RESCALER)})

    def _train(self, cohort: Cohort) -> None:
        """Line 4, with the steps of part b."""
        settings = self.settings
        if not settings.smaller_probability:
            train(cohort)
            return
        smaller = [below(work.download.part(ACTIVE)["k"], work.client) for work in cohort.work]
        for step in cohort.steps():
            experts = drawn_experts(cohort, step.index, smaller, settings.smaller_probability)  # part b
            with at_active_experts(cohort, experts, static=settings.rescaler == "static"):
                step.backward(step.forward())
            step.apply()

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        """Line 6, and the means of parts a, c and e, as running means over the uploads."""
        theta = WeightedMean(torch.float64 if self.sketches else torch.float32)
        rescaler, usage, before = WeightedMean(), WeightedMean(), state.part(USAGE)
        received, number = state.part(ADAPTER), 0
        for upload in uploads:
            payload, size = upload.payload, float(upload.client.examples)
            sent, number = payload.part(ADAPTER), max(number, upload.round)
            theta.add(changes(sent, received) if self.sketches else sent, size)
            usage.add(within_reach(payload.part(USAGE), before), size)
            scales = {f"{upload.client.budget.name}/{name}": s for name, s in payload.part(RESCALER).items()}
            rescaler.add(scales, weight_of(upload, "uniform"))
        scales = rescaler.result(state.part(RESCALER))
        means = theta.result(zeros(received) if self.sketches else received)
        means = refactored(state, means, number) if self.sketches else means  # part e
        return self._moved(state, means, scales, usage.result(before))

    def _moved(
        self, state: Payload, theta: Mapping[str, Tensor], scales: Mapping[str, Tensor], usage: Mapping[str, Tensor]
    ) -> Payload:
        """Returns the next state, with phi of part c."""
        step, limit = self.settings.balance_step, self.settings.balance_limit
        phi = {
            name: balanced(before, usage[name.removesuffix(f".{PHI}")], step, limit)
            for name, before in state.part(PHI).items()
        }
        parts = {ADAPTER: theta, RESCALER: scales, PHI: phi, USAGE: usage, ACTIVE: state.part(ACTIVE)}
        return Payload.of(parts, state.scalars)

    def linear_form(self, model: ModelInfo, budgets: Sequence[Budget]) -> Form:
        """Line 6: theta and u by n_i, each budget's s by its clients alone."""
        theta, scales = split_scales(trainable_shapes(model, self.plan(model, budgets[0])))
        means = means_of(ADAPTER, theta) | means_of(USAGE, self.usage_shapes(model))
        owned = [f"{RESCALER}/{budget.name}" for budget in budgets if scales]
        for key in owned:
            means |= means_of(key, scales, key, pooled=RESCALER)  # a budget may have one client
        return Form(means, {EXAMPLES: 1, **dict.fromkeys(owned, 1)})

    def linear_terms(self, model: ModelInfo, client: ClientInfo, download: Payload, upload: Payload) -> Contribution:
        """Returns the client's terms of these means."""
        before, key = download.part(USAGE), f"{RESCALER}/{client.budget.name}"
        scales = upload.part(RESCALER)
        own = {key: one(weight_of(Upload(0, client, upload), "uniform"))} if scales else {}
        return Contribution(
            {
                **changes_of(ADAPTER, upload.part(ADAPTER), download.part(ADAPTER)),
                **changes_of(USAGE, within_reach(upload.part(USAGE), before), before),
                **values_of(key, scales),
            },
            {EXAMPLES: one(client.examples), **own},
        )

    def aggregate_means(self, state: Payload, means: SecureMeans) -> Payload:
        """Line 6, and parts a, c and e."""
        received = state.part(ADAPTER)
        if self.sketches:
            theta = refactored(state, means.result(ADAPTER, zeros(received)), means.round)
        else:
            theta = means.moved(ADAPTER, received)
        usage = means.moved(USAGE, state.part(USAGE))
        return self._moved(state, theta, means.result(RESCALER, state.part(RESCALER)), usage)

    def expected_upload(self, model: ModelInfo, client: ClientInfo, download: Payload) -> Mapping[str, tuple[int, ...]]:
        """Returns the names and shapes of theta_i, s_i and u_i / k_i."""
        theta, scales = split_scales(trainable_shapes(model, self.plan(model, client.budget)))
        usage = self.usage_shapes(model)
        return {**in_part(ADAPTER, theta), **in_part(RESCALER, scales), **in_part(USAGE, usage)}

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget) -> Deployment:
        """Returns theta and phi with the budget's k and s_k."""
        tensors = {**state.part(ADAPTER), **state.part(f"{RESCALER}/{budget.name}"), **state.part(PHI)}
        return Deployment(self.plan(model, budget), tensors)

    def excerpt(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        """Returns theta, phi, and the s_k of the client's own budget."""
        scales = f"{RESCALER}/{client.budget.name}"
        return Payload.of({part: state.part(part) for part in (ADAPTER, scales, PHI)})

    def personalize(self, excerpt: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Line 7; the global model for a client that never took part."""
        deployment, own = self.deploy(excerpt, model, client.budget), memory.part(ADAPTER)
        tensors = {**deployment.tensors, **memory.part(RESCALER)}
        if own:
            mix = float(memory.tensors[MIX]) if self.settings.choose_mix else self.settings.mix
            tensors |= mixture(tensors, own, mix, memory.part(USAGE))
        return Deployment(deployment.plan, tensors)

    def as_received(self, excerpt: Payload, model: ModelInfo, client: ClientInfo, memory: Payload) -> Deployment:
        """Returns theta and phi with the client's own s_i, with which its next training begins."""
        return self.personalize(excerpt, model, client, Payload.of({RESCALER: memory.part(RESCALER)}))

    def fitted(self, model: ModelInfo, clients: int, *, exact: bool) -> Method:
        """Returns the method with targets that the model has.

        Raises:
            ConfigError: sketches are not to travel as they are.
        """
        if self.sketches and not exact:
            raise ConfigError(
                "method.mean is sketch, but federation.codec rounds the adapter on which a client's sketches are sent.",
                "Set federation.codec=fp32, or method.mean=apart.",
            )
        return super().fitted(model, clients, exact=exact)

    def privacy_refusal(self, unit: Unit) -> str:
        """Returns why it cannot run privately; sketches of a plain training can, as Guild's adapters."""
        plain = self.is_mean and not self.settings.smaller_probability
        return "" if plain else super().privacy_refusal(unit)

    def observe(self, state: Payload, model: ModelInfo) -> list[Observation]:
        """Returns the mean s of every budget's clients, and how evenly the experts are used, with their phi."""
        return observations(state, model)

    def phi_shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the names and shapes of phi; none without balancing."""
        return SelectionBias().shapes(model) if self.settings.balance_step else {}

    def usage_shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the name of every MoE layer -> [M]; none without balancing."""
        return {layer.name: (layer.num_experts,) for layer in model.moe} if self.settings.balance_step else {}
