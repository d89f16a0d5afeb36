"""Refusals of a site's policy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedguild.core.errors import FedGuildError
from fedguild.federation import site_policy
from fedguild.federation.flower.message import Message
from fedguild.federation.site import AcceptSettings
from fedguild.federation.site_policy import RequestLog, SitePolicy, Terms

RUN = "ab" * 16
TERMS = Terms(method="fedit", steps=10, batch=8, examples=60, aggregated=3)


def test_without_limits_an_aggregate_of_one_and_a_round_on_one_example_are_refused() -> None:
    any_terms = Terms("anything", steps=10**9, batch=1, examples=2, aggregated=2)
    assert SitePolicy().run_refusal(any_terms) == ""
    assert "below accept.min_clients of 2" in SitePolicy().run_refusal(replace(any_terms, aggregated=1))
    assert "below accept.min_examples of 2" in SitePolicy().run_refusal(replace(any_terms, examples=1))
    assert SitePolicy(min_clients=1, min_examples=1).run_refusal(replace(any_terms, aggregated=1, examples=1)) == ""
    assert SitePolicy().names_refusal(["any/thing"]) == ""
    assert SitePolicy().size_refusal(10**12) == ""


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (SitePolicy(methods=("flame",)), "the method 'fedit' is not among accept.methods (flame)"),
        (SitePolicy(methods=()), "the method 'fedit' is not among accept.methods (none)"),
        (SitePolicy(max_steps=9), "a round asks for 10 steps, beyond accept.max_steps of 9"),
        (SitePolicy(min_steps=11), "a round asks for 10 step(s), below accept.min_steps of 11"),
        (SitePolicy(min_batch=9), "a step is on 8 example(s), below accept.min_batch of 9"),
        (SitePolicy(min_examples=61), "a round trains on 60 example(s), below accept.min_examples of 61"),
    ],
)
def test_a_refusal_names_the_setting(policy: SitePolicy, reason: str) -> None:
    assert policy.run_refusal(TERMS) == reason


def test_kinds_of_requests() -> None:
    policy = SitePolicy(requests=("train",))
    assert policy.kind_refusal("train") == ""
    assert policy.kind_refusal("score") == "'score' is not among accept.requests (train)"
    assert SitePolicy(requests=()).kind_refusal("train") == "'train' is not among accept.requests (none)"


@pytest.mark.parametrize(
    ("leave", "refusal"),
    [
        (("*",), ""),
        (("adapter/*",), "the tensor 'stats/n' may not leave"),
        (("adapter/*", "stats/?"), ""),
        (("ADAPTER/*",), "the tensor 'adapter/a' and 2 more may not leave"),
        ((), "accept.leave is empty"),
    ],
)
def test_names_that_may_leave(leave: tuple[str, ...], refusal: str) -> None:
    reason = SitePolicy(leave=leave).names_refusal(["adapter/a", "adapter/b", "stats/n"])
    assert (refusal in reason) if refusal else not reason


def request(kind: str = "train", round: int = 1, body: bytes = b"", **metadata: object) -> Message:
    return Message(kind, RUN, round, 0, metadata=dict(metadata), body=body)  # type: ignore[arg-type]


def test_only_different_requests_of_a_round_count(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "run" / "requests.json")
    first, second = request(seed=1), request(seed=2)
    for message in (first, second, first, second):
        assert log.refusal(message, 2) == ""
    reason = "round 1 was asked for with 2 different requests to train, and accept.requests_per_round is 2"
    assert log.refusal(request(seed=3), 2) == reason
    assert log.refusal(request(seed=1, body=b"another model"), 2) == reason
    assert log.refusal(first, 2) == "", "what was answered is answered again"
    assert log.refusal(request(seed=3), None) == ""
    assert log.refusal(request(round=2, seed=3), 2) == ""
    assert log.refusal(request("deliver", seed=3), 2) == ""


def test_the_scores_of_another_model_or_split_count_apart(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "requests.json")
    asked = [
        request("score", scope=scope, split=split)
        for scope in ("client", "trained")
        for split in ("test", "validation")
    ]
    assert [log.refusal(message, 1) for message in asked] == [""] * 4
    assert "different requests to score" in log.refusal(replace(asked[0], body=b"another model"), 1)


def test_a_restart_does_not_forget_what_was_asked(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    assert RequestLog(path).refusal(request(seed=1), 1) == ""
    assert RequestLog(path).refusal(request(seed=1), 1) == ""
    assert "accept.requests_per_round is 1" in RequestLog(path).refusal(request(seed=2), 1)
    assert path.stat().st_mode & 0o077 == 0


def test_a_request_that_could_not_be_recorded_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = RequestLog(tmp_path / "requests.json")

    def full(*_: object) -> None:
        raise FedGuildError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(site_policy, "write_json", full)
        for _ in range(2):
            with pytest.raises(FedGuildError, match="No space left"):
                log.refusal(request(seed=1), 1)
    assert log.refusal(request(seed=2), 1) == ""
    assert "accept.requests_per_round is 1" in log.refusal(request(seed=1), 1)


def test_a_damaged_log_of_requests_refuses_rather_than_counts_anew(tmp_path: Path) -> None:
    path = tmp_path / "requests.json"
    path.write_text("{")
    with pytest.raises(FedGuildError, match=r"requests\.json cannot be read"):
        RequestLog(path).refusal(request(), 3)


def test_a_round_that_the_run_does_not_have() -> None:
    assert [SitePolicy().round_refusal(round, 2) for round in (0, 1, 2)] == [""] * 3
    assert SitePolicy().round_refusal(3, 2) == "round 3 is asked for, but the run has 2 round(s)"


def test_the_requests_of_all_rounds_have_a_limit(tmp_path: Path) -> None:
    policy = SitePolicy(requests_per_run=4, deliveries_per_run=2)
    path = tmp_path / "requests.json"

    def ask(kind: str, round: int, body: bytes = b"") -> str:
        return RequestLog(path).refusal(request(kind, round, body), None, policy.most_in_run(kind))

    assert [ask("score", round) for round in range(4)] == [""] * 4
    assert ask("score", 4) == "the run has asked for 4 different requests to score, and accept.requests_per_run is 4"
    assert ask("score", 3) == "", "what was answered is answered again"
    assert [ask("train", round) for round in range(1, 5)] == [""] * 4
    assert [ask("deliver", 2, body) for body in (b"a", b"b")] == ["", ""]
    assert ask("deliver", 2, b"c").endswith("different requests to deliver, and accept.deliveries_per_run is 2")


def test_scores_of_four_examples_are_refused_by_default() -> None:
    assert SitePolicy(**dict(AcceptSettings())).score_refusal(4)
