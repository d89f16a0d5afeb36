"""Poison in every part of an upload, by every method: what one client claims never reaches the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from _pytest.mark import ParameterSet

from fedguild.client.budget import ClientInfo
from fedguild.config import Config
from fedguild.core.payload import ADAPTER
from fedguild.core.seeding import torch_rng
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.testing import HostileClient, Message, drive
from fedguild.methods import METHODS
from fedguild.runs.setup import budgets_of, fitted, method_of, preparation
from fedguild.server.guard import not_finite
from fedguild.server.method import Method, Roster
from tests.runs.runs import says
from tests.trust.attacks import Attack, uploading
from tests.trust.conftest import config_of
from tests.trust.test_attacks import changed

HUGE, FAR = 1e30, 1e3
"""Beyond every bound; and what the bound on single values lets pass, but no honest client sends."""
ORDINARY = 100.0
"""No honest client's values are larger, nor those of a state from them."""
HONEST, SENDS_HUGE, SENDS_FAR = 3, 3, 4
"""The number of honest clients, so that four uploads are compared, and the indices of the two others."""
SETTINGS = (
    f"federation.clients={HONEST + 2}",
    "federation.budgets=[{name: small, active_experts: 4, rank: 3}]",
    "federation.quorum=0.5",
    "training.batch_size=2",
    "evaluation.clients=false",
    "evaluation.received=false",
    "evaluation.pooled=false",
)


class Poisoner:
    """Fills one part of an honest upload after the other, one in each round."""

    def __init__(self, value_of: Callable[[str], float]) -> None:
        self.value_of = value_of
        self.parts: set[str] = set()
        self.filled: dict[int, str] = {}

    def answer(self, request: Message, honest: Callable[[], Message]) -> Message | bytes:
        true = honest()
        if request.kind != "train":
            return true
        payload = read_payload(true.body, "test")
        parts = {name.partition("/")[0] for name, value in payload.tensors.items() if value.is_floating_point()}
        self.parts |= parts
        part = sorted(parts - set(self.filled.values()) or parts)[0]
        self.filled[request.round] = part
        return filling(part, self.value_of(part))(true)


def filling(part: str, value: float) -> Attack:
    return uploading(
        lambda tensors: {
            name: torch.full_like(tensor, value) if name.startswith(f"{part}/") else tensor
            for name, tensor in tensors.items()
        }
    )


def first_parts(config: Config) -> tuple[set[str], set[str]]:
    """Returns the parts of a method's first upload, and those of them whose values are shares with a largest sum."""
    backbone = preparation.load_model(config)
    method, tiers = fitted(method_of(config), config, backbone.info), budgets_of(config, backbone.info)
    dealt = config.federation.budget_per_client()
    clients = [ClientInfo(index, tiers[tier.name], 10) for index, tier in enumerate(dealt)]
    state = method.start(backbone.info, Roster(list(tiers.values()), clients), torch_rng(0, "start"))
    download = method.download(state, backbone.info, clients[0])
    sent = method.schema(backbone.info, clients[0], download).tensors
    not_shares = [name for name, entry in sent.items() if entry.bound is None or entry.bound.total is None]
    parts = {name.partition("/")[0] for name in sent}
    return parts, parts - {name.partition("/")[0] for name in not_shares}


def cases() -> list[ParameterSet | str]:
    """Returns all methods; those that upload an adapter and nothing else are alike, and one of them is enough."""
    alike = [name for name in METHODS if METHODS.load(name).schema is Method.schema]
    return [
        pytest.param(name, marks=pytest.mark.long) if name in alike and name != "fedit" else name
        for name in sorted(METHODS)
    ]


@pytest.mark.parametrize("method", cases())
def test_no_part_of_an_upload_poisons_the_state(method: str, config: Config, tmp_path: Path) -> None:
    """Two liars, of whom one claims every expert for itself where a part has shares that are each in [0, 1]."""
    config = config_of(config.model.path, f"{method}/tiny-tasks", *SETTINGS)
    first, shares = first_parts(config)
    rounds = len(first) + (ADAPTER not in first)  # what is trained later is uploaded later
    config = changed(config, "federation", rounds=rounds)
    huge, far = Poisoner(lambda part: HUGE), Poisoner(lambda part: 1.0 if part in shares else FAR)
    driven = drive(
        config, tmp_path, [HostileClient(SENDS_HUGE, huge.answer), HostileClient(SENDS_FAR, far.answer)],
        server_evaluation=True,
    )  # fmt: skip
    assert driven.error is None
    for number, part in huge.filled.items():
        assert SENDS_HUGE in driven.rejected[number], f"1e30 in '{part}' was aggregated"
    for number, part in far.filled.items():
        assert SENDS_FAR in driven.rejected[number], f"{far.value_of(part):g} in '{part}' was aggregated"
        if part in shares:
            says(driven.rejected[number][SENDS_FAR], f"the shares of '{part}/", "beyond")
    assert set(huge.filled.values()) == huge.parts == set(far.filled.values()), "a part came too late to be filled"
    assert first <= huge.parts
    assert all(list(accepted) == list(range(HONEST)) for accepted in driven.accepted.values())
    assert driven.state is not None
    assert not not_finite(driven.state)
    largest = {
        name: float(value.abs().max()) for name, value in driven.state.tensors.items() if value.is_floating_point()
    }
    assert max(largest.values()) < ORDINARY, largest
