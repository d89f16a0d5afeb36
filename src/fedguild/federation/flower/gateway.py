"""The only port that clients can reach: TLS, and of Flower's interfaces only the fleet's.

Flower's server answers three interfaces on one port. Only the fleet's authenticates its callers, by the keys of the
clients; anyone who reaches the others can start apps. So Flower's server listens on 127.0.0.1, and this gateway
forwards requests to `/v1/fleet/` and refuses all others without forwarding a byte. It reads the body of signed requests
only, counts each key's bytes, and compares a message's sender with the node that sends it.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, MutableMapping
from typing import Any

import httpx

from fedguild.federation.flower.fleet_requests import PUSH_MESSAGES, fault_of_push, repeats, signer

FLEET = re.compile(rb"/v1/fleet/[a-z-]*")
"""Paths of the fleet's interface, as they stand in a request: nothing encoded, no parent folders, no query."""
LARGEST_REQUEST_BYTES = 64 * 2**20
"""Flower sends a payload in objects of 5 MiB."""
LARGEST_PUSH_BYTES = 8 * 2**20
"""Largest request that announces a message; it names the message's objects, with about 70 bytes each."""
PAUSE_SECONDS = 60.0
"""Longest pause in a request's body."""
BODY_SECONDS = 30.0
"""A request's body may take that long, and longer as it comes at the least rate."""
BYTES_PER_SECOND = 8192.0
"""The least rate of a body, where the operator sets no other."""
TIMEOUT = httpx.Timeout(60.0, connect=10.0)
_SET_ANEW = frozenset(
    b"host connection keep-alive proxy-authenticate proxy-authorization te trailer transfer-encoding upgrade".split()
)
"""Headers about one connection (RFC 9110, section 7.6.1), which are not forwarded."""

_KEYS = 10_000
"""Keys whose bytes are remembered before those without are forgotten."""

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class _TooLargeError(Exception):
    """A request's body is beyond the limit."""


class _QuotaError(Exception):
    """A client has sent more than it may."""


class _SlowError(Exception):
    """A request's body does not arrive fast enough."""


