"""The thread that says who hangs while its rank waits for a GPU."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from fedguild.model import ranks as module
from fedguild.model.rank_watch import RankWatch
from fedguild.model.ranks import DEVICE_MARGIN_SECONDS, Direction, Event, Ranks


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def store() -> dist.HashStore:
    found = dist.HashStore()
    for rank in range(3):
        found.set(f"passes/{rank}", "4")
    return found


def test_those_behind_are_named_once_after_the_limit(store):
    clock, said = Clock(), []
    watch = RankWatch(store, "passes", 0, 3, 30.0, said.append, clock)
    watch.look()
    watch.begin(4)
    clock.now += 29
    watch.look()
    assert said == []
    watch.begin(5)
    store.set("passes/0", "5")
    store.set("passes/2", "5")
    clock.now += 29
    watch.look()
    assert said == [], "the pass before is over"
    clock.now += 1
    watch.look()
    watch.look()
    assert said == [
        "Rank 0 of 3 has been in pass 5 of the backbone for 30 s: rank 1 did not come to it and hangs, is out of "
        "memory or has ended."
    ]
    watch.begin(6)
    for rank in range(3):
        store.set(f"passes/{rank}", "6")
    clock.now += 31
    watch.look()
    assert said[1:] == [
        "Rank 0 of 3 has been in pass 6 of the backbone for 30 s, as have all others: one of them hangs within a layer."
    ]


def test_a_rank_without_work_waits_as_long_as_it_takes(store):
    clock, said = Clock(), []
    watch = RankWatch(store, "passes", 0, 3, 30.0, said.append, clock)
    watch.begin(4)
    watch.rest()
    clock.now += 1000
    watch.look()
    assert said == []


def test_a_store_that_does_not_answer_is_said_so(store, monkeypatch):
    clock, said = Clock(), []
    watch = RankWatch(store, "absent", 1, 3, 30.0, said.append, clock)
    store.set_timeout(timedelta(milliseconds=10))
    watch.begin(4)
    clock.now += 31
    watch.look()
    assert said == ["Rank 1 of 3 waits, and rank 0, which has the store, does not answer."]


def test_it_speaks_while_its_rank_is_blocked(store):
    told, said = threading.Event(), []
    watch = RankWatch(store, "passes", 0, 3, 0.01, lambda message: (said.append(message), told.set()))
    watch.start()
    watch.begin(5)
    assert told.wait(60)
    watch.end()
    assert "rank 0, 1, 2 did not come" in said[0]


class Backend:
    timeout = None

    def _set_default_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout


class Group:
    """A process group with a device's communication of its own."""

    def __init__(self) -> None:
        self.backend = Backend()

    def _get_backend(self, device: torch.device) -> Backend:
        assert device == torch.device("cuda", 1)
        return self.backend


def test_the_devices_communication_waits_longer_than_the_ranks(monkeypatch):
    """And the passes that the ranks agree on are watched; on gloo, in a group of this process alone."""
    store, group = dist.HashStore(), Group()
    monkeypatch.setattr(dist.HashStore, "clone", lambda self: self, raising=False)
    ranks = Ranks(0, 1, torch.device("cuda", 1), store, 30.0)
    ranks.watch_device(group)
    assert group.backend.timeout == timedelta(seconds=30.0 + DEVICE_MARGIN_SECONDS)
    began, rested = [], []
    assert ranks.watch is not None
    monkeypatch.setattr(ranks.watch, "begin", began.append)
    monkeypatch.setattr(ranks.watch, "rest", lambda: rested.append(True))
    monkeypatch.setattr(module.dist, "all_reduce", lambda *given: None)
    ranks.take(Event(Direction.FORWARD))
    assert (began, rested) == ([1], [])
    ranks.wait_for_others()
    assert (began, rested) == ([1, 2], [True])
    monkeypatch.setattr(module.dist, "is_initialized", lambda: False)
    ranks.close()
    assert ranks.watch._ended.is_set()


def test_ranks_connect_to_their_store_a_second_time():
    """The watch must not wait behind what its rank asks the store."""
    store = dist.TCPStore("127.0.0.1", 0, 1, True)
    again = store.clone()
    store.set("passes/0", "3")
    assert again.get("passes/0") == b"3"
