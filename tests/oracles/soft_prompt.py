"""A soft prompt as its papers have it: vectors before one row's embeddings, in the plain model, one row at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class PromptedModel:
    """A plain transformers model behind a prompt [n, d]; logits are differentiable in the prompt."""

    def __init__(self, model: Any, prompt: Tensor) -> None:
        self.model = model
        self.prompt = prompt

    def logits(self, ids: Sequence[int]) -> Tensor:
        """Returns [T, V], the logits after each token of one row; those of the prompt are left out."""
        table = self.model.get_input_embeddings().weight
        rows = [*self.prompt, *(table[token] for token in ids)]
        logits: Tensor = self.model(inputs_embeds=torch.stack(rows)[None].to(table.dtype), use_cache=False).logits[0]
        return logits[len(self.prompt) :]

    def losses(self, ids: Sequence[int], prompt: int) -> Tensor:
        """Returns the negative log-likelihood of every token of `ids[prompt:]`."""
        log_p = self.logits(ids).log_softmax(dim=-1)
        return torch.stack([-log_p[at - 1, ids[at]] for at in range(prompt, len(ids))])

    @torch.no_grad()
    def greedy(self, prompt: Sequence[int], length: int, end: int) -> list[int]:
        """Returns the greedy continuation, each token from a whole forward pass; cut before `end`."""
        ids = list(prompt)
        for _ in range(length):
            token = int(self.logits(ids)[-1].argmax())
            if token == end:
                break
            ids.append(token)
        return ids[len(prompt) :]


def encode(embedding: Tensor, layers: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the prompt [n, d] of an embedding [n, d]: linear layers (weight, bias) with ReLU between, row by row."""
    prompt = []
    for row in embedding:
        hidden = row
        for at, (weight, bias) in enumerate(layers):
            outputs = [
                sum(w * x for w, x in zip(line, hidden, strict=True)) + b for line, b in zip(weight, bias, strict=True)
            ]
            hidden = torch.stack(outputs)
            if at < len(layers) - 1:
                hidden = torch.where(hidden > 0, hidden, torch.zeros_like(hidden))
        prompt.append(hidden)
    return torch.stack(prompt)
