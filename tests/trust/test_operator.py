"""Acts of the operator while a run goes on: stop it, revoke a key, read the audit log."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import torch

from fedguild.config import Config
from fedguild.core.errors import CheckpointError, StoppedError
from fedguild.core.locking import holder
from fedguild.federation.audit import AuditLog
from fedguild.federation.processes import PRIVATE_UMASK
from fedguild.federation.revocation import Revocations
from fedguild.federation.stopping import request_stop, stop_is_requested
from fedguild.federation.testing import HostileClient, Message, drive
from fedguild.runs.experiment import write_report
from tests.runs.runs import says
from tests.trust.attacks import HELLO, SCORE, TRAIN
from tests.trust.test_attacks import attacking, changed


def doing(client: int, round: int, deed: Callable[[], object]) -> HostileClient:
    """Returns an honest client; something happens while it trains in a round."""

    def answer(request: Message, honest: Callable[[], Message]) -> Message:
        if (request.kind, request.round) == ("train", round):
            deed()
        return honest()

    return HostileClient(client, answer)


def test_a_run_that_is_stopped_goes_on_to_the_same_bits(config: Config, tmp_path: Path) -> None:
    three = changed(config, "federation", rounds=3)
    state = tmp_path / "stopped" / "state"
    stopped = drive(
        three, tmp_path / "stopped", [doing(0, 2, lambda: request_stop(state, "a test"))], server_evaluation=True
    )
    assert isinstance(stopped.error, StoppedError)
    assert [record.round for record in stopped.rounds] == [1, 2], "it stops when it next waits for a client"
    assert not stop_is_requested(state)
    assert holder(stopped.folder) is None
    again = drive(three, tmp_path / "stopped", server_evaluation=True)
    whole = drive(three, tmp_path / "whole", server_evaluation=True)
    assert again.error is None
    assert again.state is not None
    assert whole.state is not None
    assert all(torch.equal(again.state.tensors[name], value) for name, value in whole.state.tensors.items())


def test_a_second_loop_on_the_run_is_refused_and_the_first_goes_on(config: Config, tmp_path: Path) -> None:
    """And what the first one's clients have uploaded stays where it is."""
    errors: list[Exception | None] = []
    second = doing(1, 1, lambda: errors.append(drive(config, tmp_path, server_evaluation=True).error))
    driven = drive(config, tmp_path, [second], server_evaluation=True)
    assert driven.error is None
    assert isinstance(errors[0], CheckpointError)
    says(str(errors[0]), "is in use by process", "since")
    assert [record.round for record in driven.rounds] == [1, 2]


def test_a_key_that_is_revoked_while_a_run_goes_on(config: Config, tmp_path: Path) -> None:
    """What its client uploads is not used any more, even if it had been asked before."""
    revoke = doing(2, 1, lambda: Revocations(tmp_path / "state").add("client-002"))
    driven = drive(config, tmp_path, [revoke], server_evaluation=True)
    assert driven.error is None
    assert driven.rejected[1] == {2: "its key was revoked"}
    assert driven.rejected[2] == {2: "it is not connected"}
    Revocations(tmp_path / "state").remove("client-002")
    assert Revocations(tmp_path / "state").names() == frozenset()


def test_what_came_before_a_key_was_revoked_is_not_used_either(config: Config, tmp_path: Path) -> None:
    """Client 0's upload came with the first attempt; its key is revoked in the second, in which client 2 trains."""
    revocations, asked = Revocations(tmp_path / "state"), list[Message]()

    def second(request: Message, honest: Callable[[], Message]) -> Message:
        if request.kind == "train":
            asked.append(request)
            if len(asked) == 1:
                return request.reply(failure="not yet")
            revocations.add("client-000")
        return honest()

    once = changed(config, "federation", retries=1, rounds=1)
    driven = drive(once, tmp_path, [HostileClient(2, second)], server_evaluation=True)
    assert driven.error is None
    assert len(asked) == 2
    assert driven.rejected == {1: {0: "its key was revoked"}}
    assert driven.accepted == {1: [1, 2]}


