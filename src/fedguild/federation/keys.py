"""A client's key pair, by which Flower authenticates its node."""

from __future__ import annotations

import os
from pathlib import Path

from fedguild.core.errors import FedGuildError
from fedguild.core.files import make_folder, write_text


def write_key(path: Path) -> Path:
    """Writes a new private key that only its owner can read, and the public one as `.pub` in the same folder.

    Returns:
        The public key's path; the client's operator sends that file, and no other, to the server's operator.

    Raises:
        FedGuildError: the file exists already, or the extra `flower` is not installed.
    """
    try:
        from cryptography.hazmat.primitives.asymmetric import ec
        from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
    except ModuleNotFoundError as error:
        raise FedGuildError(f"{error.name} is not installed.", "pip install 'fedguild[flower]'") from error
    if path.exists():
        raise FedGuildError(
            f"{path} already exists.", "Choose another file; to replace a lost key, register a new one."
        )
    key = ec.generate_private_key(ec.SECP384R1())
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    make_folder(path.parent)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(private)
    public = path.with_suffix(".pub")
    write_text(public, key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode() + "\n")
    return public
