"""Checksummed files: a line with the SHA-256 of the rest, padded with spaces in aligned files, then the rest.

`tail -n +2 FILE | sha256sum` reproduces the checksum in the first line; `tail -n +2 FILE` is the content itself
(for client memory and checkpoints, a safetensors file).
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from fedguild.core.errors import CheckpointError
from fedguild.core.files import replacing

_SEAL_BYTES = 2 * hashlib.sha256().digest_size + 1
_ALIGNED_BYTES = 128
"""Bytes of the first line of a file whose content can be mapped into memory as tensors."""


def write_sealed(path: Path, content: bytes, *, aligned: bool = False) -> None:
    """Writes `content` under its checksum, atomically.

    Args:
        aligned: Whether `map_sealed` is to map it.

    Raises:
        FedGuildError: the file cannot be written; `path` keeps its content.
    """
    with replacing(path) as temporary, open(temporary, "wb") as file:
        file.write(_seal(hashlib.sha256(content), aligned=aligned))
        file.write(content)


def read_sealed(path: Path) -> bytes:
    """Returns the content of a file that `write_sealed` wrote.

    Raises:
        CheckpointError: the file is missing, cannot be read, or is not what was written.
    """
    try:
        with open(path, "rb") as file:
            seal = file.read(_SEAL_BYTES)
            if seal.endswith(b" "):
                seal += file.read(_ALIGNED_BYTES - _SEAL_BYTES)
            content = file.read()
    except OSError as error:
        raise CheckpointError(f"Cannot read {path}: {error.strerror or error}.") from error
    if seal != _seal(hashlib.sha256(content), aligned=len(seal) > _SEAL_BYTES):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its {len(content)} bytes of content.")
    return content


def map_sealed(path: Path) -> tuple[memoryview, bytes]:
    """Returns the content of an aligned file, memory-mapped, and its SHA-256; other files are read into memory.

    Raises:
        CheckpointError: as `read_sealed`.
    """
    whole = map_file(path)
    if bytes(whole[_SEAL_BYTES - 1 : _SEAL_BYTES]) != b" ":
        content = memoryview(bytearray(read_sealed(path)))
        return content, hashlib.sha256(content).digest()
    content = whole[_ALIGNED_BYTES:]
    found = hashlib.sha256(content)
    if bytes(whole[:_ALIGNED_BYTES]) != _seal(found, aligned=True):
        raise CheckpointError(f"{path} is damaged: its checksum does not match its {len(content)} bytes of content.")
    return content, found.digest()


def map_file(path: Path) -> memoryview:
    """Returns a file as a part of the process's memory that the system can drop and read again; writes stay private.

    Unlike Python's `mmap` it holds no file descriptor: a long run maps hundreds of versions.

    Raises:
        CheckpointError: the file is missing or cannot be read.
    """
    try:
        return torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8).numpy().data
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"Cannot read {path}: {getattr(error, 'strerror', error)}.") from error


def remove_leftovers(folder: Path, *, below: bool = False) -> None:
    """Removes half-written files of a killed process from `folder`, and with `below` from all folders below it."""
    for leftover in (folder.rglob if below else folder.glob)(".*.part"):
        leftover.unlink(missing_ok=True)


def _seal(checksum: hashlib._Hash, *, aligned: bool) -> bytes:
    line = checksum.hexdigest().encode()
    return (line.ljust(_ALIGNED_BYTES - 1) if aligned else line) + b"\n"
