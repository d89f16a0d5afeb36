"""RoLoRA client by client: gradient descent on one factor, its mean number by number, and the mean of the products."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

Factors = dict[str, Tensor]
Loss = Callable[[Mapping[str, Tensor]], Tensor]


def rounds(
    down: Factors,
    up: Factors,
    losses: Sequence[Loss],
    sizes: Sequence[int],
    present: Sequence[Sequence[int]],
    rate: float,
) -> Iterator[tuple[Factors, Factors]]:
    """Yields A and B after each round, in which a client takes one step on B (odd rounds) or on A (even rounds)."""
    for number, clients in enumerate(present, start=1):
        moving, fixed = (up, down) if number % 2 == 1 else (down, up)
        sent: list[Factors] = []
        for client in clients:
            mine = {name: value.clone().requires_grad_() for name, value in moving.items()}
            losses[client]({**mine, **fixed}).backward()
            sent.append({name: value.detach() - rate * _slope(value) for name, value in mine.items()})
        mean = {name: _mean([one[name] for one in sent], [sizes[client] for client in clients]) for name in moving}
        down, up = (down, mean) if number % 2 == 1 else (mean, up)
        yield down, up


def _slope(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


def _mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns sum_c n_c x_c / sum_c n_c, one number after the other."""
    rows = zip(*(value.flatten().tolist() for value in values), strict=True)
    means = [sum(size * x for size, x in zip(sizes, row, strict=True)) / sum(sizes) for row in rows]
    return torch.tensor(means, dtype=values[0].dtype).view(values[0].shape)
