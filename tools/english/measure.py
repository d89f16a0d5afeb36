"""Measurements of the English checkpoint on held-out text: its loss by active experts, and its routing."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import OlmoeForCausalLM

from tools.english.corpus import Corpus
from tools.tiny.scoring import using_experts

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class LayerRouting:
    """One layer's routing of the held-out tokens, at the model's own number of active experts.

    Attributes:
        use_entropy: Entropy of the experts' shares of the choices, divided by ln M: 1 where all are used alike.
        gini: Gini coefficient of those shares, from 0 (all alike) to 1 - 1/M.
        token_entropy: Mean entropy of a token's probabilities over all experts, divided by ln M: 1 where
            the router has no preference.
        top_mass: Mean sum of the active experts' weights, which are not renormalised.
    """

    use_entropy: float
    gini: float
    token_entropy: float
    top_mass: float


@dataclass(frozen=True)
class Measurements:
    """The measurements in the model card, all on held-out text.

    Attributes:
        tokens: Tokens predicted.
        nats: Active experts -> cross-entropy per token.
        unigram_nats: The same for the training text's token frequencies, without a model.
        tokens_per_character: Of the held-out text.
        routing: Of each layer.
    """

    tokens: int
    nats: dict[int, float]
    unigram_nats: float
    tokens_per_character: float
    routing: tuple[LayerRouting, ...]


@torch.inference_mode()
def measure(model: OlmoeForCausalLM, corpus: Corpus, active_experts: Sequence[int], row_tokens: int) -> Measurements:
    """Measures the model on the held-out documents, in rows of `row_tokens` tokens as in training."""
    stream = torch.from_numpy(corpus.held_out.astype(np.int64))
    rows = [stream[start : start + row_tokens + 1] for start in range(0, len(stream) - 1, row_tokens)]
    full = [row for row in rows if len(row) > row_tokens]
    batches = [torch.stack(full[i : i + _ROWS_AT_ONCE]) for i in range(0, len(full), _ROWS_AT_ONCE)]
    batches += [row.unsqueeze(0) for row in rows[len(full) :]]
    tokens = len(stream) - 1
    nats = {}
    for count in active_experts:
        with using_experts(model, count):
            nats[count] = sum(_nats(model, batch) for batch in batches) / tokens
    counts = np.bincount(corpus.train, minlength=model.config.vocab_size) + 1.0
    frequencies = counts / counts.sum()
    return Measurements(
        tokens=tokens,
        nats=nats,
        unigram_nats=float(-np.log(frequencies[corpus.held_out[1:]]).mean()),
        tokens_per_character=len(stream) / corpus.held_out_characters,
        routing=_routing(model, batches),
    )


def _nats(model: OlmoeForCausalLM, rows: Tensor) -> float:
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return float(functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum"))


def _routing(model: OlmoeForCausalLM, batches: Sequence[Tensor]) -> tuple[LayerRouting, ...]:
    """Returns every layer's routing over all rows."""
    layers, experts = model.config.num_hidden_layers, model.config.num_experts
    counts = torch.zeros(layers, experts, dtype=torch.float64)
    entropy, mass = (torch.zeros(layers, dtype=torch.float64) for _ in range(2))
    tokens = 0
    for rows in batches:
        output = model.model(input_ids=rows[:, :-1], use_cache=False, output_router_logits=True)
        tokens += rows[:, :-1].numel()
        for layer, logits in enumerate(output.router_logits):
            probabilities = logits.float().softmax(-1)
            top = probabilities.topk(model.config.num_experts_per_tok, dim=-1)
            counts[layer] += torch.bincount(top.indices.flatten(), minlength=experts)
            mass[layer] += top.values.sum()
            entropy[layer] += torch.special.entr(probabilities).sum()
    shares = counts / counts.sum(1, keepdim=True)
    most = math.log(experts)
    return tuple(
        LayerRouting(
            use_entropy=float(torch.special.entr(shares[layer]).sum()) / most,
            gini=_gini(shares[layer]),
            token_entropy=float(entropy[layer]) / tokens / most,
            top_mass=float(mass[layer]) / tokens,
        )
        for layer in range(layers)
    )


def _gini(shares: Tensor) -> float:
    """Returns the Gini coefficient Σ_ij |s_i - s_j| / 2M of shares [M] that sum to 1 (UB-SMoE, Eq. 62)."""
    return float((shares.unsqueeze(0) - shares.unsqueeze(1)).abs().sum()) / (2 * len(shares))
