"""The only port that faces clients: TLS, and of Flower's interfaces the fleet's alone.

Flower's server answers three interfaces on one port. Only the fleet's authenticates its callers, by the keys of the
clients; whoever reaches the others can start apps. So Flower's server listens on 127.0.0.1, and this gateway, in front
of it, forwards requests to `/v1/fleet/` and refuses all others without forwarding a byte.
"""

from __future__ import annotations

import argparse
import re
import ssl
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

FLEET = re.compile(rb"/v1/fleet/[a-z-]*")
"""Paths of the fleet's interface, as they stand in a request: nothing encoded, no parent folders, no query."""
LARGEST_REQUEST_BYTES = 64 * 2**20
"""Flower sends a payload in objects of 5 MiB."""
CONNECTIONS = 1024
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_SET_ANEW = frozenset(
    b"host connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
"""Headers about one connection (RFC 9110, section 7.6.1), which are not forwarded."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _TooLargeError(Exception):
    """A request's body is beyond the limit."""


class Gateway:
    """An ASGI application that forwards the fleet's requests.

    Args:
        client: Sends the requests.
        server: Flower's server, `https://127.0.0.1:9444`.
    """

    def __init__(self, client: httpx.AsyncClient, server: str) -> None:
        self._client, self._server = client, server

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a path that is not the fleet's gets 403."""
        if scope["type"] != "http":
            return
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not FLEET.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403, b"Only /v1/fleet/ is served here.\n")
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in _SET_ANEW]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        body = _body(receive) if has_body else None
        request = httpx.Request(scope["method"], self._server + path.decode(), headers=headers, content=body)
        try:
            response = await self._client.send(request, stream=True)
        except _TooLargeError:
            await _answer(send, 413, b"The request is too large.\n")
            return
        except httpx.HTTPError as error:
            print(f"Flower's server did not answer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await _answer(send, 503, b"The server does not answer.\n")
            return
        try:
            kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _SET_ANEW]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()


async def _body(receive: Receive) -> AsyncIterator[bytes]:
    """Yields a request's body as it arrives."""
    size_bytes, more = 0, True
    while more:
        event = await receive()
        if event["type"] == "http.disconnect":
            raise httpx.ReadError("the client has gone away")
        chunk: bytes = event.get("body", b"")
        more = event.get("more_body", False)
        size_bytes += len(chunk)
        if size_bytes > LARGEST_REQUEST_BYTES:
            raise _TooLargeError
        if chunk:
            yield chunk


async def _answer(send: Send, status: int, text: bytes) -> None:
    headers = [
        (b"content-type", b"text/plain"),
        (b"content-length", str(len(text)).encode()),
        (b"connection", b"close"),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": text})


def main() -> None:
    """Serves until a signal ends it."""
    import uvicorn

    parser = argparse.ArgumentParser(description="Forward the fleet's interface of Flower's server.")
    for name in ("--host", "--port", "--certificate", "--key", "--authority", "--server"):
        parser.add_argument(name, required=True)
    given = parser.parse_args()
    trust = ssl.create_default_context(cafile=given.authority)
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=64)
    client = httpx.AsyncClient(verify=trust, timeout=TIMEOUT, limits=limits, trust_env=False)
    uvicorn.run(
        Gateway(client, given.server),
        host=given.host,
        port=int(given.port),
        ssl_certfile=given.certificate,
        ssl_keyfile=given.key,
        lifespan="off",
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        date_header=False,
        limit_concurrency=CONNECTIONS,
        timeout_keep_alive=30,
    )


if __name__ == "__main__":
    main()
