"""A site's secret of a run: what its privacy noise is drawn from, which the server must not be able to draw again.

The seed of a run is in its config, which the server writes. Noise that is drawn from it alone protects nothing
from the server.
"""

from __future__ import annotations

import hmac
import os
import secrets
from pathlib import Path

from fedguild.config import Config
from fedguild.errors import FedGuildError

FILE = "secret"
"""Beside the client's memory of a run; readable by its owner alone."""
SECRET_BYTES = 32


def run_secret(folder: Path) -> bytes:
    """Returns the secret of a run: drawn when it is first asked for, the same ever after.

    Args:
        folder: What the site keeps of the run.

    Raises:
        FedGuildError: the file cannot be read or written, or is not a secret.
    """
    path = folder / FILE
    try:
        if not path.exists():
            _draw(path)
        found = path.read_bytes()
    except OSError as error:
        raise FedGuildError(f"The site's secret cannot be kept in {path}: {error.strerror or error}.") from error
    if len(found) != SECRET_BYTES:
        raise FedGuildError(
            f"{path} holds {len(found)} bytes, not the site's secret of {SECRET_BYTES}.",
            "Remove it: a new one is drawn, and the run goes on with other noise.",
        )
    return found


def private_seed(secret: bytes, config: Config, download: bytes) -> int:
    """Returns the seed of a training's noise: another one for another question, so that no noise is used twice.

    A server that asked for one round twice, with two models or two scales of the noise, and got the same draw in
    both answers, could take it out of their difference.

    Args:
        secret: The site's secret of the run.
        config: The run's config as this site has it.
        download: What the server sent, as it came.
    """
    return int.from_bytes(hmac.digest(secret, config.fingerprint().encode() + download, "sha256"), "big")


def _draw(path: Path) -> None:
    """Writes a new secret; a reader sees all of it or nothing, and nobody else sees any."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.part")
    temporary.unlink(missing_ok=True)
    with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(secrets.token_bytes(SECRET_BYTES))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
