"""The port that faces clients: what it forwards to Flower's server, and what it refuses."""

from __future__ import annotations

import asyncio
import datetime
import socket
import ssl
import sys
import threading
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from ipaddress import ip_address
from typing import Any

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.supercore.primitives.asymmetric import generate_key_pairs, public_key_to_bytes, sign_message

from fedguild.federation.flower import gateway
from fedguild.federation.flower.gateway import Gateway, Quota
from fedguild.federation.flower.listening import server_of

SERVER = "https://127.0.0.1:9444"
EMPTY = httpx.ByteStream(b"")
Answered = tuple[int, list[tuple[bytes, bytes]], bytes]
KEYS = [generate_key_pairs() for _ in range(2)]


def signed(client: int = 0) -> list[tuple[bytes, bytes]]:
    private, public = KEYS[client]
    timestamp = b"2026-11-22T21:00:00+00:00"
    return [
        (b"flwr-public-key", b64encode(public_key_to_bytes(public))),
        (b"flwr-timestamp", timestamp),
        (b"flwr-signature", b64encode(sign_message(private, timestamp))),
    ]


def ask(
    path: str,
    answer: Callable[[httpx.Request], httpx.Response],
    *,
    method: str = "POST",
    query: bytes = b"",
    headers: list[tuple[bytes, bytes]] | None = None,
    chunks: tuple[bytes, ...] = (b"body",),
    quota: Quota | None = None,
) -> Answered:
    """Returns the status, the headers and the body of the gateway's answer to one request."""
    events = [
        {"type": "http.request", "body": chunk, "more_body": number < len(chunks) - 1}
        for number, chunk in enumerate(chunks)
    ]
    length = [(b"content-length", str(sum(map(len, chunks))).encode())]
    given = [*length, *signed()] if headers is None else headers
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
            await Gateway(client, SERVER, quota)(scope, receive, send)

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

    signed_headers = signed()
    headers = [
        (b"host", b"guild.example.org:9443"),
        (b"connection", b"keep-alive"),
        *signed_headers,
        (b"content-length", b"10"),
    ]
    status, returned, body = ask("/v1/fleet/pull-messages", answer, headers=headers, chunks=(b"01234", b"56789"))
    assert (status, body) == (401, b"Invalid SuperNode authentication")
    assert (b"date", b"today") in returned
    assert not [name for name, _ in returned if name.lower() == b"connection"]
    (request,) = seen
    assert (request.method, str(request.url)) == ("POST", f"{SERVER}/v1/fleet/pull-messages")
    assert request.read() == b"0123456789"
    assert request.headers["flwr-signature"].encode() == dict(signed_headers)[b"flwr-signature"]
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

    chunked = [(b"transfer-encoding", b"chunked"), *signed()]
    assert ask("/v1/fleet/push-object", answer, headers=chunked, chunks=(b"01234", b"5678"))[0] == 200
    assert ask("/v1/fleet/push-object", answer, headers=chunked, chunks=(b"01234", b"56789", b"more"))[0] == 413


def test_a_server_that_is_down_is_unavailable() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert ask("/v1/fleet/pull-messages", answer)[0] == 503


def test_a_client_that_goes_away_leaves_no_error() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=EMPTY)

    assert ask("/v1/fleet/push-object", answer, headers=[(b"content-length", b"5"), *signed()], chunks=())[0] == 503


def ok(request: httpx.Request) -> httpx.Response:
    request.read() if isinstance(request.stream, httpx.ByteStream) else None
    return httpx.Response(200, stream=EMPTY)


@pytest.mark.parametrize(
    "headers",
    [
        [],
        signed()[:2],
        [*signed()[:2], signed(1)[2]],
        [(b"flwr-public-key", b"bm9uZQ=="), *signed()[1:]],
        [(b"flwr-public-key", b"x" * 100_000), *signed()[1:]],
        [*signed()[:1], (b"flwr-timestamp", b"2026-11-22T22:00:00+00:00"), *signed()[2:]],
    ],
    ids=["no signature", "half of it", "of another key", "no key", "a long key", "of another time"],
)
def test_the_body_of_a_request_that_nobody_signed_is_not_read(headers: list[tuple[bytes, bytes]]) -> None:
    given = [(b"transfer-encoding", b"chunked"), *headers]
    assert ask("/v1/fleet/push-object", nobody, headers=given)[0] == 401


