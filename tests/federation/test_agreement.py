"""What a site refuses."""

from __future__ import annotations

import pytest

from fedguild.federation.agreement import Agreement


def test_without_limits_only_an_aggregate_of_one_is_refused() -> None:
    assert Agreement().refuses_run("anything", 10**9, 2) == ""
    assert "below accept.min_clients of 2" in Agreement().refuses_run("anything", 1, 1)
    assert Agreement(min_clients=1).refuses_run("anything", 1, 1) == ""
    assert Agreement().refuses_names(["any/thing"]) == ""
    assert Agreement().refuses_size(10**12) == ""


@pytest.mark.parametrize(
    ("agreement", "reason"),
    [
        (Agreement(methods=("flame",)), "the method 'fedit' is not among accept.methods (flame)"),
        (Agreement(methods=()), "the method 'fedit' is not among accept.methods (none)"),
        (Agreement(max_steps=9), "a round asks for 10 steps, beyond accept.max_steps of 9"),
    ],
)
def test_a_refusal_names_the_setting(agreement: Agreement, reason: str) -> None:
    assert agreement.refuses_run("fedit", 10, 3) == reason


@pytest.mark.parametrize(
    ("leave", "kept"),
    [
        (("*",), ""),
        (("adapter/*",), "the tensor 'stats/n' may not leave"),
        (("adapter/*", "stats/?"), ""),
        (("ADAPTER/*",), "the tensor 'adapter/a' and 2 more may not leave"),
        ((), "accept.leave is empty"),
    ],
)
def test_names_that_may_leave(leave: tuple[str, ...], kept: str) -> None:
    found = Agreement(leave=leave).refuses_names(["adapter/a", "adapter/b", "stats/n"])
    assert (kept in found) if kept else not found


def test_the_largest_upload() -> None:
    assert Agreement(max_upload_bytes=10).refuses_size(10) == ""
    assert "11 bytes, beyond accept.max_upload_bytes of 10" in Agreement(max_upload_bytes=10).refuses_size(11)
