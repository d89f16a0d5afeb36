"""A client that is turned away again and again, for another reason each time, under whatever keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from fedguild.federation.flower import client_registry
from fedguild.federation.flower.client_registry import MOST_REASONS, ClientRegistry


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
