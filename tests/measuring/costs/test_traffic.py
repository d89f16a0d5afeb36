"""Bytes that the profile counts, against those of a real run of every method."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from fedguild.config.training import TrainingSettings
from fedguild.core.accounting import HEADER, bytes_by_part, count_traffic
from fedguild.core.codec import CODECS, Codec, encode
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.costs.profile import profile
from fedguild.measuring.costs.tiers import Workload
from fedguild.measuring.costs.traffic import Exchange, Exchanges, exchanges
from fedguild.methods import METHODS, build_method
from fedguild.model.plan import adapter_shapes
from fedguild.model.shapes_only import LIMIT, ShapesOnly
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster
from tests.backbones import tiny_backbone
from tests.methods.test_matrix import ALIKE, CASES, CLIENTS, cases, cases_alike_long, cases_variants_long, fresh, train

FLOAT_DIGITS = 24
"""A floating-point scalar is JSON in the header, `0.1` or `0.30000000000000004`."""


@dataclass(frozen=True)
class Counted:
    """The bytes of a real payload by part, and how far its header may lie off for its scalars' digits."""

    parts: Mapping[str, int]
    slack: int

    @classmethod
    def of(cls, payload: Payload) -> Counted:
        parts = bytes_by_part(payload)
        assert sum(parts.values()) == len(encode(payload))
        return cls(parts, FLOAT_DIGITS * sum(type(value) is float for value in payload.scalars.values()))


def real_rounds(label: str, folder: Path, rounds: int = 3) -> list[list[tuple[Counted, Counted]]]:
    """Every client's download and upload in each round of a real run."""
    federation = fresh(label, folder)
    method, state, found = federation.method, federation.start(), []
    for round in range(1, rounds + 1):
        downloads = [method.download(state, federation.model, who) for who in federation.clients]
        uploads = train(federation, state, round)
        pairs = zip(downloads, uploads, strict=True)
        found.append([(Counted.of(download), Counted.of(sent.payload)) for download, sent in pairs])
        state = method.aggregate(state, iter(uploads))
    return found


def expected(label: str, folder: Path, limit: int = LIMIT, dtype: torch.dtype = torch.float32) -> Exchanges:
    name = label.partition(" ")[0]
    method = build_method(name, {**CASES[label].options, **METHODS.load(name).facts.costs.bound})
    return exchanges(method, fresh(label, folder).model, CLIENTS, rounds=3, limit=limit, wire_dtype=dtype)


def assert_same(found: Counted, counted: Mapping[str, int]) -> None:
    assert {**found.parts, HEADER: 0} == {**counted, HEADER: 0}
    assert abs(found.parts[HEADER] - counted[HEADER]) <= found.slack


def assert_between(found: Counted, exchange: Exchange) -> None:
    """An upload lies between what it must hold and what it may hold."""
    most, least = exchange.upload, exchange.least_upload
    assert sum(least.values()) <= sum(found.parts.values()) + found.slack
    assert sum(found.parts.values()) <= sum(most.values()) + found.slack
    for part in {*found.parts, *most} - {HEADER}:
        assert least.get(part, 0) <= found.parts.get(part, 0) <= most.get(part, 0), part
    if most == least:
        assert_same(found, most)


@pytest.mark.parametrize("label", cases_alike_long())
def test_the_bytes_of_the_profile_are_those_of_a_real_run(label: str, tmp_path: Path) -> None:
    """Part by part, for every client, in the first round and in later ones."""
    varies = METHODS.load(label.partition(" ")[0]).facts.costs.varies
    for number, (ours, theirs) in enumerate(
        zip(expected(label, tmp_path).rounds, real_rounds(label, tmp_path), strict=True), start=1
    ):
        if varies == "mean" and number > 1:
            for part in ours[0].upload.keys() - {HEADER}:
                downloads = sum(one.download.get(part, 0) for one in ours)
                assert downloads == sum(down.parts.get(part, 0) for down, _ in theirs)
                assert sum(one.upload[part] for one in ours) == sum(up.parts[part] for _, up in theirs)
            continue
        for exchange, (down, up) in zip(ours, theirs, strict=True):
            if varies == "at most":
                assert all(down.parts[part] <= exchange.download[part] for part in down.parts.keys() - {HEADER})
                assert sum(down.parts.values()) <= sum(exchange.download.values()) + down.slack
            else:
                assert_same(down, exchange.download)
            assert_between(up, exchange)


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.long if " " in label or label in ALIKE else ())
        for label in cases()
        if METHODS.load(label.partition(" ")[0]).facts.costs.varies != "mean"
    ],
)
def test_shapes_alone_give_the_same_bytes(label: str, tmp_path: Path) -> None:
    """With 64 values a tensor at most, where the tests above have all of them."""
    assert expected(label, tmp_path, limit=64).rounds == expected(label, tmp_path).rounds


@pytest.mark.parametrize("label", ["fedit", "ub-smoe"])
def test_the_papers_bytes_are_two_a_parameter(label: str, tmp_path: Path) -> None:
    full, half = (expected(label, tmp_path, dtype=dtype).rounds[-1][0] for dtype in (torch.float32, torch.bfloat16))
    assert all(half.upload[part] * 2 == size for part, size in full.upload.items() if part != HEADER)


