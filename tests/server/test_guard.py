"""Protection of the state: bounds relative to the round, robust estimates, and an aggregate that is always finite."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.errors import QuorumError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedprox import FedProx
from fedguild.server.guard import (
    KEY_REVOKED,
    Finite,
    Held,
    NormBound,
    NotRevoked,
    change_norms,
    largest_value,
    not_finite,
)
from fedguild.server.method import Upload
from fedguild.server.robust import RobustMean
from fedguild.server.round import Filter
from tests.oracles import robust as oracle
from tests.server.filtering import Rejected, through

START = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
STATE = Payload({"adapter/x": START})
CHANGES = (0.1, 0.3, 0.2, -0.2, 0.4)
EXAMPLES = (10, 20, 30, 40, 50)


class Sensitive(FedProx):
    """Averages, but cannot compute anything from a value of 13, nor anything finite from two of 7 together."""

    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        seen = list(uploads)
        values = [float(upload.payload.tensors["adapter/x"][0, 0]) for upload in seen]
        if 13.0 in values:
            raise RuntimeError("the decomposition did not converge\x1b[2K")
        aggregate = super().aggregate(state, seen)
        return Payload({"adapter/x": torch.full((2, 2), math.nan)}) if values.count(7.0) > 1 else aggregate


def method(kind: type[FedProx] = FedProx) -> FedProx:
    return kind(build_method("fedprox", {}).settings)


def uploads(*values: Tensor, examples: Sequence[int] = EXAMPLES) -> list[Upload]:
    clients = [ClientInfo(index, Budget("all", 0, 2), examples[index]) for index in range(len(values))]
    return [
        Upload(3, client, Payload({"adapter/x": value}), STATE) for client, value in zip(clients, values, strict=True)
    ]


def moved(*changes: float) -> list[Upload]:
    generator = torch.Generator().manual_seed(0)
    return uploads(*(START + change * torch.randn(2, 2, generator=generator) for change in changes))


def aggregate(
    folder: Path, given: list[Upload], *filters: Filter, kind: type[FedProx] = FedProx, bounded: Collection[str] = ()
) -> tuple[Tensor, Rejected]:
    state, rejected = through([Held(folder / "spool"), *filters], method(kind), STATE, given, bounded=bounded)
    assert not list((folder / "spool").iterdir()), "uploads stay on disk"
    return state.tensors["adapter/x"], rejected


def plain(given: list[Upload]) -> Tensor:
    return method().aggregate(STATE, given).tensors["adapter/x"]


def test_honest_uploads_are_aggregated_to_the_same_bits(tmp_path: Path) -> None:
    found, rejected = aggregate(tmp_path, moved(*CHANGES), NotRevoked(lambda client: False), NormBound(), Finite())
    assert torch.equal(found, plain(moved(*CHANGES)))
    assert not rejected


def test_nothing_of_a_client_whose_key_was_revoked_is_used(tmp_path: Path) -> None:
    found, rejected = aggregate(tmp_path, moved(*CHANGES), NotRevoked(lambda client: client == 4))
    assert torch.equal(found, plain(moved(*CHANGES)[:4]))
    assert rejected == {4: KEY_REVOKED}


def test_a_change_far_beyond_the_rounds_median_is_left_out(tmp_path: Path) -> None:
    given = [*moved(*CHANGES[:4]), *uploads(*[START] * 4, START + 1e4)[4:]]
    found, rejected = aggregate(tmp_path, given, NormBound())
    assert torch.equal(found, plain(moved(*CHANGES[:4])))
    assert list(rejected) == [4]
    assert "the change of 'adapter' has the norm 2e+04, beyond 10 times the round's median of" in rejected[4]


def test_changes_beyond_the_factor_are_shortened_to_it_and_far_ones_left_out(tmp_path: Path) -> None:
    """0.3 aggregated a change of up to ten medians whole."""
    ones = torch.ones(2, 2) / 2
    sizes = (1.0, 1.0, 1.0, 1.0, 2.99, 9.9, 10.1)
    given = uploads(*(START + size * ones for size in sizes), examples=[1] * 7)
    found, rejected = aggregate(tmp_path, given, NormBound())
    assert list(rejected) == [6]
    torch.testing.assert_close(found, START + ones * (1 + 1 + 1 + 1 + 2.99 + 3.0) / 6)
    found, rejected = aggregate(tmp_path, given, NormBound(20.0))
    assert not rejected, "a larger factor is the bound of what is left out, too"
    torch.testing.assert_close(found, START + ones * sum(sizes) / 7)


def test_what_is_shortened_keeps_whole_numbers_and_bounded_statistics(tmp_path: Path) -> None:
    extra = {"adapter/own": torch.tensor([0.9]), "adapter/steps": torch.tensor([7])}
    given = [
        replace(upload, payload=Payload({**upload.payload.tensors, **extra}))
        for upload in uploads(*(START + size for size in (1.0, 1.0, 1.0, 1.0, 5.0)))
    ]
    kept: list[Upload] = []

    def seen(sent: Iterable[Upload], passage: Any, onward: Any) -> Payload:
        kept.extend(sent)
        return STATE

    through([NormBound(2.0), seen], method(), STATE, given, bounded={"adapter/own", "adapter/steps"})
    assert kept[:4] == given[:4]
    shortened = kept[4].payload.tensors
    torch.testing.assert_close(shortened["adapter/x"], START + 2.0)
    assert torch.equal(shortened["adapter/own"], extra["adapter/own"])
    assert torch.equal(shortened["adapter/steps"], extra["adapter/steps"])


def test_a_large_adapter_that_was_received_is_no_change(tmp_path: Path) -> None:
    """What counts is the distance from the download, not the norm of what is sent."""
    far = Payload({"adapter/x": 1e3 * START})
    given = uploads(*(1e3 * START + 0.1 * step for step in range(1, 6)))
    assert not aggregate(tmp_path, [replace(upload, download=far) for upload in given], NormBound())[1]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_few_uploads_are_not_compared(count: int, tmp_path: Path) -> None:
    changes = (0.1, 0.1, 1e4)[-count:]
    assert not aggregate(tmp_path, moved(*changes), NormBound())[1]


def test_an_upload_that_breaks_the_aggregation_is_the_one_that_is_left_out(tmp_path: Path) -> None:
    """Not the honest one with the largest change."""
    good = [START + 0.1, START + 20.0, START - 0.1, START + 0.2]
    found, rejected = aggregate(tmp_path, uploads(*good, torch.full((2, 2), 13.0)), Finite(), kind=Sensitive)
    assert torch.equal(found, plain(uploads(*good)))
    assert list(rejected) == [4]
    assert rejected[4].startswith(
        "the aggregate with it cannot be computed (its answer cannot be used: RuntimeError: the"
    )
    assert "\x1b" not in rejected[4]


def test_uploads_that_break_it_together_go_one_by_one(tmp_path: Path) -> None:
    good = [START + 0.1, START - 0.1, START + 0.2]
    sevens = [torch.full((2, 2), 7.0), torch.full((2, 2), 7.0)]
    found, rejected = aggregate(tmp_path, uploads(*good, *sevens), Finite(), kind=Sensitive)
    assert list(rejected) == [3]
    assert rejected[3] == "the aggregate with it has NaN or infinity in 'adapter/x'"
    assert torch.equal(
        found,
        plain([upload for upload in uploads(*good, *sevens) if upload.client.index != 3]),
    )


def test_a_method_that_never_gets_a_finite_state_is_an_error(tmp_path: Path) -> None:
    class Broken(FedProx):
        def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
            list(uploads)
            return Payload({"adapter/x": torch.full((2, 2), math.inf)})

    with pytest.raises(QuorumError, match="cannot be computed: has NaN or infinity in 'adapter/x'"):
        aggregate(tmp_path, moved(*CHANGES), Finite(), kind=Broken)


@pytest.mark.parametrize("kind", ["median", "trimmed_mean"])
def test_a_robust_centre_takes_the_means_place(kind: Any, tmp_path: Path) -> None:
    given = moved(0.1, 0.3, 0.2, -0.2, 1e5)
    values = [upload.payload.tensors["adapter/x"] for upload in given]
    weights = [torch.tensor(float(size)) for size in EXAMPLES]
    expected = oracle.over_holders(values, weights, START, kind, 0.2)
    found, rejected = aggregate(tmp_path, given, RobustMean(kind))
    torch.testing.assert_close(found.double(), expected)
    assert float((found - START).abs().max()) < 1.0
    assert not rejected


def test_clipped_changes_have_the_rounds_median_norm_at_most(tmp_path: Path) -> None:
    given = moved(0.1, 0.3, 0.2, -0.2, 1e5)
    values = [upload.payload.tensors["adapter/x"] for upload in given]
    found, _ = aggregate(tmp_path, given, RobustMean("clipped"))
    expected = oracle.clipped_mean(START, values, EXAMPLES)
    torch.testing.assert_close(found.double(), expected, atol=1e-5, rtol=1e-5)


def test_norms_are_of_the_change_by_part() -> None:
    """What the download lacks counts as a whole; statistics with a bound of their own may differ as the data do."""
    upload = Payload({"adapter/x": START + 3.0, "adapter/new": torch.full((4,), 2.0), "counts/f": torch.ones(9)})
    adapter = pytest.approx(math.sqrt(4 * 9 + 4 * 4))
    assert change_norms(upload, STATE) == {"adapter": adapter, "counts": 3.0}
    assert change_norms(upload, STATE, {"counts/f"}) == {"adapter": adapter}
    assert change_norms(
        upload, STATE, {*(name for name in upload.tensors if name.startswith("counts/")), "adapter/new"}
    ) == {"adapter": pytest.approx(6.0)}
    received = Payload({**STATE.tensors, "experts/w": torch.zeros(9)})
    trained = Payload({**upload.tensors, "experts/w": torch.ones(9)})
    assert change_norms(trained, received)["experts"] == pytest.approx(3.0)


def test_a_part_that_the_download_lacks_is_compared_unless_it_has_a_bound(tmp_path: Path) -> None:
    given = [
        replace(upload, payload=Payload({**upload.payload.tensors, "own/s": torch.tensor([size])}))
        for upload, size in zip(moved(*CHANGES), (1.0, 1.0, 2.0, 1.0, 50.0), strict=True)
    ]
    _, rejected = aggregate(tmp_path, given, NormBound())
    assert list(rejected) == [4]
    assert "the change of 'own' has the norm 50" in rejected[4]
    assert not aggregate(tmp_path, given, NormBound(), bounded={"own/s"})[1]


def test_values_that_are_not_finite_are_named() -> None:
    assert not not_finite(Payload({"a": torch.ones(2), "n": torch.tensor([2**62])}, {"s": 1.0, "t": "x"}))
    assert not_finite(Payload({"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])})) == "b"
    assert not_finite(Payload({}, {"s": math.inf})) == "s"
    assert largest_value(Payload({"adapter/a": torch.tensor([-3.0, 2.0]), "other/b": torch.tensor([9.0])})) == 9.0
    assert largest_value(Payload({"held/a": torch.tensor([2**40])})) == 0.0
    assert largest_value(Payload({"adapter/a": torch.tensor([math.nan])})) == math.inf
