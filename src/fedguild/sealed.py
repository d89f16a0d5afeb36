"""Checksummed files: a line with the SHA-256 of the rest, then the rest.

`tail -n +2 FILE | sha256sum` reproduces the checksum in the first line; `tail -n +2 FILE` is the content itself
(for client memory and checkpoints, a safetensors file).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from fedguild.errors import CheckpointError
from fedguild.files import replacing

_SEAL_BYTES = 2 * hashlib.sha256().digest_size + 1


def write_sealed(path: Path, content: bytes) -> None:
    """Writes `content` under its checksum, atomically.

    Raises:
        FedGuildError: the file cannot be written; `path` keeps its content.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(_seal(content))
        file.write(content)


def read_sealed(path: Path) -> bytes:
    """Returns the content of a file that `write_sealed` wrote.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is not what was written.
    """
    try:
        with open(path, "rb") as file:
            seal, content = file.read(_SEAL_BYTES), file.read()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    if seal != _seal(content):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its {len(content)} bytes of content.")
    return content


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Removes half-written files of a killed process from `folder`, and from all folders below it if asked to."""
    for leftover in (folder.rglob if below else folder.glob)(".*.part"):
        leftover.unlink(missing_ok=True)


def _seal(content: bytes) -> bytes:
    return hashlib.sha256(content).hexdigest().encode() + b"\n"
