"""Pre-training of the embedded checkpoint on the seen task families and a little plain English."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeForCausalLM

from fedguild.core.seeding import numpy_rng
from fedguild.data.batches import Encoded, collate
from fedguild.data.corpora import tasks
from fedguild.data.prompts import TEMPLATES, render
from fedguild.data.rendering import encode
from tools.tiny.prose import paragraph
from tools.tiny.tokenizer import MAX_TOKENS


@dataclass(frozen=True)
class Recipe:
    """The training recipe of the checkpoint.

    Attributes:
        steps: Optimizer steps.
        batch_size: Task examples per step.
        learning_rate: Peak of the schedule: linear warm-up, then a cosine down to a twentieth.
        weight_decay: AdamW's, on matrices only.
        prompt_weight: Weight of a prompt token's loss, a response token's being 1.
        router_entropy_weight: Reward for the entropy of each token's routing, in nats. A large
            model's routing is soft; that of a small one sharpens until a single active expert
            would do, and clients with fewer active experts would lose nothing.
        english_every: One in this many steps trains on plain English instead of tasks.
        english_tokens: Longest row of such a step.
    """

    steps: int = 800
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    prompt_weight: float = 0.1
    router_entropy_weight: float = 0.03
    english_every: int = 10
    english_tokens: int = 96

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def tokenizer_texts(seed: int, examples: int = 2_000, paragraphs: int = 1_000) -> Iterator[str]:
    """Yields the tokenizer's training texts: examples of each family, plain English, every template."""
    rng = numpy_rng(seed, "tiny", "tokenizer")
    for name in tasks.FAMILIES:
        for example in itertools.islice(tasks.draw(name, rng), examples):
            yield f"{example.prompt} {example.response}"
    for _ in range(paragraphs):
        yield paragraph(rng, 3)
        for template in TEMPLATES:
            yield render(template, paragraph(rng, 1), paragraph(rng, 1))


def pretrain(model: OlmoeForCausalLM, tokenizer: Any, recipe: Recipe, seed: int) -> Iterator[float]:
    """Trains the model in place, yielding each step's loss (nats per weighted token)."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)
    model.train()
    for step, rows in enumerate(itertools.islice(_batches(tokenizer, recipe, seed), recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        loss = _loss(model, rows, tokenizer.pad_token_id, recipe)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()
    model.eval()


def _batches(tokenizer: Any, recipe: Recipe, seed: int) -> Iterator[list[Encoded]]:
    """Yields the rows of each step, without end."""
    rng = numpy_rng(seed, "tiny", "batches")
    streams = [tasks.draw(name, rng) for name in tasks.SEEN]
    for step in itertools.count(1):
        if step % recipe.english_every == 0:
            yield [_english(tokenizer, rng, recipe.english_tokens) for _ in range(recipe.batch_size // 4)]
        else:
            chosen = rng.integers(len(streams), size=recipe.batch_size)
            yield [encode(next(streams[i]), tokenizer, MAX_TOKENS) for i in chosen]


def _english(tokenizer: Any, rng: np.random.Generator, max_tokens: int) -> Encoded:
    """Returns a passage whose every token is to be predicted."""
    ids = [tokenizer.bos_token_id, *tokenizer.encode(paragraph(rng, 6))]
    return Encoded(tuple(ids[:max_tokens]), 1)


def _loss(model: OlmoeForCausalLM, rows: list[Encoded], pad_id: int, recipe: Recipe) -> Tensor:
    """Returns the weighted next-token loss with OLMoE's load balancing and the entropy reward."""
    batch = collate([rows], pad_id)
    output = model(input_ids=batch.input_ids, attention_mask=batch.mask.long(), output_router_logits=True)
    weights = recipe.prompt_weight * batch.mask.float()
    weights.view(-1)[batch.predict_at + 1] = 1.0
    nats = functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none"
    )
    prediction = (nats * weights[:, 1:].flatten()).sum() / weights[:, 1:].sum()
    tokens = batch.mask.flatten()
    entropy = torch.stack([_entropy(logits[tokens]) for logits in output.router_logits]).mean()
    balance: Tensor = model.config.router_aux_loss_coef * output.aux_loss
    return prediction + balance - recipe.router_entropy_weight * entropy


def _entropy(logits: Tensor) -> Tensor:
    """Returns the mean entropy, in nats, of the distributions that the rows of `logits` [N, M] describe."""
    log_probabilities = logits.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1).mean()
