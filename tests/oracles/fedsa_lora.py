"""FedSA-LoRA client by client: plain gradient descent on A and B_c, and the mean of A number by number."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

Factors = dict[str, Tensor]
Loss = Callable[[Mapping[str, Tensor]], Tensor]


def rounds(
    shared: Factors,
    own: Factors,
    losses: Sequence[Loss],
    sizes: Sequence[int],
    present: Sequence[Sequence[int]],
    rate: float,
) -> Iterator[tuple[Factors, list[Factors]]]:
    """Yields A and every client's B_c after each round, in which a client takes one step."""
    ups = [dict(own) for _ in losses]
    for clients in present:
        sent: list[Factors] = []
        for client in clients:
            down = {name: value.clone().requires_grad_() for name, value in shared.items()}
            up = {name: value.clone().requires_grad_() for name, value in ups[client].items()}
            losses[client]({**down, **up}).backward()
            sent.append({name: value.detach() - rate * _slope(value) for name, value in down.items()})
            ups[client] = {name: value.detach() - rate * _slope(value) for name, value in up.items()}
        shared = {name: _mean([one[name] for one in sent], [sizes[client] for client in clients]) for name in shared}
        yield shared, [dict(up) for up in ups]


def _slope(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


def _mean(values: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    """Returns sum_c n_c x_c / sum_c n_c, one number after the other."""
    rows = zip(*(value.flatten().tolist() for value in values), strict=True)
    means = [sum(size * x for size, x in zip(sizes, row, strict=True)) / sum(sizes) for row in rows]
    return torch.tensor(means, dtype=values[0].dtype).view(values[0].shape)
