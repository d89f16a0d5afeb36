"""Secure aggregation without a mask: the words of all clients, added one by one as Python integers."""

from __future__ import annotations

import numpy as np

from fedguild.privacy.secure_sum import fixed_point
from fedguild.privacy.secure_sum.form import Contribution, Form


def fixed_point_sums(form: Form, numbers: dict[int, Contribution], left: list[int], fewest: int):
    """Returns (sum of the weights' words, of the values, of the shares) that a session without masks would have.

    Args:
        form: The form.
        numbers: Client -> its numbers, of all that sent their weights.
        left: The clients that sent their values too.
        fewest: Fewest clients behind a weight.
    """
    words = added([fixed_point.weight_words(form, each) for each in numbers.values()], 2**64)
    sums = fixed_point.weight_sums(form, np.array(words, dtype=np.uint64))
    sent = [fixed_point.value_words(form, numbers[client], sums, len(numbers), fewest) for client in left]
    return words, added([values for values, _ in sent], 2**32), added([shares for _, shares in sent], 2**64)


def added(vectors: list[np.ndarray], modulus: int) -> list[int]:
    """Returns the sum of vectors, value by value, modulo a number."""
    return [sum(column) % modulus for column in zip(*(vector.tolist() for vector in vectors), strict=True)]


def weighted_means(form: Form, numbers: dict[int, Contribution], left: list[int]) -> dict[str, np.ndarray]:
    """Returns name -> sum_i w_i x_i / sum_i w_i over the clients that are left, by a loop over single values in fp64.

    NaN where no client has a weight.
    """
    found = {}
    for name, mean in form.means.items():
        result = np.full(mean.shape, np.nan)
        for place in np.ndindex(*mean.shape):
            entry = 0 if mean.weight_axis is None else place[mean.weight_axis]
            top = bottom = 0.0
            for client in left:
                own = numbers[client]
                weight = float(own.weights[mean.weight][entry]) if mean.weight in own.weights else 0.0
                if weight > 0:
                    bottom += weight
                    top += weight * float(own.values[name][place]) if name in own.values else 0.0
            result[place] = top / bottom if bottom else np.nan
        found[name] = result
    return found
