"""How the federation uses its experts, and the modulation that evens it out (UB-SMoE, Section 5.1)."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass

import torch
from scipy import stats
from torch import Tensor

from fedguild.server.aggregation import WeightedMean
from fedguild.server.method import Observation


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
        epsilon: Keeps an expert that nobody used from dividing by 0.
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


def rate_entropy(rate: Tensor) -> Tensor:
    """Returns -sum_i u_i ln u_i over the last axis, in nats, of the rates as they are (Section 6.3.3).

    The rates of a layer sum to the mean active experts, so it can exceed ln M.
    """
    entropy: Tensor = torch.special.entr(rate.double()).sum(dim=-1)
    return entropy


def share_entropy(rate: Tensor) -> Tensor:
    """Returns the entropy of the rates scaled to sum 1, in nats, from 0 to ln M (appendix G.7); 0 for no rates."""
    return rate_entropy(_shares(rate))


def gini(rate: Tensor) -> Tensor:
    """Returns the Gini coefficient over the last axis, from 0 (all alike) to 1 - 1/M (Eq. 62); 0 for no rates.

    Sorted ascending, the double sum of |u_i - u_j| is 2 sum_i (2i - M - 1) u_(i) for i from 1.
    """
    experts = rate.shape[-1]
    place = 2 * torch.arange(1, experts + 1, dtype=torch.float64, device=rate.device) - experts - 1
    return (_shares(rate).sort(dim=-1).values * place).sum(dim=-1) / experts


@dataclass(frozen=True)
class Correlation:
    """How modulation follows utilisation (appendix G.8); 0 where either is the same for all experts.

    Attributes:
        pearson: Pearson's r (Eq. 63).
        spearman: Spearman's rho.
        slope: Slope of the regression of phi on u~.
    """

    pearson: float
    spearman: float
    slope: float


def correlation(phi: Tensor, rate: Tensor) -> Correlation:
    """Returns the correlation of phi with u~ over their pairs [n]."""
    x, y = rate.double().cpu().numpy(), phi.double().cpu().numpy()
    if len(x) < 2 or math.isclose(x.min(), x.max()) or math.isclose(y.min(), y.max()):
        return Correlation(0.0, 0.0, 0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        line = stats.linregress(x, y)
        return Correlation(float(line.rvalue), float(stats.spearmanr(x, y).statistic), float(line.slope))


def evenness(rates: Sequence[Tensor], layers: Sequence[str]) -> Observation:
    """Returns how evenly each layer used its experts in a round.

    Args:
        rates: u~ [M] of each layer.
        layers: The layers' labels.
    """
    values = torch.tensor([[rate_entropy(rate), share_entropy(rate), gini(rate)] for rate in rates])
    return Observation("expert utilisation", values, layers, ("entropy of rates", "entropy of shares", "Gini"))


def following(pairs: Sequence[tuple[Tensor, Tensor]], layers: Sequence[str]) -> Observation:
    """Returns how phi follows u~ in each layer, and over the experts of all layers.

    Args:
        pairs: (phi [M], u~ [M]) of each layer.
        layers: The layers' labels.
    """
    phi, rates = (torch.cat(side) for side in zip(*pairs, strict=True))
    values = torch.tensor([astuple(correlation(*pair)) for pair in (*pairs, (phi, rates))])
    return Observation("phi against utilisation", values, [*layers, "all layers"], ("Pearson", "Spearman", "slope"))


def _shares(rate: Tensor) -> Tensor:
    rate = rate.double()
    return rate / rate.sum(dim=-1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
