"""The papers' figures against ours: those that can be had are had, those that cannot have a reason."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from fedguild.core.errors import ModelError
from fedguild.measuring.costs.published import Comparison, compare
from fedguild.measuring.costs.published_claims import CLAIMS
from fedguild.methods import build_method


@cache
def all_compared() -> list[Comparison]:
    """Every published figure beside ours; tests/tools/test_docs.py writes the page from the same ones."""
    return [compare(claim, build_method) for claim in CLAIMS]


@pytest.fixture(scope="module")
def compared() -> list[Comparison]:
    return all_compared()


def one(compared: list[Comparison], where: str, what: str, quantity: str, settings: str = "") -> Comparison:
    """The first comparison of these words."""
    return next(
        row
        for row in compared
        if row.claim.where == where
        and row.claim.what == what
        and row.claim.quantity == quantity
        and settings in row.claim.settings
    )


def test_every_figure_is_reproduced_or_explained(compared: list[Comparison]) -> None:
    """A setting that does not give it stands beside one that does, or the page says why none does."""
    given = {(row.claim.where, row.claim.what, row.claim.quantity) for row in compared if row.verdict != "differs"}
    for row in compared:
        figure = (row.claim.where, row.claim.what, row.claim.quantity)
        assert row.verdict != "differs" or figure in given or row.claim.why, figure


def test_table_15_of_ub_smoe(compared: list[Comparison]) -> None:
    """370 and 730 MiB, and 212.75 MiB for the ranks: the settings that the issue names."""
    for what, quantity, mebibytes in (
        ("UB-SMoE", "upload", 370),
        ("UB-SMoE", "download", 730),
        ("A3SMoE", "download", 370),
        ("HetLoRA", "upload", 212.75),
        ("FlexLoRA", "download", 212.75),
        ("FLoRA", "upload", 212.75),
    ):
        assert one(compared, "Table 15", what, quantity).ours == pytest.approx(mebibytes, rel=5e-4)
    assert one(compared, "Table 15", "FLoRA", "download").ours == pytest.approx(8 * 212.75, rel=1e-3)
    assert one(compared, "Table 15", "UB-SMoE", "download", "derived").ours == pytest.approx(370, rel=1e-3)


@pytest.mark.parametrize(
    ("what", "millions"),
    [
        ("OLMoE, K = 1, r = 20", 8.192),
        ("OLMoE, K = 8, r = 20", 28.836),
        ("OLMoE, K = 8, r = 12", 17.302),
        ("OLMo-1B, r = 40", 30.147),
    ],
)
def test_table_13_of_ub_smoe(compared: list[Comparison], what: str, millions: float) -> None:
    """16 r (4 · 4096 + 3 K · 3072), and 16 r (4 · 4096 + 3 · 10240) on the dense model."""
    assert one(compared, "Table 13", what, "active trainable").ours / 1e6 == pytest.approx(millions, abs=1e-3)


def test_the_ratios_of_flame(compared: list[Comparison]) -> None:
    quantity = "forward FLOPs, % of those with all experts active"
    for active, share in ((8, 100.0), (4, 69.2), (2, 53.8), (1, 46.1)):
        row = one(compared, "Table 1", f"OLMoE, k = {active}, r = 20", quantity)
        assert row.ours == pytest.approx(share, abs=2)
        assert row.verdict in ("equal", "within 2 points")


def test_traffic_of_fedamole(compared: list[Comparison]) -> None:
    rows = [row for row in compared if row.claim.paper == "FedAMoLE" and not row.claim.why]
    assert len(rows) == 18
    assert all(abs(row.deviation) < 0.01 or row.verdict == "equal" for row in rows)


def test_the_known_slips_are_named(compared: list[Comparison]) -> None:
    slips = {(row.claim.where, row.claim.published) for row in compared if row.verdict == "differs" and row.claim.why}
    assert {("Table 13", 2.57e7), ("Table 13", 1.63e7), ("Table 1", 118e6), ("Table 1", 198e6)} <= slips


def test_verdicts() -> None:
    row = compare(CLAIMS[0], build_method)
    ours = row.ours
    for published, last_digit, verdict in (
        (ours + 4e3, 1e4, "equal"),
        (ours * 1.009, 1e4, "within 1 %"),
        (ours * 1.02, 1e4, "differs"),
    ):
        assert replace(row, claim=replace(row.claim, published=published, last_digit=last_digit)).verdict == verdict


def test_an_unknown_model_lists_the_known() -> None:
    claim = replace(CLAIMS[0], setup=replace(CLAIMS[0].setup, model="olmoe-2b"))
    with pytest.raises(ModelError, match=r"olmoe-2b[\s\S]*Known: .*olmoe-1b-7b"):
        compare(claim, build_method)
