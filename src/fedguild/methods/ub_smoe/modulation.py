"""The utilisation rate of the experts, and the modulation phi that evens it out (UB-SMoE, Section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.server.aggregation import WeightedMean


class UtilisationRate:
    """The running u~ of Eq. 12: the mean of a_{c,i} / n_c over clients, by their examples."""

    def __init__(self) -> None:
        self._mean = WeightedMean()
        self._reported: dict[str, Tensor] = {}

    def add(self, shares: Mapping[str, Tensor], examples: float) -> None:
        """Adds a client; a layer that saw none of its tokens does not count.

        Args:
            shares: Layer -> [M] share of the client's tokens that activated each expert, a_{c,i} / n_c.
            examples: |D_c|, the client's weight.
        """
        seen = {layer: share.clamp(0.0, 1.0) for layer, share in shares.items() if bool((share > 0).any())}
        self._mean.add(seen, examples)
        self._reported.update(seen)

    def result(self) -> dict[str, Tensor]:
        """Returns layer -> u~ [M], of the layers that any client's tokens reached."""
        return self._mean.result(self._reported)


def target_modulation(rate: Tensor, mean_active: float, epsilon: float) -> Tensor:
    """Returns phi~ [M] = tanh(u* / (u~ + epsilon) - 1) with u* = K-bar / M (Eq. 13).

    Args:
        rate: u~ [M].
        mean_active: K-bar.
        epsilon: Avoids a division by 0 for an expert that no token activated.
    """
    return torch.tanh((mean_active / rate.shape[-1]) / (rate + epsilon) - 1.0)


def next_modulation(phi: Tensor, target: Tensor, momentum: float) -> Tensor:
    """Returns (1 - zeta) phi~ + zeta phi, of shape [M] (Eq. 14)."""
    return (1.0 - momentum) * target + momentum * phi


def modulate(
    phi: Mapping[str, Tensor], rates: Mapping[str, Tensor], mean_active: float, momentum: float, epsilon: float
) -> dict[str, Tensor]:
    """Returns every layer's next phi (Eq. 13-14); a layer that no token reached keeps its own.

    Args:
        phi: `{block}.phi` -> [M].
        rates: Block -> u~ [M].
        mean_active: K-bar.
        momentum: zeta.
        epsilon: Of Eq. 13.
    """
    targets = {f"{block}.phi": target_modulation(rate, mean_active, epsilon) for block, rate in rates.items()}
    return {
        name: next_modulation(before, targets[name], momentum) if name in targets else before
        for name, before in phi.items()
    }
