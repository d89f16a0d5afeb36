"""Pre-training of the English checkpoint: the recipe, its steps, and a state that a killed run resumes from."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeForCausalLM

from fedguild.core.errors import FedGuildError
from fedguild.core.files import replacing
from tools.english.architecture import Sizes, new_model
from tools.english.corpus import Corpus
from tools.english.experts import use_trainable_experts

_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Recipe:
    """The training recipe of the checkpoint, without its duration.

    The learning rate warms up and then stays at its peak; a decay to zero can be run from any state of
    that phase and leaves the state as it is, so that training may continue from it later.

    Attributes:
        sizes: The model's sizes.
        seed: The seed of the initial weights and the order of the data.
        row_tokens: Length of a training row.
        batch_rows: Rows per step.
        workers: Threads that share a step's rows. Each computes the gradient of its part with one thread
            of its own, so the result depends on this number but not on the machine's.
        learning_rate: The peak learning rate.
        warm_up_steps: Steps until the peak.
        weight_decay: AdamW's, on matrices only.
        balance: Weight of the load-balancing loss, OLMoE's.
        router_z: Weight of the router z-loss, OLMoE's; it keeps the logits near zero, not the routing even.
    """

    sizes: Sizes = field(default_factory=Sizes)
    seed: int = 0
    row_tokens: int = 512
    batch_rows: int = 8
    workers: int = 2
    learning_rate: float = 2e-3
    warm_up_steps: int = 100
    weight_decay: float = 0.1
    balance: float = 0.01
    router_z: float = 0.001

    @property
    def step_tokens(self) -> int:
        """Tokens per step."""
        return self.row_tokens * self.batch_rows

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step before the decay, counted from 0."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up_steps)


@dataclass(frozen=True)
class Losses:
    """A step's losses.

    Attributes:
        nats: Cross-entropy per token.
        balance: Load-balancing loss, 1 where every expert gets the same share.
    """

    nats: float
    balance: float


@dataclass
class Pretraining:
    """A model in training.

    Attributes:
        corpus: The corpus.
        recipe: The recipe.
        model: Its weights, in fp32; products run in bf16.
        step: Steps done.
        decay_from: Step at which the learning rate began to decay; None before.
    """

    corpus: Corpus
    recipe: Recipe
    model: OlmoeForCausalLM = field(init=False)
    step: int = field(default=0, init=False)
    decay_from: int | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        recipe = self.recipe
        self.model = new_model(self.corpus.tokenizer, recipe.sizes, recipe.seed)
        use_trainable_experts(self.model)
        self.model.set_attn_implementation("eager")  # half the time of sdpa on a CPU at 512 tokens
        self.model.train()
        self._parameters = dict(self.model.named_parameters())
        shared = {id(parameter): parameter for parameter in self._parameters.values()}
        self._replicas = [copy.deepcopy(self.model, dict(shared)) for _ in range(recipe.workers)]
        matrices = [parameter for parameter in self._parameters.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in self._parameters.values() if parameter.dim() <= 1]
        groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95), fused=True)
        for parameter in self._parameters.values():
            moments = {name: torch.zeros_like(parameter) for name in _MOMENTS}
            self._optimizer.state[parameter] = {"step": torch.tensor(0.0), **moments}

    @property
    def tokens(self) -> int:
        """Tokens trained on."""
        return self.step * self.recipe.step_tokens

    def run(self, steps: int, decay_to: int | None = None) -> Iterator[Losses]:
        """Runs a number of steps, yielding the losses of each.

        Args:
            steps: The number of steps.
            decay_to: Step at which the learning rate reaches zero, linearly from `decay_from`; None for no decay.
        """
        recipe = self.recipe
        with _one_thread_each(), ThreadPoolExecutor(recipe.workers) as pool:
            for _ in range(steps):
                rate = recipe.learning_rate_at(self.step)
                if decay_to is not None and self.decay_from is not None:
                    rate *= (decay_to - self.step) / (decay_to - self.decay_from)
                for group in self._optimizer.param_groups:
                    group["lr"] = rate
                rows = self.corpus.rows(
                    self.step * recipe.batch_rows, recipe.batch_rows, recipe.row_tokens, recipe.seed
                )
                parts = torch.from_numpy(rows).chunk(recipe.workers)
                results = list(pool.map(self._gradients, self._replicas, parts))
                totals, *others = (list(gradients) for gradients, _ in results)
                for gradients in others:
                    torch._foreach_add_(totals, gradients)
                for parameter, total in zip(self._parameters.values(), totals, strict=True):
                    parameter.grad = total
                torch.nn.utils.clip_grad_norm_(self._parameters.values(), 1.0)
                self._optimizer.step()
                self._optimizer.zero_grad()
                self.step += 1
                nats, balance = torch.stack([losses for _, losses in results]).mean(0).tolist()
                yield Losses(nats, balance)

    def exported(self) -> OlmoeForCausalLM:
        """Returns a copy of the model in bf16, computed by transformers' own code."""
        model = new_model(self.corpus.tokenizer, self.recipe.sizes, self.recipe.seed)
        model.load_state_dict(self.model.state_dict())
        model.bfloat16().eval()
        return model

    def save(self, path: Path) -> None:
        """Writes the state of model and optimizer and the position in the data, atomically."""
        tensors: dict[str, Tensor] = {}
        for name, parameter in self._parameters.items():
            tensors[name] = parameter.detach()
            tensors |= {f"{moment}.{name}": self._optimizer.state[parameter][moment] for moment in _MOMENTS}
        position = {"step": self.step, "decay_from": self.decay_from}
        with replacing(path) as temporary:
            save_file(tensors, temporary, {"position": json.dumps(position), "made_with": self._made_with()})

    def load(self, path: Path) -> None:
        """Continues from a saved state.

        Raises:
            FedGuildError: it was saved with another recipe or corpus.
        """
        with safe_open(path, "pt") as stored:
            metadata = stored.metadata()
            if metadata["made_with"] != self._made_with():
                raise FedGuildError(
                    f"{path} was made with another recipe or from other text: {metadata['made_with']}",
                    "Give another output folder, or delete this one to begin again.",
                )
            position = json.loads(metadata["position"])
            self.step, self.decay_from = position["step"], position["decay_from"]
            with torch.no_grad():
                for name, parameter in self._parameters.items():
                    parameter.copy_(stored.get_tensor(name))
                    state = self._optimizer.state[parameter]
                    state["step"].fill_(self.step)
                    for moment in _MOMENTS:
                        state[moment].copy_(stored.get_tensor(f"{moment}.{name}"))

    def _made_with(self) -> str:
        return json.dumps({**asdict(self.recipe), "corpus": self.corpus.digest})

    def _gradients(self, model: OlmoeForCausalLM, rows: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Returns a worker's share of the gradient, and its cross-entropy and balancing loss [2]."""
        recipe = self.recipe
        share = len(rows) / recipe.batch_rows
        with torch.autocast("cpu", torch.bfloat16):
            output = model(input_ids=rows[:, :-1], output_router_logits=True, use_cache=False)
            nats = functional.cross_entropy(output.logits.flatten(0, 1), rows[:, 1:].flatten())
        routers = [logits.float() for logits in output.router_logits]
        balance = torch.stack([balance_loss(logits, recipe.sizes.active) for logits in routers]).mean()
        router_z = torch.stack([logits.logsumexp(-1).square().mean() for logits in routers]).mean()
        loss = nats + recipe.balance * balance + recipe.router_z * router_z
        gradients = torch.autograd.grad(loss * share, list(model.parameters()))
        return gradients, torch.stack([nats.detach(), balance.detach()])


def balance_loss(logits: Tensor, active: int) -> Tensor:
    """Returns OLMoE's load-balancing loss of one layer, M Σ_i f_i P_i (OLMoE, Section 2, L_LB).

    f_i is expert i's share of the choices and P_i its mean probability, so that even routing gives 1.

    Args:
        logits: Router logits [N, M].
        active: Experts that each token chooses.
    """
    probabilities = logits.softmax(-1)
    experts = logits.shape[1]
    chosen = torch.bincount(probabilities.topk(active, dim=-1).indices.flatten(), minlength=experts)
    return experts * (chosen / chosen.sum() * probabilities.mean(0)).sum()


@contextlib.contextmanager
def _one_thread_each() -> Iterator[None]:
    """Lets an operation use one thread inside the block; the workers are the parallelism."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
