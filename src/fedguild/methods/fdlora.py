"""FDLoRA: a shared and a personal LoRA, fused by a few-shot search.

J. Qi, Z. Luan, S. Huang, C. Fung, H. Yang, D. Qian, "FDLoRA: Personalized Federated Learning of
Large Language Model via Dual LoRA Tuning", arXiv 2406.07925, 2024.

The algorithm, in our words (Algorithm 1):
    1  stage 1, each client i: train a LoRA on its own data; it is the personal theta_p^i
    2  server: theta_s = mean_i theta_p^i; v = 0
    3  stage 2, each round t = 1, 2, ..., for the sampled clients i:
    4      client: theta_s^i = InnerOpt(theta_s), K steps
    5      client: if t mod H = 0: theta_p^i = theta_s^i
    6      server: g = mean_i (theta_s - theta_s^i)
    7      server: v = m v + g;  theta_s = theta_s - eta (g + m v)          (OuterOpt, Nesterov)
    8      client: AdaFusion: w1, w2 = argmin loss(w1 theta_s + w2 theta_p^i) + lambda (|w1| + |w2|) / 2
               over its few-shot examples, by NGOpt in [-1.5, 1.5]^2 from (0, 0)
    9      client: its model is w1 theta_s + w2 theta_p^i, A and B each; theta_s, theta_p^i stay as they are

Symbols: theta_s `shared`, theta_p `personal`, v `velocity`, H `synchronise_every`, eta
`outer_learning_rate`, m `outer_momentum`, lambda `regularisation`, w `weights`. InnerOpt and K are
the run's `training` settings.

Readings and deviations (docs/methods/fdlora.md):
    - Stage 1 is the run's first round, so t is the round minus 1, and a run of T rounds trains as
      much as T rounds of any other method. A client that was not sampled then takes its first
      theta_s^i as theta_p^i.
    - The client searches w at the end of its local update, where its data is, hence with the theta_s
      that it has received; its model applies w to the theta_s that the round led to, as lines 8 and 9
      say. After stage 1 there is no fused model yet and w is (0, 1).
    - The few-shot examples are held out of training and the same in every evaluation.
    - The factors are fused separately: (w1 B_s + w2 B_p)(w1 A_s + w2 A_p) has cross terms. The released
      comparison does the same.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from pydantic import Field
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.training import load_received, train
from fedguild.core.errors import ConfigError
from fedguild.core.payload import ADAPTER, Payload, with_part
from fedguild.core.seeding import derive
from fedguild.data.batches import Encoded
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.method import GLOBAL, Deployment, Facts, Method, NotPrivate, Own, Roster, ServerCosts
from fedguild.server.settings import Dropout, DropoutLoraSettings, Rank, Targets
from fedguild.server.terms import Means, Terms, Upload, mean

VELOCITY = "velocity"
PERSONAL = "personal"
WEIGHTS = "fusion/weights"
"""Name of (w1, w2), [2], in a client's memory."""
BOUND = 1.5


class FDLoRASettings(DropoutLoraSettings):
    """The options of FDLoRA; the LoRA rank is that of both adapters."""

    rank: Rank = 8
    targets: Targets = ("q_proj", "v_proj")
    dropout: Dropout = 0.05
    synchronise_every: int = Field(
        5, ge=1, description="H: in every H-th round of stage 2 the personal adapter becomes the client's shared one"
    )
    outer_learning_rate: float = Field(1.0, gt=0, description="the server's learning rate eta")
    outer_momentum: float = Field(0.5, ge=0, lt=1, description="the server's Nesterov momentum m; 0 is plain SGD")
    fusion_budget: int = Field(5, ge=1, description="pairs of weights (w1, w2) that a client tries in a search")
    fusion_batches: int = Field(5, ge=1, description="batches of few-shot examples, of the training batch size")
    held_out: float = Field(
        0.05,
        gt=0,
        lt=1,
        description="largest share of a client's examples that is held out of training for the search",
    )
    regularisation: float = Field(0.05, ge=0, description="lambda: the weight of the mean of |w1|, |w2| in the search")


