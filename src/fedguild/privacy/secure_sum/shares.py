"""Shares of a client's secrets (Shamir, over GF(2^128)), and the sealed envelopes that carry them to other clients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedguild.core.errors import UploadError
from fedguild.privacy.secure_sum.sizes import SEED_BYTES

_NONCE = bytes(12)
"""Every envelope has a key of its own, so that no nonce is needed beside it."""


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Returns holder -> its share; any `threshold` of them give the secret, and fewer reveal nothing about it.

    Args:
        secret: `SEED_BYTES` long.
        holders: The clients that get a share, ascending.
    """
    shares: list[tuple[int, bytes]] = Shamir.split(threshold, len(holders), secret, ssss=False)
    return {holder: share for holder, (_, share) in zip(holders, shares, strict=True)}


def recover(shares: Mapping[int, bytes], holders: Sequence[int], threshold: int) -> bytes:
    """Returns the secret of at least `threshold` shares.

    Args:
        shares: Holder -> its share; if there are more than `threshold`, the first ones are used.
        holders: All holders, as in `split`.

    Raises:
        UploadError: there are too few.
    """
    if len(shares) < threshold:
        raise UploadError(f"{len(shares)} share(s) of a secret are left, but {threshold} are needed")
    places = {holder: place for place, holder in enumerate(holders, start=1)}
    chosen = [(places[holder], shares[holder]) for holder in sorted(shares)[:threshold]]
    secret: bytes = Shamir.combine(chosen, ssss=False)
    return secret


def seal(key: bytes, content: bytes) -> bytes:
    """Returns content that only the key's owners can read or change (ChaCha20-Poly1305); a key seals once."""
    return ChaCha20Poly1305(key).encrypt(_NONCE, content, None)


def unseal(key: bytes, envelope: bytes) -> bytes:
    """Returns the content of an envelope.

    Raises:
        UploadError: it was sealed with another key, or changed.
    """
    try:
        return ChaCha20Poly1305(key).decrypt(_NONCE, envelope, None)
    except InvalidTag as error:
        raise UploadError("an envelope with shares was changed on its way") from error


def parted(content: bytes) -> list[bytes]:
    """Splits the content of an envelope into its shares."""
    return [content[start : start + SEED_BYTES] for start in range(0, len(content), SEED_BYTES)]
