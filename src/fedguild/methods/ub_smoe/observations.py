"""Figures of a round of UB-SMoE: how even the experts' use is, how phi follows it, and the quality of G~."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence

import torch
from scipy import stats
from torch import Tensor

from fedguild.core.payload import SERVER, Payload
from fedguild.methods.ub_smoe.names import (
    COSINE,
    FIGURES,
    IDLE,
    LOST,
    PHI,
    PSEUDO_GRADIENT,
    RATIO,
    UTILISATION,
)
from fedguild.model.info import ModelInfo
from fedguild.server.method import Observation
from fedguild.server.utilisation import gini, rate_entropy, share_entropy


def observations(state: Payload, model: ModelInfo) -> list[Observation]:
    """Returns the figures of the round that led to a state."""
    rates, phi, cosine = state.part(UTILISATION), state.part(PHI), state.part(COSINE)
    layers = [f"layer {index}" for index in range(len(model.moe))]
    figures = [evenness([rates[layer.name] for layer in model.moe], layers)]
    if phi:
        figures.append(following([(phi[f"{layer.name}.phi"], rates[layer.name]) for layer in model.moe], layers))
    if cosine and bool(cosine["measured"].any()):
        rows = [*layers, "all layers"]
        figures.append(Observation("cosine of the pseudo-gradient", cosine["values"], rows))
        figures.append(Observation("clients that measured the cosine", cosine["measured"], rows))
    figures += by_budget(state.part(f"{SERVER}/{FIGURES}"), layers)
    if state.part(PSEUDO_GRADIENT):
        lost = state.tensors[f"{SERVER}/{LOST}"].reshape(1)
        figures.append(Observation("clients that lost their memory", lost, ["clients"]))
    return figures


def by_budget(figures: Mapping[str, Tensor], layers: Sequence[str]) -> list[Observation]:
    """Returns the share of idle expert-steps, and the size of what was injected, of every layer and budget."""
    budgets = sorted({name.partition("/")[0] for name in figures})
    titles = {IDLE: "share of expert-steps without tokens", RATIO: "injected pseudo-gradient over own gradient, norms"}
    return [
        Observation(
            title, torch.stack([figures[f"{budget}/{FIGURES}/{name}"] for budget in budgets], dim=1), layers, budgets
        )
        for name, title in titles.items()
        if budgets
    ]


def correlation(phi: Tensor, rate: Tensor) -> tuple[float, float, float]:
    """Returns how modulation follows utilisation over the pairs [n] of phi and u~ (appendix G.8).

    Returns:
        Pearson's r (Eq. 63), Spearman's rho, and the slope of the regression of phi on u~; 0 where phi or u~ is the
        same for all experts.
    """
    x, y = rate.double().cpu().numpy(), phi.double().cpu().numpy()
    if len(x) < 2 or math.isclose(x.min(), x.max()) or math.isclose(y.min(), y.max()):
        return 0.0, 0.0, 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", stats.NearConstantInputWarning)
        line = stats.linregress(x, y)
        return float(line.rvalue), float(stats.spearmanr(x, y).statistic), float(line.slope)


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
    values = torch.tensor([correlation(*pair) for pair in (*pairs, (phi, rates))])
    return Observation("phi against utilisation", values, [*layers, "all layers"], ("Pearson", "Spearman", "slope"))