class FDLoRA(Method):
    """Dual LoRA with fusion; see the module's docstring."""

    Settings = FDLoRASettings
    settings: FDLoRASettings
    facts = Facts(
        costs=ServerCosts(
            "O(n): a running mean and a momentum",
            "O(C n)",
            note="A client's search for its fusion weights runs forward passes, which the estimates leave out.",
        ),
        not_private=NotPrivate(example="searches its fusion weights on examples that it holds out"),
        not_preferences="searches its fusion weights by the loss of single answers",
        not_stepped="has a server's step of its own",
    )

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        """Returns one LoRA, the same for every budget: the two adapters take turns in it."""
        return AdapterPlan((self.settings.lora,))

    def start(self, model: ModelInfo, roster: Roster, rng: torch.Generator) -> Payload:
        """Returns the LoRA that stage 1 begins with (A random, B = 0), and v = 0.

        Raises:
            ConfigError: nevergrad is not installed.
        """
        _nevergrad()
        shared = initial_adapter(model, self.plan(model, roster.budgets[0]), rng)
        velocity = {name: torch.zeros_like(value) for name, value in shared.items()}
        return Payload.of({ADAPTER: shared, VELOCITY: velocity}, {"rounds": 0})

    def local_update(self, cohort: Cohort) -> list[Payload]:
        """Lines 1, 4 and 5, then line 8."""
        limit = self.settings.fusion_batches * cohort.settings.batch_size
        few_shot = [cohort.hold_out(slot, self.settings.held_out, limit) for slot in range(len(cohort.work))]
        load_received(cohort)
        uploads = train(cohort)
        stage_two_round = cohort.round - 1
        synchronises = stage_two_round % self.settings.synchronise_every == 0
        personal = []
        for upload, work in zip(uploads, cohort.work, strict=True):
            trained = upload.part(ADAPTER)
            personal.append(trained if synchronises else work.memory.part(PERSONAL) or trained)
        fusions = [torch.tensor([0.0, 1.0])] * len(uploads)
        if stage_two_round > 0:
            fusions = self._search(cohort, personal, few_shot)
        for slot, (adapter, weights) in enumerate(zip(personal, fusions, strict=True)):
            cohort.keep(slot, {**with_part(PERSONAL, adapter), WEIGHTS: weights})
            cohort.leave(slot, fused(weights, cohort.work[slot].download.part(ADAPTER), adapter))
        return uploads

    def terms(self, sent: Upload) -> Terms:
        """Line 2 or line 6."""
        return mean(ADAPTER, sent, "uniform")

    def update(self, state: Payload, means: Means) -> Payload:
        """Line 2 after stage 1, then lines 6 and 7."""
        shared, velocity = state.part(ADAPTER), state.part(VELOCITY)
        mean, rounds = means.moved(ADAPTER, shared), int(state.scalars["rounds"])
        if rounds > 0:
            momentum, rate = self.settings.outer_momentum, self.settings.outer_learning_rate
            gradient = {name: shared[name] - mean[name] for name in shared}
            velocity = {name: momentum * velocity[name] + gradient[name] for name in shared}
            mean = {name: shared[name] - rate * (gradient[name] + momentum * velocity[name]) for name in shared}
        return Payload.of({ADAPTER: mean, VELOCITY: velocity}, {"rounds": rounds + 1})

    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        """Line 9; theta_s for a client that has no personal adapter yet, and as the global model."""
        plan, shared, kept = self.plan(model, budget), state.part(ADAPTER), own.kept
        return Deployment(plan, fused(kept.tensors[WEIGHTS], shared, kept.part(PERSONAL)) if kept.tensors else shared)

    def _search(
        self, cohort: Cohort, personal: Sequence[Mapping[str, Tensor]], few_shot: Sequence[Sequence[Encoded]]
    ) -> list[Tensor]:
        """Line 8 for all clients of the cohort at once: returns each one's (w1, w2), [2].

        Each client's search is independent: it draws from the client's own seed and uses only its own slot's losses.
        """
        shared = [work.download.part(ADAPTER) for work in cohort.work]
        searches = [self._optimizer(cohort, client) for client in cohort.clients]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="COBYLA")
            for _ in range(self.settings.fusion_budget):
                tried = [search.ask() for search in searches]
                for slot, candidate in enumerate(tried):
                    weights = torch.from_numpy(candidate.value)
                    cohort.load(slot, fused(weights, shared[slot], personal[slot]))
                for search, candidate, loss in zip(searches, tried, mean_losses(cohort, few_shot), strict=True):
                    size = float(abs(candidate.value).mean())
                    search.tell(candidate, loss + self.settings.regularisation * size)
            return [torch.from_numpy(search.provide_recommendation().value).float() for search in searches]

    def _optimizer(self, cohort: Cohort, client: ClientInfo) -> Any:
        """Returns nevergrad's NGOpt over [-1.5, 1.5]^2 from (0, 0), seeded for a client and round."""
        nevergrad = _nevergrad()
        weights = nevergrad.p.Array(init=[0.0, 0.0], lower=[-BOUND] * 2, upper=[BOUND] * 2)
        weights.random_state.seed(derive(cohort.seed, "fusion", cohort.round, client.index) % 2**32)
        return nevergrad.optimizers.NGOpt(parametrization=weights, budget=self.settings.fusion_budget)


def fused(weights: Tensor, shared: Mapping[str, Tensor], personal: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns w1 theta_s + w2 theta_p by name, as new tensors.

    Args:
        weights: [2], w1 and w2.
        shared: theta_s.
        personal: theta_p, of the same names and shapes.
    """
    first, second = weights.tolist()
    return {name: first * value + second * personal[name] for name, value in shared.items()}


def _nevergrad() -> Any:
    """Returns the module nevergrad, which is an extra because only FDLoRA needs it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import nevergrad
    except ImportError as error:
        raise ConfigError(
            "FDLoRA searches its fusion weights with nevergrad, which is not installed.",
            'Install the extra: pip install "fedguild[fusion]".',
        ) from error
    return nevergrad


@torch.no_grad()
def mean_losses(cohort: Cohort, examples: Sequence[Sequence[Encoded]]) -> list[float]:
    """Returns every slot's mean negative log-likelihood over its response tokens, in nats; 0 if it has none."""
    sums = torch.zeros(len(examples), dtype=torch.float64)
    counts = torch.zeros(len(examples), dtype=torch.float64)
    for batch in cohort.batches(examples):
        losses = cohort.model.token_losses(batch).cpu().double()
        sums.index_add_(0, batch.group, losses)
        counts.index_add_(0, batch.group, torch.ones_like(losses))
    means: list[float] = (sums / counts.clamp(min=1)).tolist()
    return means
