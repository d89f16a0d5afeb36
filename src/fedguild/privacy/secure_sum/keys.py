"""Keys: registered ones for signatures, and ephemeral ones by which two clients agree on a secret (X25519, HKDF)."""

from __future__ import annotations

from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, utils, x25519
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedguild.core.errors import ConfigError, FedGuildError, UploadError
from fedguild.privacy.secure_sum.sizes import KEY_BYTES, SIGNATURE_BYTES

_HALF = SIGNATURE_BYTES // 2
_DOMAIN = b"fedguild secure aggregation 1 "

PrivateKey = ec.EllipticCurvePrivateKey | ed25519.Ed25519PrivateKey
PublicKey = ec.EllipticCurvePublicKey | ed25519.Ed25519PublicKey


def load_private(path: Path) -> PrivateKey:
    """Returns the registered private key of a file, as `fedguild federation key` writes it.

    Raises:
        FedGuildError: there is no such file, or no such key in it.
    """
    try:
        key = serialization.load_ssh_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError) as error:
        raise FedGuildError(f"{path} cannot be read as a private key ({error}).") from error
    if not isinstance(key, PrivateKey):
        raise FedGuildError(f"{path} holds a key of another kind than `fedguild federation key` writes.")
    return key


def load_public(path: Path) -> PublicKey:
    """Returns the registered public key of a file.

    Raises:
        FedGuildError: there is no such file, or no such key in it.
    """
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (OSError, ValueError) as error:
        raise FedGuildError(f"{path} cannot be read as a public key ({error}).") from error
    if not isinstance(key, PublicKey):
        raise FedGuildError(f"{path} holds a key of another kind than `fedguild federation key` writes.")
    return key


def load_known(folder: Path) -> dict[int, PublicKey]:
    """Returns client index -> registered public key, of the files `client-000.pub` and so on in a folder.

    Raises:
        FedGuildError: a file is no public key.
    """
    named = {path.stem.removeprefix("client-"): path for path in sorted(folder.glob("client-*.pub"))}
    return {int(number): load_public(path) for number, path in named.items() if number.isdigit()}


def load_peers(folder: Path) -> dict[int, PublicKey]:
    """Returns the registered public keys of a site's peers, as `load_known`.

    Raises:
        ConfigError: there are none.
        FedGuildError: a file is no public key.
    """
    keys = load_known(folder)
    if not keys:
        raise ConfigError(
            f"{folder} has no public keys of the other clients (client-000.pub and so on), without which the server "
            "could sit between them.",
            "Get these files from the other clients' operators, by another way than this server.",
        )
    return keys


def new_identity() -> PrivateKey:
    return ed25519.Ed25519PrivateKey.generate()


def sign(key: PrivateKey, message: bytes) -> bytes:
    if isinstance(key, ed25519.Ed25519PrivateKey):
        return key.sign(_DOMAIN + message).ljust(SIGNATURE_BYTES, b"\0")
    r, s = utils.decode_dss_signature(key.sign(_DOMAIN + message, ec.ECDSA(hashes.SHA384())))
    return r.to_bytes(_HALF, "big") + s.to_bytes(_HALF, "big")


def verify(key: PublicKey, message: bytes, signature: bytes, what: str) -> None:
    """Checks that a signature is the key owner's for the message.

    Raises:
        UploadError: it is not; the message begins with `what`.
    """
    try:
        if isinstance(key, ed25519.Ed25519PublicKey):
            key.verify(signature[:64], _DOMAIN + message)
            return
        r, s = int.from_bytes(signature[:_HALF], "big"), int.from_bytes(signature[_HALF:], "big")
        key.verify(utils.encode_dss_signature(r, s), _DOMAIN + message, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError) as error:
        raise UploadError(f"{what} is not signed by the key that is registered for it") from error


def expand(secret: bytes, purpose: bytes) -> bytes:
    """Returns `KEY_BYTES` derived from a secret for one purpose (HKDF with SHA-256)."""
    return HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=_DOMAIN + purpose).derive(secret)


def exchange_key(seed: bytes) -> x25519.X25519PrivateKey:
    return x25519.X25519PrivateKey.from_private_bytes(expand(seed, b"exchange key"))


def public_bytes(key: x25519.X25519PrivateKey) -> bytes:
    return key.public_key().public_bytes_raw()


def agree(key: x25519.X25519PrivateKey, peer: bytes, purpose: bytes) -> bytes:
    """Returns `KEY_BYTES` that only the owners of the two keys can derive.

    Args:
        key: One client's private key.
        peer: The other's public key.
        purpose: The same on both sides.

    Raises:
        UploadError: the public key is invalid.
    """
    try:
        return expand(key.exchange(x25519.X25519PublicKey.from_public_bytes(peer)), purpose)
    except ValueError as error:
        raise UploadError(f"a public key cannot be used ({error})") from error