def test_a_client_may_send_so_many_bytes_in_a_time_and_no_more(capsys: pytest.CaptureFixture[str]) -> None:
    """Each key by itself; the operator hears of it once."""
    now = 0.0
    quota = Quota(1000, 10.0, lambda: now)

    def send(size: int, client: int = 0) -> int:
        length = (b"content-length", str(size).encode())
        return ask("/v1/fleet/push-object", ok, headers=[length, *signed(client)], chunks=(bytes(size),), quota=quota)[
            0
        ]

    assert [send(400), send(400), send(400), send(400)] == [200, 200, 429, 429]
    assert send(400, client=1) == 200
    now = 5.0
    assert [send(400), send(400)] == [200, 429], "half of it flowed off in half of the time"
    now = 15.0
    assert send(1000) == 200
    assert capsys.readouterr().err.count("client_bytes in server.yaml") == 1


@pytest.mark.parametrize("place", range(3), ids=["key", "timestamp", "signature"])
@pytest.mark.parametrize("first", [False, True])
def test_a_request_that_says_twice_who_sent_it_is_refused(place: int, first: bool) -> None:
    """Flower's server reads the first of two, and the quota would count the bytes for the other."""
    quota = Quota(1000, 10.0, lambda: 0.0)
    name, other = signed(1)[place]
    twice = [(name.upper(), other), *signed()] if first else [*signed(), (name, other)]
    given = [(b"content-length", b"4"), *twice]
    assert ask("/v1/fleet/push-object", nobody, headers=given, quota=quota)[0] == 400
    assert ask("/v1/fleet/push-object", nobody, headers=twice, quota=quota)[0] == 400, "without a body as well"
    assert not quota._levels


def test_a_key_that_flowers_server_does_not_know_is_forgotten() -> None:
    quota = Quota(1000, 10.0, lambda: 0.0)
    for _ in range(3):
        status, _, _ = ask("/v1/fleet/push-object", lambda request: httpx.Response(401, stream=EMPTY), quota=quota)
        assert status == 401
    assert not quota._levels


def pushed(node: int, *senders: int, answers: str = "f" * 64) -> bytes:
    request = PushMessagesRequest()
    request.node.node_id = node
    for sender in senders:
        message = request.messages_list.add()
        message.metadata.src_node_id, message.metadata.reply_to_message_id = sender, answers
        request.message_object_trees.add()
    return request.SerializeToString()


def test_a_message_is_from_the_node_that_sends_it() -> None:
    """Flower compares the key with the request's node only."""
    seen: list[bytes] = []

    def answer(request: httpx.Request) -> httpx.Response:
        seen.append(request.read())
        return httpx.Response(200, stream=EMPTY)

    honest = pushed(2**63 + 7, 2**63 + 7)
    assert ask("/v1/fleet/push-messages", answer, chunks=(honest[:5], honest[5:]))[0] == 200
    assert seen == [honest]
    for body, reason in (
        (pushed(7, 8), b"another node"),
        (pushed(7, 7, 8), b"one message"),
        (pushed(7), b"one message"),
        (pushed(7, 7, answers=""), b"answers nothing"),
        (b"\xff", b"cannot be read"),
    ):
        status, _, text = ask("/v1/fleet/push-messages", nobody, chunks=(body,))
        assert (status, reason in text) == (403, True)


def test_a_request_to_push_messages_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "LARGEST_PUSH_BYTES", 9)
    assert ask("/v1/fleet/push-messages", nobody, chunks=(pushed(7, 7),))[0] == 413


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """A certificate of 127.0.0.1 and its key."""
    folder, key = tmp_path_factory.mktemp("certificate"), ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), 1, now, now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "server.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "server.key").write_bytes(private)
    return str(folder / "server.pem"), str(folder / "server.key")


