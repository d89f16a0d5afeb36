"""Measures of how evenly the experts of a layer are used."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.server.utilisation import gini, share_entropy


@dataclass(frozen=True, slots=True)
class Utilisation:
    """Evenness of expert use in each of L layers with M experts.

    Without tokens, and in a layer whose counts are all zero, every figure is 0.

    Attributes:
        frequency: [L, M] share of tokens that activated an expert, the utilisation rate; a row sums to the active
            experts per token.
        entropy: [L] entropy of the rates scaled to sum 1, in nats, from 0 to ln M.
        normalised_entropy: [L] `entropy` divided by ln M, from 0 (one expert) to 1 (all alike); 0 where a layer has a
            single expert.
        gini: [L] Gini coefficient of the rates, from 0 (all alike) to 1 - 1/M (UB-SMoE, Eq. 62).
    """

    frequency: Tensor
    entropy: Tensor
    normalised_entropy: Tensor
    gini: Tensor


def expert_utilisation(counts: Tensor, tokens: int) -> Utilisation:
    """Returns how evenly the experts are used.

    Args:
        counts: [L, M] tokens that activated each expert, padding excluded.
        tokens: Tokens seen.
    """
    frequency = counts.double() / max(tokens, 1)
    entropy = share_entropy(frequency)
    experts = counts.shape[-1]
    return Utilisation(
        frequency=frequency,
        entropy=entropy,
        normalised_entropy=entropy / math.log(experts) if experts > 1 else torch.zeros_like(entropy),
        gini=gini(frequency),
    )
