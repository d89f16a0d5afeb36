"""Noise on the server's mean: worked out by hand, and what no upload can do to it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.privacy.dp.clipping import clipped
from fedguild.privacy.dp.noise import Noise
from fedguild.server.method import Upload
from fedguild.server.private_mean import PrivateMean, digest_of
from tests.server.filtering import through

START = torch.tensor([[1.0, -2.0], [0.5, 4.0]])
STATE = Payload({"adapter/x": START})
QUIET = PrivateMean(clip=1.0, noise_multiplier=1e-12, noise=Noise(b"key"))


def uploads(*changes: Tensor, examples: Sequence[int] = (10, 20, 30)) -> list[Upload]:
    clients = [ClientInfo(index, Budget("all", 0, 2), examples[index]) for index in range(len(changes))]
    return [
        Upload(3, client, Payload({"adapter/x": START + change}), STATE)
        for client, change in zip(clients, changes, strict=True)
    ]


def aggregate(mean: PrivateMean, given: list[Upload], wanted: int = 3) -> tuple[Tensor, dict[int, str]]:
    state, rejected = through([mean], build_method("fedavg", {}), STATE, given, wanted=wanted)
    return state.tensors["adapter/x"], rejected


def test_changes_are_clipped_and_weigh_the_same() -> None:
    small, large = torch.tensor([[0.3, 0.0], [0.0, 0.4]]), torch.tensor([[0.0, 8.0], [6.0, 0.0]])
    found, rejected = aggregate(QUIET, uploads(small, large), wanted=2)
    assert torch.allclose(found, START + (small + large / 10) / 2)
    assert not rejected


def test_the_divisor_is_what_the_round_wanted() -> None:
    change = torch.tensor([[0.3, 0.0], [0.0, 0.4]])
    assert torch.allclose(aggregate(QUIET, uploads(change), wanted=4)[0], START + change / 4)


def test_noise_is_on_the_sum() -> None:
    loud, change = PrivateMean(0.5, 2.0, Noise(b"key")), torch.full((2, 2), 0.1)
    total = {"x": clipped({"x": (START + change).double() - START.double()}, 0.5)["x"]}
    noise = Noise(b"key").child("round", 3, digest_of(total)).normal((2, 2), "x")
    found, _ = aggregate(loud, uploads(change))
    assert torch.allclose(found, (START.double() + (total["x"] + 0.5 * 2.0 * noise) / 3).float())


def test_another_sum_gets_other_noise() -> None:
    """Else the difference of a round and its repetition would have none."""
    loud = PrivateMean(1.0, 5.0, Noise(b"key"))
    first, second = (aggregate(loud, uploads(torch.full((2, 2), change)))[0] for change in (0.1, 0.1 + 1e-6))
    assert float((first - second).abs().max()) > 0.1
    assert torch.equal(first, aggregate(loud, uploads(torch.full((2, 2), 0.1)))[0])


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        ({"adapter/x": START, "routing/x": torch.ones(2)}, "would release 'routing/x'"),
        ({"adapter/x": torch.ones(3)}, "has no change to clip"),
        ({"adapter/y": START}, "has no change to clip"),
    ],
)
def test_what_has_no_bounded_change_is_rejected(payload: dict[str, Tensor], reason: str) -> None:
    change = torch.tensor([[0.3, 0.0], [0.0, 0.4]])
    honest, bad = uploads(change, change)
    found, rejected = aggregate(QUIET, [honest, replace(bad, payload=Payload(payload))], wanted=2)
    assert torch.allclose(found, START + change / 2)
    assert reason in rejected[1]
