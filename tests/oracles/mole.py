"""FedAMoLE's mixture of LoRA experts, token by token and expert by expert (Eq. 4 to 9, 11, 13, 20, 21)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass
class LoopedModule:
    """One client's mixture on one linear layer, and what its tokens did there.

    Attributes:
        tensors: `shared.lora_A` [r, in] and `shared.lora_B` [out, r] (or neither), `experts.lora_A`
            [b, r, in], `experts.lora_B` [b, out, r], `router` [r, in] or [E, in].
        held: The held experts' ids in the pool.
        top_k: k^e.
        scale: alpha / r.
        divisor: What the scores are divided by.
        renormalise: Whether a token's weights are made to sum to one.
        vanilla: Whether the router has a row for each expert of the pool.
    """

    tensors: Mapping[str, Tensor]
    held: Sequence[int]
    top_k: int
    scale: float
    divisor: float
    renormalise: bool
    vanilla: bool
    probabilities: list[Tensor] = field(default_factory=list)
    chosen: list[list[int]] = field(default_factory=list)
    token_embeddings: list[Tensor] = field(default_factory=list)
    expert_embeddings: list[Tensor] = field(default_factory=list)

    def token(self, h: Tensor, dropped: Tensor | None = None) -> Tensor:
        """Returns φ^s + Σ p_j φ_j of one token h [in]; the φ see `dropped` instead, where it is given."""
        embeddings = [self.tensors["experts.lora_A"][j] @ h for j in range(len(self.held))]
        seen = h if dropped is None else dropped
        projected = self.tensors["router"] @ h
        if self.vanilla:
            scores = [projected[expert] for expert in self.held]
        else:
            scores = [torch.dot(projected, embedding) / self.divisor for embedding in embeddings]
        exponentials = [torch.exp(score) for score in scores]
        p = [value / sum(exponentials) for value in exponentials]
        ranking = sorted(range(len(p)), key=lambda j: -float(p[j].detach()))
        active = ranking[: self.top_k]
        weights = {j: p[j] / sum(p[i] for i in active) if self.renormalise else p[j] for j in active}
        total = torch.zeros(self.tensors["experts.lora_B"].shape[1], dtype=h.dtype)
        if "shared.lora_A" in self.tensors:
            total = total + self.scale * self.tensors["shared.lora_B"] @ (self.tensors["shared.lora_A"] @ seen)
        for j in active:
            low = self.tensors["experts.lora_A"][j] @ seen
            total = total + weights[j] * self.scale * self.tensors["experts.lora_B"][j] @ low
        self.probabilities.append(torch.stack(p))
        self.chosen.append(active)
        self.token_embeddings.append(projected.detach())
        self.expert_embeddings.append(torch.stack(embeddings).detach())
        return total

    def balance(self) -> Tensor:
        """Returns |E| Σ_j f_j p̄_j over the tokens so far, f_j the share of the top-k choices."""
        tokens = len(self.chosen)
        total = torch.zeros((), dtype=torch.float64)
        for j in range(len(self.held)):
            f = sum(active.count(j) for active in self.chosen) / (self.top_k * tokens)
            total = total + f * sum(p[j] for p in self.probabilities) / tokens
        return len(self.held) * total


class LoopedModel:
    """A client's own plain transformers model whose linear layers run their mixtures in loops.

    Args:
        model: The plain model.
        tensors: Name -> tensor of the client's trainables; losses are differentiable in them.
        held: Module -> ids of the held experts.
        settings: The other fields of `LoopedModule`; `divisor` may be "rank" or "hidden".
    """

    def __init__(
        self, model: Any, tensors: Mapping[str, Tensor], held: Mapping[str, Sequence[int]], **settings: Any
    ) -> None:
        self.model = model
        self.modules: dict[str, LoopedModule] = {}
        kind = settings.pop("divisor")
        for name, ids in held.items():
            own = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
            rank, inputs = own["experts.lora_A"].shape[1:]
            divisor = math.sqrt(rank if kind == "rank" else inputs)
            self.modules[name] = LoopedModule(own, ids, divisor=divisor, **settings)

    def losses(self, ids: Sequence[int], prompt: int) -> Tensor:
        """Returns the negative log-likelihoods of a row's targets, `ids[prompt:]`."""
        handles = [
            self.model.get_submodule(name).register_forward_hook(_adding(module))
            for name, module in self.modules.items()
        ]
        try:
            logits = self.model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
        finally:
            for handle in handles:
                handle.remove()
        return torch.stack([-logits[at - 1].log_softmax(-1)[ids[at]] for at in range(max(prompt, 1), len(ids))])

    def balance(self) -> Tensor:
        """Returns Σ_m |E_m| Σ_j f_j p̄_j over the tokens so far."""
        return torch.stack([module.balance() for module in self.modules.values()]).sum()


def _adding(module: LoopedModule) -> Any:
    def hook(_: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
        added = torch.stack([module.token(h) for row in args[0] for h in row])
        return output + added.view_as(output)

    return hook
