"""Masks: the keystream of ChaCha20, added to numbers modulo 2^32 or 2^64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

from fedguild.privacy.secure_sum.keys import expand

_CHUNK_WORDS = 2**18
"""Words masked at a time, so that a mask takes a few megabytes whatever its length."""
Words = TypeVar("Words", NDArray[np.uint32], NDArray[np.uint64])


def add_masks(
    total: Words,
    secrets: Sequence[bytes | None],
    levels: NDArray[np.uint8],
    purpose: bytes,
    *,
    subtract: bool = False,
    where: NDArray[np.bool_] | None = None,
) -> None:
    """Adds the mask of each level's secret to the numbers of that level, as `add_mask`.

    Args:
        total: [n] unsigned numbers, contiguous.
        secrets: [levels] secrets; None leaves the numbers of a level unchanged.
        levels: [n] the level of each number.
        where: [n], which numbers are masked; None for all.
    """
    for level, secret in enumerate(secrets):
        here = levels == level
        if secret is None or not here.any():
            continue
        part = total[here]
        add_mask(part, secret, purpose, subtract=subtract, where=None if where is None else where[here])
        total[here] = part


def add_mask(
    total: Words, secret: bytes, purpose: bytes, *, subtract: bool = False, where: NDArray[np.bool_] | None = None
) -> None:
    """Adds a mask to numbers in place, modulo the range of their dtype.

    Args:
        total: [n] unsigned numbers, contiguous.
        secret: The mask is derived from it; with `purpose` it must be used for one mask only.
        where: [n], which numbers are masked; each has the mask of its place, whichever others are. None for all.
    """
    key = expand(secret, purpose)
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros = np.zeros(min(_CHUNK_WORDS, len(total)), total.dtype)
    mask = np.empty_like(zeros)
    operation = np.subtract if subtract else np.add
    for start in range(0, len(total), _CHUNK_WORDS):
        part = total[start : start + _CHUNK_WORDS]
        count = len(part)
        cipher.update_into(zeros[:count].view(np.uint8).data, mask[:count].view(np.uint8).data)
        if where is None:
            operation(part, mask[:count], out=part)
        else:
            operation(part, mask[:count], out=part, where=where[start : start + count])
