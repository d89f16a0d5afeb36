"""Pre-training of the embedded checkpoint on the seen task families and a little plain English."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeConfig, OlmoeForCausalLM, PreTrainedTokenizerFast

from fedguild.data.batches import Encoded, collate, encode
from fedguild.data.corpora import tasks
from fedguild.data.example import Example
from fedguild.data.prompts import TEMPLATES, render
from fedguild.model.tiny.prose import paragraph
from fedguild.model.tiny.tokenizer import MAX_TOKENS
from fedguild.seeding import numpy_rng, torch_rng


@dataclass(frozen=True)
class Recipe:
    """How the checkpoint is trained.

    Attributes:
        steps: Optimizer steps.
        batch_size: Task examples per step.
        learning_rate: Peak of the schedule: linear warm-up, then a cosine down to a twentieth.
        weight_decay: AdamW's, on matrices only.
        prompt_weight: Weight of a prompt token's loss, a response token's being 1.
        english_every: One step in so many trains on plain English instead of tasks.
        english_tokens: Longest row of such a step.
    """

    steps: int = 1_500
    batch_size: int = 64
    learning_rate: float = 3e-3
    weight_decay: float = 0.05
    prompt_weight: float = 0.1
    english_every: int = 10
    english_tokens: int = 96

    def learning_rate_at(self, step: int) -> float:
        """Returns the learning rate of a step, counted from 0."""
        warm_up = max(1, self.steps // 20)
        if step < warm_up:
            return self.learning_rate * (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return self.learning_rate * (0.05 + 0.95 * (1 + math.cos(math.pi * progress)) / 2)


def new_model(tokenizer: PreTrainedTokenizerFast, seed: int) -> OlmoeForCausalLM:
    """Returns the untrained model: OLMoE's architecture, 16 experts of which 8 are active.

    As in OLMoE, the weights of the active experts are a softmax over all experts and are not
    renormalised.
    """
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        router_aux_loss_coef=0.01,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = OlmoeForCausalLM(config)
    rng = torch_rng(seed, "tiny", "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 0.05, generator=rng)
    return model


def pretrain(model: OlmoeForCausalLM, tokenizer: Any, recipe: Recipe, seed: int) -> Iterator[tuple[int, float]]:
    """Trains the model in place, yielding each step's number and loss (nats per weighted token)."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": recipe.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.98), fused=True)
    model.train()
    for step, rows in enumerate(itertools.islice(_batches(tokenizer, recipe, seed), recipe.steps)):
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate_at(step)
        loss = _loss(model, rows, tokenizer.pad_token_id, recipe.prompt_weight)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield step, float(loss.detach())
    model.eval()


@torch.inference_mode()
def exact_match(model: OlmoeForCausalLM, tokenizer: Any, examples: Sequence[Example], active_experts: int) -> float:
    """Returns the share of examples whose response greedy decoding reproduces, end token included.

    Greedy decoding reproduces a response exactly where every one of its tokens is the most
    likely one after the true tokens before it, so one forward pass decides.
    """
    was = [layer.mlp.gate.top_k for layer in model.model.layers]
    batch = collate([[encode(example, tokenizer, MAX_TOKENS)] for example in examples], tokenizer.pad_token_id)
    try:
        for layer in model.model.layers:
            layer.mlp.gate.top_k = active_experts
        logits = model(input_ids=batch.input_ids, attention_mask=batch.mask.long()).logits
    finally:
        for layer, top_k in zip(model.model.layers, was, strict=True):
            layer.mlp.gate.top_k = top_k
    right = logits.flatten(0, 1)[batch.predict_at].argmax(-1) == batch.targets
    wrong_per_example = torch.zeros(len(examples)).index_add_(0, batch.group, (~right).float())
    return float((wrong_per_example == 0).float().mean())


def tokenizer_texts(seed: int, per_family: int = 1_000) -> Iterator[str]:
    """Yields what the tokenizer is trained on: examples of every family, plain English, every template."""
    rng = numpy_rng(seed, "tiny", "tokenizer")
    for name in tasks.FAMILIES:
        for example in itertools.islice(tasks.draw(name, rng), per_family):
            yield f"{example.prompt} {example.response}"
    for _ in range(per_family):
        yield paragraph(rng, 3)
        for template in TEMPLATES:
            yield render(template, paragraph(rng, 1))


def _batches(tokenizer: Any, recipe: Recipe, seed: int) -> Iterator[list[Encoded]]:
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


def _loss(model: OlmoeForCausalLM, rows: list[Encoded], pad_id: int, prompt_weight: float) -> Tensor:
    """Returns the weighted next-token loss plus the router's load-balancing loss."""
    batch = collate([rows], pad_id)
    output = model(input_ids=batch.input_ids, attention_mask=batch.mask.long(), output_router_logits=True)
    weights = prompt_weight * batch.mask.float()
    weights.view(-1)[batch.predict_at + 1] = 1.0
    nats = functional.cross_entropy(
        output.logits[:, :-1].flatten(0, 1), batch.input_ids[:, 1:].flatten(), reduction="none"
    )
    weights = weights[:, 1:].flatten()
    router_entropy = torch.stack([_entropy(logits[batch.mask.flatten()]) for logits in output.router_logits]).mean()
    balance = model.config.router_aux_loss_coef * output.aux_loss - ENT * router_entropy
    return (nats * weights).sum() / weights.sum() + balance


def _entropy(logits: Tensor) -> Tensor:
    """Returns the mean entropy of the distributions that the rows of `logits` stand for, in nats."""
    log_probabilities = logits.float().log_softmax(-1)
    return -(log_probabilities.exp() * log_probabilities).sum(-1).mean()


ENT = 0.05
