"""Clients that are turned away again and again, under whatever keys, or that never say who they are."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedguild.federation.flower import client_registry
from fedguild.federation.flower.client_registry import MOST_REASONS, ClientRegistry
from fedguild.federation.flower.ipc import TRAINER_DIED
from fedguild.federation.flower.message import Message

HELLO = {"budget": "all", "sizes": {"train": 9, "validation": 0, "test": 0}, "fedguild": "1", "model": "m"}


@pytest.mark.parametrize("keys", [1, 500], ids=["one key", "another key each time"])
def test_a_client_that_is_never_the_same_is_not_asked_for_ever(keys, monkeypatch):
    clock, asked, noted, lines = SimpleNamespace(now=0.0), [], [], []
    monkeypatch.setattr(client_registry.time, "monotonic", lambda: clock.now)

    class Transport:
        def nodes(self):
            return [SimpleNamespace(id=100 + len(asked) % keys, name="client-000")]

        def send(self, node, message, ttl_seconds):
            asked.append(message)
            return str(len(asked))

        def poll(self, message_id, largest):
            return asked[-1].reply(failure=f"reason {message_id}")

    registry = ClientRegistry(
        Transport(), "ab" * 16, 1, {}, echo=lines.append, refusal=lambda *values: noted.append(values)
    )
    for _ in range(500):
        registry.refresh()
        clock.now += 1000.0
    assert len(noted) == len(lines) == MOST_REASONS + 1
    assert "this run asks it no more" in lines[-1]
    if keys == 1:
        assert len(asked) == MOST_REASONS + 1


def one_client(online, faults):
    """Returns a registry of one client, whose faults are those at each hello, and what it notes."""
    noted, transport = (
        [],
        SimpleNamespace(
            nodes=lambda: list(online),
            send=lambda node, message, ttl_seconds: "asked",
            poll=lambda message_id, largest: Message("hello", registry.run, 0, 0, metadata=HELLO),
        ),
    )
    checks = iter(faults)
    registry = ClientRegistry(
        transport,
        "ab" * 16,
        1,
        {},
        check=lambda client, description: next(checks),
        refusal=lambda *values: noted.append(("refused", *values)),
        acceptance=lambda *values: noted.append(("accepted", *values)),
    )
    return registry, noted


def test_a_refused_client_that_is_accepted_after_all_is_noted(monkeypatch):
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(client_registry.time, "monotonic", lambda: clock.now)
    registry, noted = one_client([SimpleNamespace(id=77, name="client-000")], ["too old", "too old", ""])
    for _ in range(4):
        registry.refresh()
        clock.now += 1000.0
    assert noted == [("refused", 77, "client-000", "too old")], "it is not admitted yet"
    registry.note_accepted()
    registry.note_accepted()
    assert noted[1:] == [("accepted", 77, "client-000")]


@pytest.mark.parametrize("outcome", ["other key", "both keys", "turned away"])
def test_who_comes_back_with_another_key_is_noted_unless_it_is_turned_away(outcome):
    online = [SimpleNamespace(id=1, name="client-000")]
    registry, noted = one_client(online, ["too old", "", ""])
    registry.refresh()
    if outcome != "both keys":
        online.clear()
    online.append(SimpleNamespace(id=2, name="client-000"))
    registry.refresh()
    assert registry.clients[0].node == 2
    if outcome == "turned away":
        registry.turn_away(0, "its weight")
    registry.note_accepted()
    expected = {
        "other key": [("accepted", 1, "client-000")],
        "both keys": [],
        "turned away": [("refused", 2, "client-000", "its weight")],
    }
    assert noted[1:] == expected[outcome]


@pytest.mark.parametrize("waits", [True, False], ids=["stays", "disconnects"])
def test_a_node_cannot_claim_to_be_another_client(waits):
    """Not even if it has gone by the time its answer is read."""
    online, lines = [SimpleNamespace(id=77, name="client-002")], []
    transport = SimpleNamespace(
        nodes=lambda: list(online),
        send=lambda node, message, ttl_seconds: "asked",
        poll=lambda message_id, largest: None,
    )
    registry = ClientRegistry(transport, "ab" * 16, 6, {}, echo=lines.append)
    registry.refresh()
    transport.poll = lambda message_id, largest: Message("hello", registry.run, 0, 5, metadata=HELLO)
    if not waits:
        online.clear()
    registry.refresh()
    assert registry.clients == {}
    assert "its key was registered for client-002, but it claims to be client-005" in lines[0]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (0, 2, 1)])
def test_sites_that_learn_their_texts_differently_are_pointed_out(order):
    """Each is right by itself, and one adapter would learn both."""
    lines = []
    nodes = [SimpleNamespace(id=number, name=f"client-00{number}") for number in order]
    texts = ("all_turns", "last_turn", "all_turns")
    registry = ClientRegistry(
        SimpleNamespace(
            nodes=lambda: nodes,
            send=lambda node, message, ttl_seconds: str(node),
            poll=lambda message_id, largest: Message(
                "hello", registry.run, 0, int(message_id), metadata={**HELLO, "texts": texts[int(message_id)]}
            ),
        ),
        "ab" * 16,
        3,
        {},
        echo=lines.append,
    )
    registry.refresh()
    assert sorted(registry.clients) == [0, 1, 2]
    warnings = [line for line in lines if line.startswith("Warning")]
    assert warnings
    assert all("does not learn its texts as" in line and "client-001" in line for line in warnings)


def test_a_client_that_never_says_who_it_is_is_asked_a_few_times_an_hour(monkeypatch):
    clock, asked, lines = SimpleNamespace(now=0.0), [], []
    monkeypatch.setattr(client_registry.time, "monotonic", lambda: clock.now)
    transport = SimpleNamespace(
        nodes=lambda: [SimpleNamespace(id=100, name="client-000")],
        send=lambda node, message, ttl_seconds: asked.append(message) or str(len(asked)),
        poll=lambda message_id, largest: asked[-1].reply(failure=f"{TRAINER_DIED} {message_id}"),
    )
    registry = ClientRegistry(transport, "ab" * 16, 1, {}, echo=lines.append)
    while clock.now < 86_400:
        registry.refresh()
        clock.now += 0.5
    assert len(asked) == len(lines) < 24 * 7
