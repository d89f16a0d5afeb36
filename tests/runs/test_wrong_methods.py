"""Methods of one's own with the mistakes that are easily made: each is told, and none trains nothing in silence."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload
from fedguild.core.progress import Silent
from fedguild.methods.fedit import FedIT
from fedguild.model.adapters.lora import Lora
from fedguild.runs import experiment
from fedguild.server.method import Method
from fedguild.server.terms import Terms, Upload, mean
from tests.runs.runs import small_config


class Lines(Silent):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def message(self, text: str) -> None:
        self.told.append(text)


@pytest.fixture
def run(
    olmoe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[[str, Callable[..., Any]], list[str]]:
    """Runs federated averaging with one hook in another form; returns what is told."""

    def one(hook: str, other: Callable[..., Any]) -> list[str]:
        for name in {"start", "local_update", "terms", "update", "download"} - {hook}:
            monkeypatch.setattr(FedIT, name, getattr(Method, name))
        monkeypatch.setattr(FedIT, hook, other)
        short = (
            "federation.rounds=1",
            "evaluation.every=1",
            "evaluation.max_examples=1",
            "federation.budgets=[{name: all}]",
        )
        lines = Lines()
        experiment.run(small_config(olmoe_folder, *short, base="fedit/tiny-tasks"), tmp_path / "out", progress=lines)
        return lines.told

    return one


def test_plain_averaging_is_not_complained_of(run) -> None:
    assert not [line for line in run("terms", Method.terms) if "Warning" in line]


def test_terms_of_a_part_that_nobody_sends(run) -> None:
    (warning,) = [line for line in run("terms", lambda self, sent: mean("adaptor", sent)) if "bit for bit" in line]
    assert "round 1 left the state as it was" in warning


def test_no_terms_at_all(run) -> None:
    assert [line for line in run("terms", lambda self, sent: Terms()) if "bit for bit" in line]


def test_a_start_in_another_part(run) -> None:
    def start(self: Method, *arguments: Any) -> Payload:
        return Payload.of({"lora": Method.start(self, *arguments).part("adapter")})

    with pytest.raises(FedGuildError, match=r"The download of client-00\d has nothing in the part `adapter`"):
        run("start", start)


@pytest.mark.parametrize(
    ("hook", "other", "told"),
    [
        ("start", lambda *_: None, "The `start` of fedit returned nothing, where a Payload is expected"),
        ("update", lambda *_: {}, "The `update` of fedit returned a dict, where a Payload is expected"),
        ("local_update", lambda *_: None, "The `local_update` of fedit returned a NoneType, where a list of"),
        ("local_update", lambda *_: [], "The `local_update` of fedit returned 0 of them, where a list of"),
        ("local_update", lambda self, cohort: [{}] * len(cohort.work), "returned a dict, where a Payload is expected"),
        ("terms", lambda self, sent: mean("adapter", sent, "sizes"), "Clients cannot be weighed by 'sizes'"),
    ],
)
def test_what_is_returned_is_checked(run, hook: str, other: Callable[..., Any], told: str) -> None:
    with pytest.raises(FedGuildError, match=told):
        run(hook, other)


def test_uploads_are_iterated_once(run) -> None:
    """As a second loop would find none."""

    def aggregate(self: Method, state: Payload, uploads: Iterable[Upload]) -> Payload:
        assert sum(upload.client.examples for upload in uploads)
        return Method.aggregate(self, state, uploads)

    with pytest.raises(FedGuildError, match="goes through the round's uploads twice"):
        run("aggregate", aggregate)


@pytest.mark.parametrize("option", ["targets", "frozen"])
def test_a_name_in_place_of_a_list_of_names(option: str) -> None:
    given: dict[str, Any] = {"targets": ("q_proj",), "frozen": (), option: "lora_A"}
    with pytest.raises(FedGuildError, match=f"{option} is the text 'lora_A', where names are listed"):
        Lora(2, 1.0, **given)
