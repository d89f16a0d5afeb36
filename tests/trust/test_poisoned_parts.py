"""Poison in every part of an upload, by every method: what one client claims never reaches the state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedguild.config import Config
from fedguild.engines.flower.engine import read_payload
from fedguild.methods import METHODS
from fedguild.server.guard import not_finite
from fedguild.testing import HostileClient, Message, drive
from tests.experiment.runs import says
from tests.trust.attacks import uploading
from tests.trust.conftest import config_of

HUGE, FAR = 1e30, 1e3
"""Beyond every bound; and what the bound on single values lets pass, but no honest client sends."""
ORDINARY = 100.0
"""No honest client's values are larger, nor those of a state from them."""
HONEST, SENDS_HUGE, SENDS_FAR = 3, 3, 4
"""The number of honest clients, so that four uploads are compared, and the indices of the two others."""
PARTS = {
    "a3smoe": 2,
    "fed-sb": 2,
    "fedalign-moe": 4,
    "fedamole": 4,
    "fedmoe": 3,
    "flame": 3,
    "hetlora": 2,
    "hfedmoe": 3,
    "ub-smoe": 3,
}
"""How many parts a method's uploads have over its rounds; one where a method is not named."""
SETTINGS = (
    f"federation.clients={HONEST + 2}",
    "federation.budgets=[{name: small, active_experts: 4, rank: 3}]",
    "federation.quorum=0.5",
    "training.batch_size=2",
    "evaluation.clients=false",
    "evaluation.received=false",
    "evaluation.pooled=false",
)


CLAIMED = {"a3smoe": "routing", "flame": "routing", "hfedmoe": "usage", "ub-smoe": "utilisation"}
"""Method -> the part of an upload with shares of tokens, or of weights, by expert."""


class Poisoner:
    """Fills one part of an honest upload after the other, one in each round."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.parts: set[str] = set()
        self.filled: dict[int, str] = {}

    def answer(self, request: Message, honest: Callable[[], Message]) -> Message:
        true = honest()
        if request.kind != "train":
            return true
        payload = read_payload(true.body, "test")
        parts = {name.partition("/")[0] for name, value in payload.tensors.items() if value.is_floating_point()}
        self.parts |= parts
        part = sorted(parts - set(self.filled.values()) or parts)[0]
        self.filled[request.round] = part
        return filling(part, self.value)(true)


def filling(part: str, value: float) -> Callable[[Message], Message]:
    """Returns the change of an upload that fills a part of it with one value."""
    return uploading(
        lambda tensors: {
            name: torch.full_like(tensor, value) if name.startswith(f"{part}/") else tensor
            for name, tensor in tensors.items()
        }
    )


@pytest.mark.parametrize("method", sorted(METHODS))
def test_no_part_of_an_upload_poisons_the_state(method: str, config: Config, tmp_path: Path) -> None:
    huge, far = Poisoner(HUGE), Poisoner(FAR)
    hostile = [HostileClient(SENDS_HUGE, huge.answer), HostileClient(SENDS_FAR, far.answer)]
    rounds = PARTS.get(method, 1)
    config = config_of(config.model.path, f"{method}/tiny-tasks", *SETTINGS, f"federation.rounds={rounds}")
    driven = drive(config, tmp_path, hostile, reads_data=True)
    assert driven.error is None
    for number, part in huge.filled.items():
        assert SENDS_HUGE in driven.rejected[number], f"1e30 in '{part}' was aggregated"
    for number, part in far.filled.items():
        assert SENDS_FAR in driven.rejected[number], f"1e3 in '{part}' was aggregated"
    assert set(huge.filled.values()) == huge.parts == set(far.filled.values())
    assert len(huge.parts) == rounds, f"{method} uploads {huge.parts}"
    assert all(list(accepted) == list(range(HONEST)) for accepted in driven.accepted.values())
    assert driven.state is not None
    assert not not_finite(driven.state)
    largest = {
        name: float(value.abs().max()) for name, value in driven.state.tensors.items() if value.is_floating_point()
    }
    assert max(largest.values()) < ORDINARY, largest


@pytest.mark.parametrize(("method", "part"), CLAIMED.items())
def test_no_client_claims_all_experts(method: str, part: str, config: Config, tmp_path: Path) -> None:
    """Shares that are each within [0, 1], but more together than a client can have."""
    claim = filling(part, 1.0)
    hostile = HostileClient(2, lambda request, honest: claim(honest()) if request.kind == "train" else honest())
    settings = (*SETTINGS, "federation.clients=3", "federation.rounds=1")
    driven = drive(
        config_of(config.model.path, f"{method}/tiny-tasks", *settings), tmp_path, [hostile], reads_data=True
    )
    assert driven.error is None
    assert driven.accepted == {1: [0, 1]}
    says(driven.rejected[1][2], f"the shares of '{part}/", "beyond")