@pytest.fixture
def listening(
    request: pytest.FixtureRequest, certificate: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[int]:
    """The port of a gateway over TLS in this process, in front of a server that answers everything."""
    most, header_seconds, total = request.param
    monkeypatch.setattr("fedguild.federation.flower.listening.CONNECTIONS", total)
    client = httpx.AsyncClient(transport=httpx.MockTransport(ok))
    server, listeners = server_of(
        Gateway(client, SERVER),
        host="127.0.0.1",
        port=0,
        certificate=certificate[0],
        key=certificate[1],
        header_seconds=header_seconds,
        connections_per_address=most,
    )
    thread = threading.Thread(target=server.run, args=(list(listeners),), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield listeners[0].getsockname()[1]
    server.should_exit = server.force_exit = True
    thread.join(20)
    assert not thread.is_alive()


def connect(port: int, context: ssl.SSLContext | None, source: str = "127.0.0.1") -> socket.socket:
    """Opens a connection, over TLS or not, and sends nothing."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=10, source_address=(source, 0))
    return connection if context is None else context.wrap_socket(connection, server_hostname="127.0.0.1")


def honest(port: int, context: ssl.SSLContext) -> int:
    with httpx.Client(verify=context, trust_env=False, timeout=10) as client:
        return client.head(f"https://127.0.0.1:{port}/v1/fleet/").status_code


def is_closed(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize("listening", [(None, 0.5, 20)], indirect=True)
@pytest.mark.parametrize("sends", [b"", b"POST /v1/fleet/push-object HTTP/1.1\r\nhost: "], ids=["nothing", "half"])
def test_connections_that_bring_no_request_end(listening: int, sends: bytes, certificate: tuple[str, str]) -> None:
    """As many as there may be at all, so that everybody else gets 503 until they do."""
    context = ssl.create_default_context(cafile=certificate[0])
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(listening, context)) for _ in range(20)]
        for connection in idle:
            connection.sendall(sends)
        assert all(is_closed(connection) for connection in idle)
        assert honest(listening, context) == 200


@pytest.mark.parametrize("listening", [(None, 0.5, 20)], indirect=True)
def test_a_connection_that_does_not_begin_tls_ends(listening: int) -> None:
    with connect(listening, None) as connection:
        assert is_closed(connection)


@pytest.mark.parametrize("listening", [(None, 30.0, 20)], indirect=True)
def test_a_request_that_comes_drop_by_drop_ends(listening, certificate, monkeypatch):
    """Anybody can sign with a key of his own, so that a byte now and then would hold a connection without end."""
    monkeypatch.setattr(gateway, "BODY_SECONDS", 0.5)
    header = [b"POST /v1/fleet/push-messages HTTP/1.1", b"host: 127.0.0.1", b"content-length: 60000000"]
    header += [name + b": " + value for name, value in signed()]
    context = ssl.create_default_context(cafile=certificate[0])
    with connect(listening, context) as connection:
        connection.sendall(b"\r\n".join([*header, b"", b""]))
        connection.settimeout(0.05)
        answer, dropped = b"", 0
        while not answer:
            assert dropped < 1000, "a connection was held by single bytes"
            connection.sendall(b"x")
            dropped += 1
            with suppress(TimeoutError):
                answer = connection.recv(1000)
        assert answer.startswith(b"HTTP/1.1 503")
        connection.settimeout(10)
        while more := connection.recv(1000):
            answer += more
        assert answer.endswith(b"too slowly.\n")
        assert honest(listening, context) == 200


def test_a_body_that_comes_at_the_least_rate_is_not_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long it takes as a whole; and what Flower's server takes is not the client's fault."""
    now = 0.0

    class Clock:
        @staticmethod
        def monotonic() -> float:
            return now

    async def taken(seconds: float, rate: float) -> int:
        nonlocal now
        chunks = [bytes(500)] * 20
        limits = []

        async def receive() -> dict[str, Any]:
            nonlocal now
            now += seconds
            chunk = chunks.pop()
            return {"type": "http.request", "body": chunk, "more_body": bool(chunks)}

        async def within(event: Any, limit: float) -> Any:
            nonlocal now
            limits.append(limit)
            if seconds > limit:
                event.close()
                raise TimeoutError
            return await event

        monkeypatch.setattr(asyncio, "wait_for", within)
        size = 0
        async for chunk in gateway._body(receive, rate):
            size += len(chunk)
            now += 1000.0
        assert max(limits) <= gateway.PAUSE_SECONDS
        return size

    monkeypatch.setattr(gateway, "time", Clock)
    assert asyncio.run(taken(10.0, rate=50.0)) == 10_000
    with pytest.raises(gateway._SlowError):
        asyncio.run(taken(20.0, rate=50.0))


@pytest.mark.skipif(sys.platform != "linux", reason="needs a second loopback address")
@pytest.mark.parametrize("listening", [(5, 30.0, 20)], indirect=True)
def test_one_address_cannot_hold_all_connections(listening: int, certificate: tuple[str, str]) -> None:
    context = ssl.create_default_context(cafile=certificate[0])
    with ExitStack() as stack:
        idle = [stack.enter_context(connect(listening, None, "127.0.0.2")) for _ in range(40)]
        assert all(is_closed(connection) for connection in idle[5:])
        assert honest(listening, context) == 200
    deadline = time.monotonic() + 10
    while True:  # those of an address that closes its own count no more
        with connect(listening, None, "127.0.0.2") as connection:
            connection.settimeout(0.2)
            try:
                if connection.recv(1) != b"":
                    break
            except TimeoutError:
                break
            except ConnectionError:
                pass
        assert time.monotonic() < deadline
        time.sleep(0.05)
