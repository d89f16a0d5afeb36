"""FDLoRA's outer step, fusion and search objective, number by number in Python floats."""

from __future__ import annotations


def outer_step(
    shared: list[float], clients: list[list[float]], velocity: list[float], rate: float, momentum: float
) -> tuple[list[float], list[float]]:
    """OuterOpt for one flat tensor: g = mean_i(theta_s - theta_s^i), then SGD with Nesterov momentum.

    Args:
        shared: theta_s before the round.
        clients: [client][value] theta_s^i.
        velocity: v before the round.
        rate: The server's learning rate.
        momentum: The server's momentum.

    Returns:
        theta_s and v after the round.
    """
    after, moved = [], []
    for at, value in enumerate(shared):
        gradient = 0.0
        for client in clients:
            gradient += (value - client[at]) / len(clients)
        speed = momentum * velocity[at] + gradient
        moved.append(speed)
        after.append(value - rate * (gradient + momentum * speed))
    return after, moved


def fuse(weights: tuple[float, float], shared: list[float], personal: list[float]) -> list[float]:
    """w1 theta_s + w2 theta_p."""
    return [weights[0] * s + weights[1] * p for s, p in zip(shared, personal, strict=True)]


def objective(token_losses: list[float], weights: tuple[float, float], regularisation: float) -> float:
    """What AdaFusion minimises: the mean loss of the few-shot tokens + lambda mean(|w1|, |w2|)."""
    return sum(token_losses) / len(token_losses) + regularisation * (abs(weights[0]) + abs(weights[1])) / 2
