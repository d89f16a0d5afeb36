"""FedAlign-MoE's regulariser: a pull of the clients' routing towards the common reference.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under
Data Heterogeneity", Eq. 8 to 11. Throughout, p(x) [M] is the softmax over all experts of a
layer's router logits for token x, whatever weights the model itself derives from them: over the
active experts alone, top-1 routing would give p = 1 and no gradient, and Eq. 10 needs p of
experts that are not active.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.router_means import probabilities, token_means
from fedguild.model.moe.view import Routing

Divergence = Literal["pointwise", "bernoulli"]
SMALLEST = 1e-8
"""The least probability inside a logarithm."""


@dataclass(frozen=True)
class LayerTarget:
    """Target of one layer's gates.

    Attributes:
        reference: [M] p_g, summing to one.
        weights: [S, M] alpha, each client's weight for each expert.
    """

    reference: Tensor
    weights: Tensor


def adaptive_weights(overlap: Tensor, threshold: float, temperature: float = 1.0) -> Tensor:
    """Returns alpha = sigmoid((o - eta) / temperature), of the shape of `overlap` (Eq. 9 at temperature 1)."""
    return torch.sigmoid((overlap - threshold) / temperature)


class Regulariser:
    """L_reg of every client of a cohort (Eq. 10), collected while the model runs.

    The observer only stores the logits; the loss is computed outside the layers, so gradient
    checkpointing does not recompute it.

    Args:
        targets: Layer index -> the target of its gates; the other layers do not enter L_reg.
        slots: S, the clients of the cohort.
        top_k: k of Top-k(p(x)) and Top-k(p_g), the model's active experts.
        divergence: `pointwise`, p log(p / p_g), or `bernoulli`, the same plus (1-p) log((1-p) / (1-p_g)).
    """

    def __init__(self, targets: Mapping[int, LayerTarget], slots: int, top_k: int, divergence: Divergence) -> None:
        self.targets = targets
        self.slots = slots
        self.top_k = top_k
        self.divergence = divergence
        self._seen: list[tuple[LayerTarget, Tensor, Tensor, Tensor | None]] = []

    def observe(self, routing: Routing) -> None:
        """Stores one layer's logits without its input."""
        if routing.layer in self.targets:
            self._seen.append((self.targets[routing.layer], routing.logits, routing.slot, routing.keep))

    def loss(self) -> Tensor | float:
        """Returns [S], the mean over layers and each client's tokens, of the pass just seen; 0.0 without targets."""
        seen, self._seen = self._seen, []
        if not seen:
            return 0.0
        return torch.stack([self._layer_loss(*layer) for layer in seen]).mean(dim=0)

    def _layer_loss(self, target: LayerTarget, logits: Tensor, slot: Tensor, keep: Tensor | None) -> Tensor:
        """Returns [S]; 0 for a client without tokens."""
        p = probabilities(logits)
        reference = target.reference.to(p)
        divergence = kl_terms(p, reference, self.divergence)
        counts = top_k_mask(p, self.top_k) | top_k_mask(reference, self.top_k)
        per_token = (target.weights.to(p)[slot] * divergence * counts).sum(dim=-1)
        return token_means(per_token, slot, keep, self.slots)


def kl_terms(p: Tensor, reference: Tensor, divergence: Divergence) -> Tensor:
    """Returns each expert's part [N, M] of the divergence of p from p_g.

    `pointwise` is the expert's term of the sum KL(p || p_g); under a mask or weights it can be
    negative. `bernoulli` is the divergence of "goes to e or not", which cannot.
    """
    terms = p * _log_ratio(p, reference)
    if divergence == "bernoulli":
        terms = terms + (1 - p) * _log_ratio(1 - p, 1 - reference)
    return terms


def top_k_mask(values: Tensor, top_k: int) -> Tensor:
    """Returns a bool mask of the shape [.., M] of `values`, True at the `top_k` largest of each row."""
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, values.topk(top_k, dim=-1).indices, True)


def _log_ratio(p: Tensor, reference: Tensor) -> Tensor:
    return p.clamp(min=SMALLEST).log() - reference.clamp(min=SMALLEST).log()
