"""Effects of averaging on the clients' changes, from the definitions, one product after the other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def shrinkage(changes: Sequence[Sequence[np.ndarray]], shares: Sequence[float]) -> float:
    """Returns sum_i p_i |Delta_i|^2 / |sum_i p_i Delta_i|^2, with Delta_i all of a client's tensors side by side."""
    flat = [np.concatenate([tensor.ravel() for tensor in tensors]) for tensors in changes]
    single = 0.0
    together = np.zeros_like(flat[0])
    for share, change in zip(shares, flat, strict=True):
        single += share * float(np.sum(change * change))
        together = together + share * change
    return single / float(np.sum(together * together))


def inexactness(modules: Sequence[Sequence[tuple[np.ndarray, np.ndarray]]], shares: Sequence[float]) -> float:
    """Returns |sum_i p_i B_i A_i - (sum_i p_i B_i)(sum_i p_i A_i)| / |sum_i p_i B_i A_i| over all matrices.

    Args:
        modules: For each matrix the clients' (B_i [out, r], A_i [r, in]).
        shares: p_i.
    """
    missed = exact = 0.0
    for clients in modules:
        product = sum(share * (b @ a) for share, (b, a) in zip(shares, clients, strict=True))
        mean_b = sum(share * b for share, (b, _) in zip(shares, clients, strict=True))
        mean_a = sum(share * a for share, (_, a) in zip(shares, clients, strict=True))
        missed += float(np.sum((product - mean_b @ mean_a) ** 2))
        exact += float(np.sum(product**2))
    return float(np.sqrt(missed / exact))


def mismatch(own: Sequence[np.ndarray], full: Sequence[np.ndarray]) -> tuple[float, float]:
    """Returns the s with the least sum of |s y_k - y|^2 over tokens, and the root of that sum over that of |y|^2.

    Args:
        own: y_k [H] of each token.
        full: y [H] of each token.
    """
    solution, *_ = np.linalg.lstsq(np.concatenate(own)[:, None], np.concatenate(full), rcond=None)
    scale = float(solution[0])
    left = sum(float(np.sum((scale * one - other) ** 2)) for one, other in zip(own, full, strict=True))
    return scale, float(np.sqrt(left / sum(float(np.sum(one**2)) for one in full)))
