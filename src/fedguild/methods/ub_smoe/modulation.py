"""The utilisation rate of the experts, and the modulation phi that evens it out (UB-SMoE, Section 5.1)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Range:
    """The range of phi, and what keeps phi in it.

    Attributes:
        low: phi_min.
        high: phi_max.
        kind: `hinge`: Eq. 11 alone, in the clients' loss; `clamp`: phi never leaves the range; `scale`: the tanh of
            Eq. 13 times the range, `high` where it is positive and `-low` where it is negative, so that phi~ reaches
            the range's ends and an expert at u* has 0.
    """

    low: float = -1.0
    high: float = 1.0
    kind: Literal["hinge", "clamp", "scale"] = "hinge"

    def scaled(self, target: Tensor) -> Tensor:
        """Returns phi~ of a tanh (Eq. 13)."""
        return torch.where(target > 0, target * self.high, target * -self.low) if self.kind == "scale" else target

    def kept(self, phi: Tensor) -> Tensor:
        """Returns phi, inside the range where that is how it is kept."""
        return phi.clamp(self.low, self.high) if self.kind == "clamp" else phi


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
    phi: Mapping[str, Tensor],
    rates: Mapping[str, Tensor],
    mean_active: float,
    momentum: float,
    epsilon: float,
    limits: Range,
) -> dict[str, Tensor]:
    """Returns every layer's next phi (Eq. 13-14); a layer that no token reached keeps its own.

    Args:
        phi: `{block}.phi` -> [M].
        rates: Block -> u~ [M].
        mean_active: K-bar.
        momentum: zeta.
        epsilon: Of Eq. 13.
        limits: The range of phi.
    """
    targets = {
        f"{block}.phi": limits.scaled(target_modulation(rate, mean_active, epsilon)) for block, rate in rates.items()
    }
    return {
        name: limits.kept(next_modulation(before, targets[name], momentum)) if name in targets else before
        for name, before in phi.items()
    }
