"""PFL-MoE's gate and mixture, one sequence, one token and one number at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tests.oracles.lora import MergedModel


def features(model: Any, prompt: Sequence[int], kind: str) -> Tensor:
    """Phi [H] of one prompt, from a plain transformers model."""
    ids = torch.tensor([list(prompt)])
    with torch.no_grad():
        if kind == "embedding":
            states = model.get_input_embeddings()(ids)[0]
        else:
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state[0]
    total = torch.zeros_like(states[0])
    for state in states:
        total = total + state
    return total / len(states)


def gate(phi: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """g, a number that carries gradients to w and b."""
    score = bias
    for axis in range(len(phi)):
        score = score + weight[axis] * phi[axis]
    return 1 / (1 + torch.exp(-score))


def mixture(g: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """g · first + (1 - g) · second over the logits of one token, [V]."""
    return torch.stack([g * first[v] + (1 - g) * second[v] for v in range(len(first))])


def loss(logits: Tensor, target: int) -> Tensor:
    """-log softmax(logits)[target]."""
    return torch.log(sum(torch.exp(value - logits[target]) for value in logits))


class Mixture:
    """One client's own model: two merged models and a gate.

    Args:
        model: The plain model, without adapters.
        first: With the global adapter.
        second: With the personal one.
        weight: w [H].
        bias: b.
        kind: What phi is the mean of.
    """

    def __init__(
        self, model: Any, first: MergedModel, second: MergedModel, weight: Tensor, bias: Tensor, kind: str
    ) -> None:
        self.model, self.first, self.second = model, first, second
        self.weight, self.bias, self.kind = weight, bias, kind

    def losses(self, ids: Sequence[int], prompt: int) -> Tensor:
        """The negative log-likelihood of every token of `ids[prompt:]`."""
        g = gate(features(self.model, ids[:prompt], self.kind), self.weight, self.bias)
        first, second = (side.logits(ids).detach() for side in (self.first, self.second))
        return torch.stack([loss(mixture(g, first[at - 1], second[at - 1]), ids[at]) for at in range(prompt, len(ids))])

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int, end: int) -> list[int]:
        """The greedy continuation, each token from two whole forward passes; cut before `end`."""
        g = gate(features(self.model, prompt, self.kind), self.weight, self.bias)
        ids = list(prompt)
        for _ in range(length):
            token = int(mixture(g, self.first.logits(ids)[-1], self.second.logits(ids)[-1]).argmax())
            if token == end:
                break
            ids.append(token)
        return ids[len(prompt) :]
