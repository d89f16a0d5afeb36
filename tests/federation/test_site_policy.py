"""Refusals of a site's policy."""

from __future__ import annotations

import pytest

from fedguild.federation.site_policy import SitePolicy


def test_without_limits_only_an_aggregate_of_one_is_refused() -> None:
    assert SitePolicy().run_refusal("anything", 10**9, 2) == ""
    assert "below accept.min_clients of 2" in SitePolicy().run_refusal("anything", 1, 1)
    assert SitePolicy(min_clients=1).run_refusal("anything", 1, 1) == ""
    assert SitePolicy().names_refusal(["any/thing"]) == ""
    assert SitePolicy().size_refusal(10**12) == ""


@pytest.mark.parametrize(
    ("policy", "reason"),
    [
        (SitePolicy(methods=("flame",)), "the method 'fedit' is not among accept.methods (flame)"),
        (SitePolicy(methods=()), "the method 'fedit' is not among accept.methods (none)"),
        (SitePolicy(max_steps=9), "a round asks for 10 steps, beyond accept.max_steps of 9"),
    ],
)
def test_a_refusal_names_the_setting(policy: SitePolicy, reason: str) -> None:
    assert policy.run_refusal("fedit", 10, 3) == reason


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


def test_the_largest_upload() -> None:
    assert SitePolicy(max_upload_bytes=10).size_refusal(10) == ""
    assert "11 bytes, beyond accept.max_upload_bytes of 10" in SitePolicy(max_upload_bytes=10).size_refusal(11)
