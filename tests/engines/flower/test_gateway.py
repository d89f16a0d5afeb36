"""The port that faces clients: what it forwards to Flower's server, and what it refuses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from fedguild.engines.flower import gateway
from fedguild.engines.flower.gateway import Gateway

SERVER = "https://127.0.0.1:9444"
EMPTY = httpx.ByteStream(b"")
Answered = tuple[int, list[tuple[bytes, bytes]], bytes]


def ask(
    path: str,
    answer: Callable[[httpx.Request], httpx.Response],
    *,
    method: str = "POST",
    query: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
    chunks: tuple[bytes, ...] = (b"body",),
) -> Answered:
    """Returns the status, the headers and the body of the gateway's answer to one request."""
    events = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]
    given = [(b"content-length", str(sum(map(len, chunks))).encode())] if headers is None else headers
    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "headers": given,
    }
    sent: list[Any] = []

    async def receive() -> Any:
        return events.pop(0) if events else {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)

    async def once() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await Gateway(client, SERVER)(scope, receive, send)

    asyncio.run(once())
    start, *bodies = sent
    return start["status"], list(start["headers"]), b"".join(event.get("body", b"") for event in bodies)


def nobody(request: httpx.Request) -> httpx.Response:
    pytest.fail(f"{request.url} reached Flower's server")


def test_a_request_of_a_client_is_forwarded_as_it_is() -> None:
    seen: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request)
        headers = {"content-type": "application/protobuf", "date": "today", "connection": "keep-alive"}
        return httpx.Response(401, headers=headers, stream=httpx.ByteStream(b"Invalid SuperNode authentication"))

    headers = [
        (b"host", b"guild.example.org:9443"),
        (b"connection", b"keep-alive"),
        (b"flwr-signature", b"c2lnbmVk"),
        (b"content-length", b"10"),
    ]
    status, returned, body = ask("/v1/fleet/pull-messages", answer, headers=headers, chunks=(b"01234", b"56789"))
    assert (status, body) == (401, b"Invalid SuperNode authentication")
    assert (b"date", b"today") in returned
    assert not [name for name, _ in returned if name.lower() == b"connection"]
    (request,) = seen
    assert (request.method, str(request.url)) == ("POST", f"{SERVER}/v1/fleet/pull-messages")
    assert request.read() == b"0123456789"
    assert request.headers["flwr-signature"] == "c2lnbmVk"
    assert request.headers["host"] == "127.0.0.1:9444"
    assert request.headers["content-length"] == "10"
    assert "connection" not in request.headers


def test_the_clients_look_at_the_clock_gets_its_answer() -> None:
    """`HEAD /v1/fleet/`, without a body, is how a client reads the server's date before it starts."""
    seen: list[httpx.Request] = []
    status, headers, body = ask(
        "/v1/fleet/",
        lambda request: seen.append(request) or httpx.Response(404, headers={"date": "today"}, stream=EMPTY),
        method="HEAD",
        headers=[],
    )
    assert (status, body) == (404, b"")
    assert (b"date", b"today") in headers
    assert "transfer-encoding" not in seen[0].headers


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/docs",
        "/v1/fleet",
        "/v1/control/start-run",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet//control/start-run",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/pull-messages\n",
        "/V1/FLEET/pull-messages",
        "//v1/fleet/pull-messages",
        "https://127.0.0.1:9444/v1/fleet/pull-messages",
    ],
)
def test_no_other_path_reaches_flowers_server(path: str) -> None:
    status, _, body = ask(path, nobody)
    assert (status, body) == (403, b"Only /v1/fleet/ is served here.\n")


def test_a_query_reaches_nothing() -> None:
    assert ask("/v1/fleet/pull-messages", nobody, query=b"to=/v1/control/start-run")[0] == 403


def test_a_body_beyond_the_limit_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LARGEST_REQUEST_BYTES", 9)

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=EMPTY)

    chunked = [(b"transfer-encoding", b"chunked")]
    assert ask("/v1/fleet/push-object", answer, headers=chunked, chunks=(b"01234", b"5678"))[0] == 200
    assert ask("/v1/fleet/push-object", answer, headers=chunked, chunks=(b"01234", b"56789", b"more"))[0] == 413


def test_a_server_that_is_down_is_unavailable() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert ask("/v1/fleet/pull-messages", answer)[0] == 503


def test_a_client_that_goes_away_leaves_no_error() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=EMPTY)

    assert ask("/v1/fleet/push-object", answer, headers=[(b"content-length", b"5")], chunks=())[0] == 503


def test_a_web_socket_gets_no_answer() -> None:
    async def once() -> None:
        async with httpx.AsyncClient(transport=httpx.MockTransport(nobody)) as client:
            await Gateway(client, SERVER)({"type": "websocket"}, nobody, nobody)  # type: ignore[arg-type]

    asyncio.run(once())
