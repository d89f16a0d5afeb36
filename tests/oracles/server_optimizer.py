"""The server's optimizer of FedOpt with SGD and momentum, number by number (Reddi et al. 2021, Algorithm 1)."""

from __future__ import annotations

from collections.abc import Sequence


def rounds(
    start: Sequence[float],
    uploads: Sequence[Sequence[Sequence[float]]],
    weights: Sequence[float],
    *,
    step: float,
    momentum: float,
) -> list[float]:
    """Returns theta after all rounds.

    Args:
        start: theta before the first.
        uploads: `uploads[t][c]`, what client c trained theta to in round t.
        weights: w_c.
        step: eta.
        momentum: beta.
    """
    theta, velocity = list(start), [0.0] * len(start)
    for trained in uploads:
        for entry in range(len(theta)):
            change = 0.0
            for weight, client in zip(weights, trained, strict=True):
                change += weight * (client[entry] - theta[entry])
            velocity[entry] = momentum * velocity[entry] + change / sum(weights)
            theta[entry] += step * velocity[entry]
    return theta
