"""The Hugging Face hub where there is no network: one line, one more attempt, and then the caches."""

from __future__ import annotations

import logging.handlers
from collections.abc import Iterator
from types import SimpleNamespace

import datasets.config
import huggingface_hub
import pytest

from fedguild.core import hub


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Exception | None]]:
    """What the hub's next answers are; an exception is raised, None is an answer."""
    planned: list[Exception | None] = []

    def head(url: str, timeout: float) -> None:
        assert url == huggingface_hub.constants.ENDPOINT
        answer = planned.pop(0)
        if answer is not None:
            raise answer

    monkeypatch.setattr(huggingface_hub, "get_session", lambda: SimpleNamespace(head=head))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(hub, "PAUSE_SECONDS", 0.0)
    hub.reach_hub.cache_clear()
    yield planned
    hub.reach_hub.cache_clear()


def test_without_a_network_there_is_one_line_and_then_the_process_is_offline(answers, monkeypatch):
    answers += [OSError("[Errno -3] no name resolution\nmore"), OSError("again")]
    said = logging.handlers.BufferingHandler(100)
    monkeypatch.setattr(logging.getLogger("fedguild"), "handlers", [said])
    assert not hub.reach_hub()
    assert not hub.reach_hub()  # asked once per process
    assert [record.getMessage() for record in said.buffer] == [
        "The Hugging Face hub does not answer ([Errno -3] no name resolution); trying once more."
    ]
    assert huggingface_hub.constants.HF_HUB_OFFLINE
    assert datasets.config.HF_HUB_OFFLINE


def test_a_hub_that_answers_the_second_time_is_there(answers: list[Exception | None]) -> None:
    answers += [TimeoutError(), None]
    assert hub.reach_hub()
    assert not huggingface_hub.constants.HF_HUB_OFFLINE
