"""Noise on the embeddings that a client uploads, so that they reveal less about its data.

Y. Zhang et al. (FedAMoLE), Section 4.5, after Split-and-Denoise (P. Mai et al., 2024): z with a
density proportional to exp(-eta ||z||) in R^r is added, and the sum is clipped to a norm.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def privatised(embeddings: Tensor, eta: float, bound: float | None, rng: np.random.Generator) -> Tensor:
    """Returns the embeddings, each with its own noise, clipped to a norm.

    In R^r the density exp(-eta ||z||) has the radius ||z|| ~ Gamma(shape r, rate eta) and,
    independently of it, a uniform direction.

    Args:
        embeddings: [.., r], one embedding in each row.
        eta: The privacy budget: smaller means more noise; the mean radius is r / eta.
        bound: Largest l2 norm of what is returned; None for each embedding's own norm before the noise.
        rng: Draws the noise.
    """
    width = embeddings.shape[-1]
    direction = rng.standard_normal(embeddings.shape)
    direction /= np.linalg.norm(direction, axis=-1, keepdims=True)
    radius = rng.gamma(width, 1 / eta, size=(*embeddings.shape[:-1], 1))
    noisy = embeddings.double() + torch.from_numpy(radius * direction)
    limit = embeddings.double().norm(dim=-1, keepdim=True) if bound is None else torch.tensor(bound)
    clipped: Tensor = noisy * (limit / noisy.norm(dim=-1, keepdim=True)).clamp(max=1)
    return clipped.to(embeddings.dtype)
