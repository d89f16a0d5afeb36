"""FedAlign-MoE's regulariser: a pull of the clients' routing towards the common reference.

Source: Fang et al., "Aggregation Alignment for Federated Learning with Mixture-of-Experts under
Data Heterogeneity", Eq. 8 to 11. Throughout, p(x) [M] is the softmax over all experts of a
layer's router logits for token x, whatever weights the model itself derives from them: over the
active experts alone, top-1 routing would give p = 1 and no gradient, and Eq. 10 needs p of
experts that are not active.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedguild.client.router_means import probabilities, token_means
from fedguild.model.moe.view import Routing
from fedguild.model.on_device import kept_on_device

Divergence = Literal["bernoulli", "generalised", "pointwise"]
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
        top_k: k of Top-k(p(x)) and Top-k(p_g), the active experts of each client.
        divergence: An expert's part of Eq. 8; see `kl_terms`.
        layers: How the layers combine, which Eq. 8 leaves open.
    """

    def __init__(
        self,
        targets: Mapping[int, LayerTarget],
        slots: int,
        top_k: Sequence[int],
        divergence: Divergence,
        layers: Literal["mean", "sum"] = "mean",
    ) -> None:
        self.targets = targets
        self.slots = slots
        self.top_k = top_k
        self.divergence = divergence
        self.layers = layers
        self._seen: list[tuple[LayerTarget, Tensor, Tensor, Tensor | None]] = []

    def observe(self, routing: Routing) -> None:
        """Stores one layer's logits without its input."""
        if routing.layer in self.targets:
            self._seen.append((self.targets[routing.layer], routing.logits, routing.slot, routing.keep))

    def loss(self) -> Tensor | float:
        """Returns [S] of the pass just seen: the mean over each client's tokens, over layers their mean or their sum.

        Without targets it is 0.0.
        """
        seen, self._seen = self._seen, []
        if not seen:
            return 0.0
        by_layer = torch.stack([self._layer_loss(*layer) for layer in seen])
        return by_layer.mean(dim=0) if self.layers == "mean" else by_layer.sum(dim=0)

    def _layer_loss(self, target: LayerTarget, logits: Tensor, slot: Tensor, keep: Tensor | None) -> Tensor:
        """Returns [S]; 0 for a client without tokens."""
        p = probabilities(logits)
        reference = target.reference.to(p)
        divergence = kl_terms(p, reference, self.divergence)
        k, most = kept_on_device(tuple(self.top_k), p.device), max(self.top_k)
        of_reference = top_k_mask(reference.expand(self.slots, -1), k, most)
        counts = top_k_mask(p, k[slot], most) | of_reference[slot]
        per_token = (target.weights.to(p)[slot] * divergence * counts).sum(dim=-1)
        return token_means(per_token, slot, keep, self.slots)


def kl_terms(p: Tensor, reference: Tensor, divergence: Divergence) -> Tensor:
    """Returns each expert's part [N, M] of the divergence of p from p_g.

    - `bernoulli`: p log(p / p_g) + (1 - p) log((1 - p) / (1 - p_g)), the divergence of "goes to e or not";
    - `generalised`: p log(p / p_g) - p + p_g, the divergence of measures that need not sum to one;
    - `pointwise`: p log(p / p_g), the expert's term of the sum KL(p || p_g).

    The first two are least, and 0, where p = p_g, whatever experts a mask or weights leave. The third is not: its slope
    at p_g is 1, so under a mask it pushes probability off the experts in the mask, off those of p_g itself.
    """
    terms = p * _log_ratio(p, reference)
    if divergence == "bernoulli":
        terms = terms + (1 - p) * _log_ratio(1 - p, 1 - reference)
    elif divergence == "generalised":
        terms = terms - p + reference
    return terms


def top_k_mask(values: Tensor, top_k: Tensor, most: int) -> Tensor:
    """Returns a bool mask [N, M], True at the `top_k` [N] largest, up to `most`, of each row of `values` [N, M]."""
    order = values.topk(most, dim=-1).indices
    wanted = torch.arange(order.shape[-1], device=values.device) < top_k[:, None]
    return torch.zeros_like(values, dtype=torch.bool).scatter_(-1, order, wanted)


def _log_ratio(p: Tensor, reference: Tensor) -> Tensor:
    return p.clamp(min=SMALLEST).log() - reference.clamp(min=SMALLEST).log()