class Quota:
    """How many bytes each client may send: a burst, and as many again in every window (a leaky bucket).

    Within the first window, or any after a long silence, it may therefore send up to twice as many.

    Args:
        most_bytes: At once.
        clock: Returns the time in seconds.
    """

    def __init__(self, most_bytes: int, window_seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.most_bytes, self.window_seconds = most_bytes, window_seconds
        self._clock = clock
        self._levels: dict[bytes, tuple[float, float]] = {}
        self._told: dict[bytes, float] = {}

    def take(self, key: bytes, size_bytes: int) -> bool:
        """Whether a client may send this many more bytes; if so, they are counted."""
        now = self._clock()
        level = self._level(key, now) + size_bytes
        if level > self.most_bytes:
            if now - self._told.get(key, -self.window_seconds) >= self.window_seconds:
                self._told[key] = now
                print(
                    f"A client sends more than {self.most_bytes} bytes, and as many again every "
                    f"{self.window_seconds:g} s (client_bytes in server.yaml); its key: "
                    f"{' '.join(key.decode(errors='replace').split())}",
                    file=sys.stderr,
                    flush=True,
                )
            return False
        self._levels[key] = (level, now)
        if len(self._levels) > _KEYS:
            self._levels = {each: held for each, held in self._levels.items() if self._level(each, now) > 0}
        return True

    def forget(self, key: bytes) -> None:
        """Forgets a key that belongs to no client."""
        self._levels.pop(key, None)
        self._told.pop(key, None)

    def _level(self, key: bytes, now: float) -> float:
        level, noted = self._levels.get(key, (0.0, now))
        return max(0.0, level - (now - noted) * self.most_bytes / self.window_seconds)


class Gateway:
    """An ASGI application that forwards the fleet's requests.

    Args:
        server: Flower's server, `https://127.0.0.1:9444`.
        quota: How much each client may send; None for any number of bytes.
        bytes_per_second: The least rate of a body after its first `BODY_SECONDS`.
    """

    def __init__(
        self,
        client: httpx.AsyncClient,
        server: str,
        quota: Quota | None = None,
        bytes_per_second: float = BYTES_PER_SECOND,
    ) -> None:
        self._client, self._server, self._quota = client, server, quota
        self._bytes_per_second = bytes_per_second

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers one request; a path that is not the fleet's gets 403, a body without a signature 401."""
        if scope["type"] != "http":
            return
        path: bytes = scope.get("raw_path") or scope["path"].encode()
        if not FLEET.fullmatch(path) or scope["query_string"]:
            await _answer(send, 403, b"Only /v1/fleet/ is served here.\n")
            return
        if repeats(scope["headers"]):
            await _answer(send, 400, b"A header of Flower's comes twice.\n")
            return
        headers = [(name, value) for name, value in scope["headers"] if name not in _SET_ANEW]
        has_body = any(name in (b"content-length", b"transfer-encoding") for name, _ in scope["headers"])
        key = signer(scope["headers"]) if has_body else None
        if has_body and key is None:
            await _answer(send, 401, b"The request is not signed.\n")
            return
        arriving = None if key is None else self._counted(key, receive)
        body: AsyncIterator[bytes] | bytes | None = arriving
        try:
            if path.decode() == PUSH_MESSAGES:
                body = await _whole(arriving, LARGEST_PUSH_BYTES)
                if fault := fault_of_push(body):
                    await _answer(send, 403, f"{fault}\n".encode())
                    return
            request = httpx.Request(scope["method"], self._server + path.decode(), headers=headers, content=body)
            response = await self._client.send(request, stream=True)
        except _TooLargeError:
            await _answer(send, 413, b"The request is too large.\n")
            return
        except _QuotaError:
            await _answer(send, 429, b"This client has sent too much.\n")
            return
        except _SlowError:
            await _answer(send, 503, b"The request came too slowly.\n")  # at which Flower's node tries again
            return
        except httpx.HTTPError as error:
            print(f"Flower's server did not answer: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            await _answer(send, 503, b"The server does not answer.\n")
            return
        if key is not None and response.status_code == 401 and self._quota is not None:
            self._quota.forget(key)
        try:
            kept = [(name, value) for name, value in response.headers.raw if name.lower() not in _SET_ANEW]
            await send({"type": "http.response.start", "status": response.status_code, "headers": kept})
            async for chunk in response.aiter_raw():
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            await response.aclose()

    async def _counted(self, key: bytes, receive: Receive) -> AsyncIterator[bytes]:
        async for chunk in _body(receive, self._bytes_per_second):
            if self._quota is not None and not self._quota.take(key, len(chunk)):
                raise _QuotaError
            yield chunk


async def _whole(body: AsyncIterator[bytes] | None, limit_bytes: int) -> bytes:
    content = bytearray()
    if body is not None:
        async for chunk in body:
            content += chunk
            if len(content) > limit_bytes:
                raise _TooLargeError
    return bytes(content)


async def _body(receive: Receive, bytes_per_second: float) -> AsyncIterator[bytes]:
    """Yields a request's body as it arrives.

    Only time spent waiting for the client counts: a slow Flower server is not the client's fault.
    """
    size_bytes, more, waited = 0, True, 0.0
    while more:
        started, left = time.monotonic(), BODY_SECONDS + size_bytes / bytes_per_second - waited
        try:
            event = await asyncio.wait_for(receive(), min(PAUSE_SECONDS, max(left, 0.0)))
        except TimeoutError:
            raise _SlowError from None
        waited += time.monotonic() - started
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
    from fedguild.federation.flower.listening import CONNECTIONS, serve

    parser = argparse.ArgumentParser(description="Forward the fleet's interface of Flower's server.")
    for name in ("--host", "--port", "--certificate", "--key", "--authority", "--server"):
        parser.add_argument(name, required=True)
    parser.add_argument("--client-bytes", type=int)
    parser.add_argument("--client-seconds", type=float, default=600.0)
    parser.add_argument("--connections-per-address", type=int)
    parser.add_argument("--header-seconds", type=float, default=10.0)
    parser.add_argument("--bytes-per-second", type=float, default=BYTES_PER_SECOND)
    given = parser.parse_args()
    trust = ssl.create_default_context(cafile=given.authority)
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=64)
    client = httpx.AsyncClient(verify=trust, timeout=TIMEOUT, limits=limits, trust_env=False)
    quota = None if given.client_bytes is None else Quota(given.client_bytes, given.client_seconds)
    serve(
        Gateway(client, given.server, quota, given.bytes_per_second),
        host=given.host,
        port=int(given.port),
        certificate=given.certificate,
        key=given.key,
        header_seconds=given.header_seconds,
        connections_per_address=given.connections_per_address,
    )


if __name__ == "__main__":
    main()
