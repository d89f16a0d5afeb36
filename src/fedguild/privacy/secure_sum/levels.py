"""Levels: the parts of the values by how many dropouts their means survive, and the secrets of their masks.

A part that c clients have may lose c - `fewest` of them. Every part's own mask is that of its level, and the secrets of
a client's levels are a chain, each the digest of the one below: one secret opens a level and all above it. After d
dropouts clients open the lowest level whose parts survive d; parts that survive fewer stay masked.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedguild.privacy.secure_sum.sizes import SEED_BYTES

MOST_LEVELS = 16
"""Levels that a chain has secrets for; a session with 2048 clients has 12."""
Levels = NDArray[np.uint8]


def capacities(dropouts: int) -> tuple[int, ...]:
    """Returns [levels], how many dropouts each level survives, ascending: 0, 1, 2, 4 and so on to `dropouts`."""
    steps = [2**power for power in range(dropouts.bit_length()) if 2**power < dropouts]
    return (0, *steps, *((dropouts,) if dropouts else ()))


def levels_of(counts: NDArray[np.int64], fewest: int, survived: Sequence[int]) -> Levels:
    """Returns [n], the level of parts that `counts` clients have; 0 for those with fewer than `fewest`.

    Args:
        counts: [n] clients behind each part.
        fewest: Fewest that must be left.
        survived: `capacities`.
    """
    places = np.searchsorted(np.asarray(survived), counts - fewest, side="right") - 1
    return np.maximum(places, 0).astype(np.uint8)


def lowest_open(dropped: int, survived: Sequence[int]) -> int:
    """Returns the lowest level whose parts survive a number of dropouts, at most the last of `capacities`."""
    return int(np.searchsorted(np.asarray(survived), dropped, side="left"))


def above(secret: bytes, levels: int = 1) -> bytes:
    """Returns the secret of the level that is `levels` above that of a secret."""
    for _ in range(levels):
        secret = hashlib.sha256(b"fedguild level" + secret).digest()[:SEED_BYTES]
    return secret


def chain(start: bytes, levels: int) -> list[bytes]:
    """Returns [levels], the secrets of a session's levels, lowest first; the last is the same for any number of levels.

    Args:
        start: The first of the chain's `MOST_LEVELS` secrets.
    """
    lowest = above(start, MOST_LEVELS - levels)
    return [above(lowest, level) for level in range(levels)]
