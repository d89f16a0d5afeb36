"""Faults in whole runs: what is written down of them, and what a resumed run knows of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from fedguild.engines.local import LocalEngine
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.runs import experiment
from fedguild.runs.setup import Experiment, make_engine
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait, too_late
from fedguild.server.method import Method
from tests.runs.runs import Killed, kill_at, small_config


class Post:
    """A local engine with a post that is slow for client 2 in round 1, and sends what is in `again` once more."""

    def __init__(self, engine: LocalEngine, again: Sequence[Delivery] = ()) -> None:
        self.engine, self.waiting, self.sent = engine, list(again), list[Delivery]()

    def train(self, method: Method, model: object, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL) -> Iterator:
        late, self.waiting = self.waiting, []
        yield from late
        for delivery in self.engine.train(method, model, tasks, terms):
            self.sent.append(delivery)
            if delivery.task.round == 1 and delivery.task.client.index == 2:
                self.waiting.append(delivery)
                yield too_late(delivery.task, delivery.plan, 5.0)
            else:
                yield delivery

    def close(self) -> None: ...


@pytest.fixture
def posts(monkeypatch: pytest.MonkeyPatch) -> list[Post]:
    """The post of every run that began."""
    made: list[Post] = []

    def make(run: Experiment) -> tuple[Post, None]:
        engine, _ = make_engine(run)
        made.append(Post(engine, again=[d for post in made for d in post.sent if d.task.round == 1]))
        return made[-1], None

    monkeypatch.setattr("fedguild.runs.experiment.make_engine", make)
    return made


def rounds_of(folder: Path) -> list[RoundRecord]:
    return [record for record in RunLog(folder).read() if isinstance(record, RoundRecord)]


@pytest.mark.parametrize(("late", "fate"), [("drop", "it is 1 round(s) late"), ("next_round", None)])
def test_a_late_upload_is_written_down(olmoe_folder, tmp_path, posts, late, fate):
    settings = [
        "federation.rounds=2",
        f"federation.straggler_policy={late}",
        "federation.client_fraction=0.75",
        "seed=1",
    ]
    said: list[str] = []
    experiment.run(small_config(olmoe_folder, *settings), tmp_path / "run", progress=Told(said))
    first, second = rounds_of(tmp_path / "run")
    assert 2 in first.participants
    assert [(r.client, r.reason) for r in first.rejected] == [(2, "did not answer within 5 s")]
    (stray,) = second.strays
    assert (stray.round, stray.client) == (1, 2)
    assert stray.upload_bytes > 1000
    if fate is None:
        fate = "the client's upload of round 2 was aggregated instead" if 2 in second.participants else ""
    assert stray.dropped == fate
    assert any("upload of client 2 for round 1" in text for text in said)


class Told:
    """A progress that keeps the messages."""

    def __init__(self, said: list[str]) -> None:
        self.message: Callable[[str], None] = said.append

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *news: None


def test_a_resumed_run_knows_whose_uploads_it_has(olmoe_folder, tmp_path, posts):
    settings = ["federation.rounds=2", "federation.straggler_policy=next_round", "federation.client_fraction=0.75"]
    config = small_config(olmoe_folder, *settings)
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "run")
    experiment.resume(tmp_path / "run")
    first, second = rounds_of(tmp_path / "run")
    had = [index for index in first.participants if index not in {entry.client for entry in first.rejected}]
    assert had
    dropped = {stray.client: stray.dropped for stray in second.strays}
    for index in had:
        assert dropped[index] == "the client's upload of round 1 was aggregated already"


def test_over_selection_and_retries_are_written_down(olmoe_folder, tmp_path, monkeypatch):
    class Flaky(Post):
        def train(self, method, model, tasks, terms=WAIT_FOR_ALL):
            again = bool(self.sent) and self.sent[-1].task.round == tasks[0].round
            for delivery in self.engine.train(method, model, tasks, terms):
                self.sent.append(delivery)
                fails = delivery.needed and not again
                yield replace(delivery, upload=None, failure="gone") if fails else delivery

    monkeypatch.setattr("fedguild.runs.experiment.make_engine", lambda run: (Flaky(make_engine(run)[0]), None))
    settings = ["client_fraction=0.5", "over_selection=0.5", "retries=1", "rounds=1", "quorum=1.0"]
    experiment.run(small_config(olmoe_folder, *[f"federation.{text}" for text in settings]), tmp_path / "run")
    (record,) = rounds_of(tmp_path / "run")
    assert len(record.participants) == 3
    assert record.rejected == []
    assert record.retried == record.participants
    assert len(record.unneeded) == 1
