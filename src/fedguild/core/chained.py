"""Hash-chained JSON lines: each line's last field, `seal`, is a checksum of the line and of all lines before it.

A line that was changed, removed, repeated or moved breaks the chain; only the removal of lines from the end does not.
Other readers see plain JSON lines with one more field.
"""

from __future__ import annotations

import errno
import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import IO

SEAL = "seal"
_CHUNK_BYTES = 2**16
_DIGITS = 16
_SUFFIX = re.compile(rb',"seal":"([0-9a-f]{16})"\}')
_SUFFIX_BYTES = len(b',"seal":""}') + _DIGITS
START = "0" * _DIGITS
"""The seal before the first line."""


def sealed(content: str, before: str) -> tuple[bytes, str]:
    """Returns a line with its seal, ending in a newline, and the seal.

    Args:
        content: A JSON object with at least one field, on one line.
        before: The seal of the line before it, or `START`.
    """
    seal = _seal(content.encode(), before)
    return f'{content[:-1]},"{SEAL}":"{seal}"}}\n'.encode(), seal


def unsealed(line: bytes, before: str) -> tuple[bytes, str]:
    """Returns a line's content without its seal, and the seal.

    Args:
        line: The line, without its newline.
        before: The seal of the line before it, or `START`.

    Raises:
        ValueError: the line has no seal, or one that does not follow from the line and those before it.
    """
    found = _SUFFIX.fullmatch(line[-_SUFFIX_BYTES:])
    if found is None:
        raise ValueError("it has no seal")
    content, seal = content_of(line), found[1].decode()
    if seal != _seal(content, before):
        raise ValueError("its seal does not follow from it and the lines before it: it was changed, moved or removed")
    return content, seal


def is_sealed(line: bytes) -> bool:
    """Whether a line ends with a seal, valid or not."""
    return _SUFFIX.fullmatch(line[-_SUFFIX_BYTES:]) is not None


def content_of(line: bytes) -> bytes:
    return line[:-_SUFFIX_BYTES] + b"}" if is_sealed(line) else line


def _seal(content: bytes, before: str) -> str:
    return hashlib.sha256(before.encode() + content).hexdigest()[:_DIGITS]


def seal_of(path: Path) -> str:
    """Returns the seal of a file's last complete line, which stands for the whole file; `START` without one."""
    if not path.exists():
        return START
    with open(path, "rb", buffering=0) as stream:
        return last_seal(stream)[1]


def last_seal(stream: IO[bytes]) -> tuple[int, str]:
    """Returns where the last complete line of a file ends, and its seal; `START` if it has none.

    Reads the file from its end, as far as needed.
    """
    start, tail = stream.seek(0, os.SEEK_END), b""
    while start > 0 and tail.count(b"\n") < 2:
        step = min(_CHUNK_BYTES, start)
        start -= step
        stream.seek(start)
        tail = stream.read(step) + tail
    lines = tail[: tail.rfind(b"\n") + 1]
    found = _SUFFIX.fullmatch(lines.rstrip(b"\n")[-_SUFFIX_BYTES:])
    return start + len(lines), found[1].decode() if found else START


def append(stream: IO[bytes], contents: Iterable[str]) -> None:
    """Adds lines with their seals behind the last complete line of a file, and waits until they are on disk.

    Args:
        stream: The file, unbuffered, open for reading and appending.
        contents: As `content` of `sealed`.

    Raises:
        OSError: not all of them can be written; none is.
    """
    end, before = last_seal(stream)
    stream.truncate(end)
    lines = list[bytes]()
    for content in contents:
        line, before = sealed(content, before)
        lines.append(line)
    whole = b"".join(lines)
    try:
        if stream.write(whole) != len(whole):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(stream.fileno())
    except OSError:
        stream.truncate(end)
        raise
