"""A secret for a run, from which privacy noise is derived that nobody else can reproduce.

The seed of a run is in its config, which the server writes. Noise drawn from that seed alone gives no protection from
the server.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from fedguild.core.errors import FedGuildError
from fedguild.core.files import make_folder

FILE = "secret"
"""The file beside the client's memory of a run; readable by its owner alone."""
SECRET_BYTES = 32


def run_secret(folder: Path) -> bytes:
    """Returns the secret of a run: drawn on the first call, the same from then on.

    Args:
        folder: The run's folder, of a site or of the server.

    Raises:
        FedGuildError: the file cannot be read or written, or is not a secret.
    """
    path = folder / FILE
    try:
        if not path.exists():
            _draw(path)
        secret = path.read_bytes()
    except OSError as error:
        raise FedGuildError(f"The secret of a run cannot be stored in {path}: {error.strerror or error}.") from error
    if len(secret) != SECRET_BYTES:
        raise FedGuildError(
            f"{path} holds {len(secret)} bytes, not the secret of {SECRET_BYTES}.",
            "Remove it: a new one is drawn, and the run continues with different noise.",
        )
    return secret


def private_seed(secret: bytes, fingerprint: str, download: bytes) -> int:
    """Returns the seed of a training's noise: a different one for every request, so that no noise is used twice.

    A server that requested one round twice, with two models or two scales of the noise, and got the same draw in both
    replies, could cancel it in their difference.

    Args:
        secret: The site's secret for the run.
        fingerprint: That of the run's config as this site has it.
        download: The request's body.
    """
    return int.from_bytes(hmac.digest(secret, fingerprint.encode() + download, "sha256"), "big")


def _draw(path: Path) -> None:
    """Writes a new secret atomically, readable by its owner alone."""
    make_folder(path.parent)
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
