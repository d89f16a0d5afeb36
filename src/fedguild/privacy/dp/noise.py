"""Noise from a key: normal and uniform numbers that nobody can reproduce without it.

The bits are SHAKE-256 of the key and the purpose (FIPS 202). Numbers for different purposes are independent, and a
purpose always gets the same numbers. Normal numbers are Box and Muller's (1958), in fp64. A real client's key comes
from its site's secret. Attacks on the low bits of floating-point noise (Mironov, CCS 2012) are not covered.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

Floats = np.ndarray[Any, np.dtype[np.float64]]
_BITS = 53
"""Bits of an fp64's fraction: a uniform number is one of 2^53 equally spaced ones."""


class Noise:
    """A source of random numbers.

    Args:
        key: Bytes that nobody else knows.
    """

    def __init__(self, key: bytes) -> None:
        self.key = key

    @classmethod
    def of_seed(cls, seed: int) -> Noise:
        """Returns the noise of a run's seed, which gives no protection from anyone who knows the seed."""
        return cls(b"seed\x1f" + str(seed).encode())

    def child(self, *purpose: str | int) -> Noise:
        """Returns the noise for a purpose, independent of all others."""
        text = "\x1f".join(f"{type(part).__name__}:{part}" for part in purpose)
        return Noise(hashlib.sha256(len(self.key).to_bytes(8, "big") + self.key + text.encode()).digest())

    def uniform(self, count: int, *purpose: str | int) -> Floats:
        """Returns [count] numbers in [0, 1)."""
        content = hashlib.shake_256(self.child(*purpose).key).digest(8 * count)
        whole = np.frombuffer(content, dtype=np.uint64) >> np.uint64(64 - _BITS)
        drawn: Floats = np.multiply(whole, 2.0**-_BITS, dtype=np.float64)
        return drawn

    def normal(self, shape: Sequence[int], *purpose: str | int) -> Tensor:
        """Returns standard normal numbers in fp64 on the CPU."""
        count = math.prod(shape)
        pairs = -(-count // 2)
        first, second = np.split(self.uniform(2 * pairs, *purpose), 2)
        radius, angle = np.sqrt(-2.0 * np.log1p(-first)), 2.0 * np.pi * second
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return torch.from_numpy(both[:count]).reshape(tuple(shape))
