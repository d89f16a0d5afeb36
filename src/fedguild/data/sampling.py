"""Draws from a list of examples."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedguild.core.errors import DataError
from fedguild.data.example import Example


def sample(examples: Sequence[Example], limit: int | None, rng: np.random.Generator) -> tuple[Example, ...]:
    """Returns at most `limit` examples, drawn without replacement, in their original order; all for None.

    Raises:
        DataError: `limit` is below 1.
    """
    if limit is not None and limit < 1:
        raise DataError(f"A limit on examples must be at least 1, but is {limit}.")
    if limit is None or limit >= len(examples):
        return tuple(examples)
    chosen = rng.choice(len(examples), size=limit, replace=False)
    return tuple(examples[index] for index in sorted(chosen))
