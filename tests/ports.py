"""Ports for servers that tests start."""

from __future__ import annotations

import os
import socket

# Below the ports that kernels give to outgoing connections (on Linux from 32768 on), which could take one that is free
# now before its server starts.
FIRST, LAST = 10_000, 30_000

# Workers of pytest, whose process numbers are neighbours, begin far from one another.
_next = FIRST + os.getpid() * 211 % (LAST - FIRST)


def free_ports(count: int) -> list[int]:
    """Returns consecutive ports of 127.0.0.1 that nobody listens on and that this process has not had before."""
    global _next
    while True:
        start = _next if _next + count <= LAST else FIRST
        _next = start + count
        try:
            for port in range(start, start + count):
                socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return list(range(start, start + count))