@pytest.mark.parametrize("codec", CODECS)
def test_the_bytes_on_the_wire_are_those_of_the_codec(codec: Codec) -> None:
    """As `count_traffic` counts a real payload's; the server holds the upload in fp32."""
    model, method = tiny_backbone().info, build_method("fedit", {"rank": 64})
    (found,) = exchanges(method, model, CLIENTS[:1], rounds=1, codec=codec).rounds[0]
    roster = Roster([CLIENTS[0].budget], CLIENTS[:1])
    download = method.download(method.start(model, roster, torch_rng(0, "start")), model, CLIENTS[0])
    upload = Payload({name: torch.ones(tensor.shape) for name, tensor in download.tensors.items()})
    counted = count_traffic(1, 0, download, upload, codec)
    assert found.download == counted.download_by_part
    assert found.upload["adapter"] == counted.upload_by_part["adapter"]
    assert found.held_bytes == sum(exchanges(method, model, CLIENTS[:1], rounds=1).rounds[0][0].upload.values())


def test_a_client_that_missed_a_round_downloads_the_pseudo_gradient(tmp_path: Path) -> None:
    found = expected("ub-smoe", tmp_path)
    assert "pseudo_gradient" not in found.rounds[-1][0].download
    assert [exchange.client.index for exchange in found.absent] == [0, 2, 3]
    assert all("pseudo_gradient" in exchange.download for exchange in found.absent)
    only = exchanges(build_method("fedit", {"rank": 2}), fresh("fedit", tmp_path).model, CLIENTS[:1])
    assert not only.absent


def test_where_uploads_take_turns_the_profile_has_their_mean(tmp_path: Path) -> None:
    """RoLoRA sends B in odd rounds and A in even ones, of experts, whose A is larger."""
    model, method = fresh("rolora", tmp_path).model, build_method("rolora", {"rank": 2, "targets": ["experts"]})
    counted = exchanges(method, model, CLIENTS)
    shapes = adapter_shapes(model, method.plan(model, CLIENTS[0].budget))
    sizes = {kind: 4 * sum(math.prod(shapes[name]) for name in shapes if name.endswith(kind)) for kind in "AB"}
    assert sizes["A"] != sizes["B"]
    assert [one[0].upload["adapter"] for one in counted.rounds] == [sizes["B"], sizes["A"], sizes["B"]]
    assert counted.later == counted.rounds[1:]
    workload = Workload(examples=4, tokens=16, context_tokens=8, training=TrainingSettings())
    profiled = profile(method, model, CLIENTS, workload, participants=len(CLIENTS))
    assert {tier.upload.parts["adapter"] for tier in profiled.tiers} == {(sizes["A"] + sizes["B"]) // 2}
    assert {tier.first_upload.parts["adapter"] for tier in profiled.tiers} == {sizes["B"]}
    totals = [sum(sum(one.upload.values()) for one in exchanged) for exchanged in counted.later]
    assert profiled.server.received_bytes == sum(totals) // 2


@pytest.mark.parametrize("label", cases_variants_long())
def test_trainable_counts_are_the_models(label: str, tmp_path: Path) -> None:
    federation = fresh(label, tmp_path)
    for who in CLIENTS:
        plan = federation.method.plan(federation.model, who.budget)
        with SlotModel(federation.backbone, [plan]) as model:
            values = sum(value.numel() for value in model.read(0).values())
        assert cost(federation.model, plan).trainable == values


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.long if " " in label or label in ALIKE else ())
        for label in cases()
        if METHODS.load(label.partition(" ")[0]).facts.costs.varies == "no"
    ],
)
def test_payloads_keep_their_form_from_the_round_that_the_entry_names(label: str, tmp_path: Path) -> None:
    """Or repeat it after as many rounds as the entry says; but for the digits of versions in names and headers."""

    def sizes(exchanged: Exchange) -> list[dict[str, int]]:
        return [{**parts, HEADER: 0} for parts in (exchanged.download, exchanged.upload)]

    name = label.partition(" ")[0]
    method = build_method(name, CASES[label].options)
    counted = exchanges(method, fresh(label, tmp_path).model, CLIENTS, rounds=5, absences=False)
    settled, period = method.facts.costs.rounds - 1, method.facts.costs.period
    for number, later in enumerate(counted.rounds[settled:]):
        assert list(map(sizes, later)) == list(map(sizes, counted.rounds[settled + number % period]))


# The mode


def test_large_tensors_have_shapes_and_small_ones_values() -> None:
    with ShapesOnly(limit=8):
        rng = torch.Generator().manual_seed(0)
        large, small = torch.rand(3, 4, generator=rng), torch.rand(2, 3, generator=rng)
        assert large.is_meta
        assert not small.is_meta
        assert all(0 < value <= 1 for value in (large @ torch.ones(4)).tolist())
        assert (large > 2).any().item() is True
        assert int(large.argmax()) == 1
        assert torch.cat([small, small]).is_meta
        assert torch.linalg.svd(large, full_matrices=False).U.shape == (3, 3)
        total = torch.zeros(2, 3)
        total.add_(large[:2, :3])
        assert total.shape == (2, 3)
    assert not torch.rand(3, 4).is_meta


@pytest.mark.parametrize(
    ("uses", "made_up"),
    [
        (lambda large, small: (large + 1) @ torch.ones(4), True),
        (lambda large, small: torch.equal(large, large + 1), True),
        (lambda large, small: small.add_(large[:2, :3]), True),
        (lambda large, small: large.mul_(2).T @ torch.zeros(3, 9), False),
        (lambda large, small: small.sum().item(), False),
    ],
)
def test_the_mode_tells_whether_a_value_was_made_up(
    uses: Callable[[torch.Tensor, torch.Tensor], object], made_up: bool
) -> None:
    with ShapesOnly(limit=8) as shapes:
        uses(torch.zeros(3, 4), torch.zeros(2, 3))
    assert shapes.made_up is made_up


def test_small_tensors_are_drawn_as_without_the_mode() -> None:
    drawn = torch.rand(2, generator=torch.Generator().manual_seed(3))
    with ShapesOnly(limit=8):
        again = torch.rand(2, generator=torch.Generator().manual_seed(3))
    assert torch.equal(drawn, again)