def test_neither_scores_nor_deliveries_of_a_key_that_is_revoked_meanwhile_are_used(config, tmp_path):
    revocations = Revocations(tmp_path / "state")

    def revoking(request: Message, honest: Callable[[], Message]) -> Message:
        if (request.kind, request.round) == ("score", 0):
            revocations.add("client-000")
        if request.kind == "deliver":
            revocations.add("client-001")
            return request.reply(metadata={"folder": "model", "form": "adapter", "reason": ""})
        return honest()

    driven = drive(changed(config, "federation", rounds=1), tmp_path, [HostileClient(2, revoking)], deliver=True)
    assert driven.error is None
    entries = AuditLog(tmp_path / "state").read()
    first = next(entry for entry in entries if entry["event"] == "scored")
    assert (first["accepted"], first["rejected"]) == ([1, 2], {"0": "its key was revoked"})
    results = {entry["client"]: entry["result"] for entry in entries if entry["event"] == "delivered"}
    assert results[1] == "its key was revoked"
    assert results[2] == "model (adapter)"


def test_the_audit_log_says_who_joined_and_what_became_of_every_upload(config: Config, tmp_path: Path) -> None:
    attack, reason = TRAIN["values of 1e30"]
    hostile = attacking("train", lambda request: attack if request.round == 1 else None)
    driven = drive(config, tmp_path, [hostile], deliver=True)
    assert driven.error is None
    entries = AuditLog(tmp_path / "state").read()
    events = [entry["event"] for entry in entries]
    kinds = ["started", *["joined"] * 3, *["asked", "round"] * 2, *["delivered"] * 3, "ended"]
    assert [event for event in events if event != "scored"] == kinds
    first, second = (entry for entry in entries if entry["event"] == "round")
    assert (first["asked"], first["accepted"], list(first["rejected"])) == ([0, 1, 2], [0, 1], ["2"])
    says(first["rejected"]["2"], reason)
    assert second["accepted"] == [0, 1, 2]
    assert all(entry["examples"] > 0 for entry in entries if entry["event"] == "joined")


def test_the_audit_log_says_who_was_asked_for_scores_and_whose_were_refused(config: Config, tmp_path: Path) -> None:
    hostile = attacking("score", lambda request: SCORE["above 1"] if request.round == 2 else None)
    assert drive(config, tmp_path, [hostile]).error is None
    before, after = (entry for entry in AuditLog(tmp_path / "state").read() if entry["event"] == "scored")
    assert (before["round"], before["asked"], before["accepted"], before["rejected"]) == (0, [0, 1, 2], [0, 1, 2], {})
    assert (after["round"], after["scope"], after["split"]) == (2, "client", "test")
    assert (after["accepted"], list(after["rejected"])) == ([0, 1], ["2"])
    says(after["rejected"]["2"], "its scores cannot be read")


def test_a_run_that_never_began_stands_in_the_audit_log_with_its_reason(config: Config, tmp_path: Path) -> None:
    strict = changed(config, "federation", quorum=1.0)
    attack = HELLO["another version"]
    driven = drive(strict, tmp_path, [attacking("hello", lambda request: attack)], wait_seconds=0.5)
    assert driven.error is not None
    *joined, stopped = AuditLog(tmp_path / "state").read()
    assert [entry["event"] for entry in joined] == ["started", "refused"]
    says(joined[1]["reason"], "it runs fedguild 9.9")
    says(stopped["reason"], "1 of 3 clients cannot take part, but the run needs 3", "client-002: it runs fedguild 9.9")


def open_to_others(folder: Path) -> dict[str, str]:
    modes = {path: path.stat().st_mode & 0o777 for path in folder.rglob("*") if not path.is_symlink()}
    assert modes
    return {str(path): oct(mode) for path, mode in modes.items() if mode & 0o077}


def test_everything_of_a_run_belongs_to_its_user_alone_and_nothing_is_left_half_written(config, tmp_path):
    driven = drive(config, tmp_path / "server", server_evaluation=True)
    assert not open_to_others(tmp_path / "server")
    assert not [path for path in driven.folder.rglob("*") if path.suffix in (".part", ".upload")]


def test_the_report_and_what_clients_take_home_belong_to_their_users_alone(config, tmp_path, monkeypatch):
    """In processes with the umask that `fedguild federation` gives them."""
    monkeypatch.setattr("fedguild.runs.experiment.write_report", write_report)
    before = os.umask(PRIVATE_UMASK)
    try:
        driven = drive(changed(config, "federation", rounds=1), tmp_path / "server", deliver=True)
    finally:
        os.umask(before)
    assert driven.error is None
    names = {path.name for path in (tmp_path / "server").rglob("*")}
    assert {"report.html", "audit.jsonl", "requests.json", "adapter_config.json"} <= names
    assert not open_to_others(tmp_path / "server")
