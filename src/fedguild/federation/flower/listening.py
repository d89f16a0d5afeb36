"""A server of an ASGI application over TLS that lets no client hold idle connections.

Uvicorn starts a connection's timeout after its first answer, so anyone who opens connections and sends nothing keeps
everybody else out. Here a connection must send a whole request header in time, TLS included. The connections of an
address are limited, including those still in the TLS handshake.
"""

from __future__ import annotations

import asyncio
import resource
import socket
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

CONNECTIONS = 1024
"""Connections at the same time, from all addresses."""
_FILES = 8192


class _Connection(socket.socket):
    """An accepted connection, which reports when it is closed."""

    closed: Callable[[], None] | None = None

    def close(self) -> None:
        super().close()
        closed, self.closed = self.closed, None
        if closed is not None:
            closed()


class Listener(socket.socket):
    """A listening socket that limits the connections from one address and closes those beyond as it accepts them."""

    most: int | None = None
    open: Counter[str]

    def accept(self) -> tuple[socket.socket, Any]:
        """Returns the next connection and its address.

        Raises:
            ConnectionAbortedError: it exceeds the limit, and was closed.
        """
        accepted, address = super().accept()
        host = str(address[0])
        if self.most is not None and self.open[host] >= self.most:
            accepted.close()
            raise ConnectionAbortedError(f"too many connections from {host}")
        connection = _Connection(accepted.family, accepted.type, accepted.proto, fileno=accepted.detach())
        self.open[host] += 1
        connection.closed = partial(self._forget, host)
        return connection, address

    def _forget(self, host: str) -> None:
        self.open[host] -= 1
        if not self.open[host]:
            del self.open[host]


def listen(host: str, port: int, most: int | None) -> list[Listener]:
    """Returns a socket for every address of a host.

    Args:
        most: Most connections from one address, over all these sockets; None for no limit.

    Raises:
        OSError: an address is not this machine's, or its port is taken.
    """
    counted: Counter[str] = Counter()
    listeners = []
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    for family, kind, protocol, _, address in dict.fromkeys(found):
        listener = Listener(family, kind, protocol)
        listener.most, listener.open = most, counted
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.bind(address)
        listeners.append(listener)
    return listeners


def protocol(header_seconds: float) -> type[asyncio.Protocol]:
    """Returns uvicorn's protocol with a limit on the time until a request's header has arrived.

    Args:
        header_seconds: From the beginning of the connection, or the first byte after an answer.
    """

    class Timed(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        """Uvicorn's protocol, which ends connections that bring no request."""

        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:
            super().connection_made(transport)
            self._begin()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.cycle is not None and not self.cycle.response_complete:
                self._end()
            elif not self.transport.is_closing():
                self._begin()

        def connection_lost(self, exc: Exception | None) -> None:
            self._end()
            super().connection_lost(exc)

        def _begin(self) -> None:
            if self._timer is None:
                self._timer = asyncio.get_running_loop().call_later(header_seconds, self.transport.abort)

        def _end(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

    return Timed


class _Server(uvicorn.Server):
    """Uvicorn's server, with a limit on the time that a TLS handshake takes."""

    def __init__(self, config: uvicorn.Config, handshake_seconds: float) -> None:
        super().__init__(config)
        self._handshake_seconds = handshake_seconds

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        loop: Any = asyncio.get_running_loop()
        create = loop.create_server
        loop.create_server = partial(create, ssl_handshake_timeout=self._handshake_seconds)
        try:
            await super().startup(sockets)
        finally:
            loop.create_server = create


def serve(
    application: Any,
    *,
    host: str,
    port: int,
    certificate: str,
    key: str,
    header_seconds: float,
    connections_per_address: int | None,
) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = _FILES if hard == resource.RLIM_INFINITY else min(hard, _FILES)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    try:
        server, listeners = server_of(
            application,
            host=host,
            port=port,
            certificate=certificate,
            key=key,
            header_seconds=header_seconds,
            connections_per_address=connections_per_address,
        )
    except OSError as error:
        print(f"Cannot listen on {host}:{port}: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    server.run(sockets=list(listeners))


def server_of(
    application: Any,
    *,
    host: str,
    port: int,
    certificate: str,
    key: str,
    header_seconds: float,
    connections_per_address: int | None,
) -> tuple[uvicorn.Server, list[Listener]]:
    """Returns a server, and the sockets that it runs on.

    Args:
        certificate: The server's certificate, a PEM file.
        key: Its private key, a PEM file.
        header_seconds: Time limit for a TLS handshake, and again for a request's header.
        connections_per_address: Most connections from one address; None for no limit.

    Raises:
        OSError: it cannot listen there.
    """
    listeners = listen(host, port, connections_per_address)
    config = uvicorn.Config(
        application,
        loop="asyncio",  # whose sockets are Python's, and so ask `Listener`
        http=protocol(header_seconds),
        ssl_certfile=certificate,
        ssl_keyfile=key,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
    )
    return _Server(config, header_seconds), listeners
