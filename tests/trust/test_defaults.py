"""The defaults of a real federation against a hostile member, and what a run says of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.config import Config, load_config
from fedguild.core.codec import encode
from fedguild.core.layout import CONFIG
from fedguild.core.payload import ADAPTER, Payload
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.testing import Driven, HostileClient, Message, drive
from fedguild.runs import experiment
from fedguild.runs.setup import aggregator_of, method_of, what_a_member_can_do
from fedguild.server.guard import change_norms
from fedguild.server.optimizer import LAST_CHANGE
from tests.runs.runs import Killed, assert_same, ended, kill_at, says
from tests.trust.test_attacks import changed

TINY = "tiny-tasks"
NOISE = ("privacy.unit=client", "privacy.noise_multiplier=1", "federation.clients=8")


def flipping(factor: float) -> Callable[[Message, Callable[[], Message]], Message]:
    """Returns the answers of a client that turns its change around and multiplies it."""

    def answer(request: Message, honest: Callable[[], Message]) -> Message:
        reply = honest()
        if request.kind != "train":
            return reply
        received, sent = (read_payload(one.body, "test") for one in (request, reply))
        flipped = {
            name: received.tensors[name] - factor * (value - received.tensors[name])
            for name, value in sent.tensors.items()
        }
        return replace(reply, body=encode(Payload(flipped, sent.scalars)))

    return answer


def moved(driven: Driven) -> float:
    """Returns by how much a federation moved its adapter, as a norm."""
    assert driven.error is None
    assert not any(driven.rejected.values()), "the attack stays below the bound"
    start = experiment.restore(driven.folder, 0)[1]
    assert driven.state is not None
    return change_norms(driven.state, start)[ADAPTER]


def test_a_member_that_flips_its_change_is_held_by_default_and_the_run_says_by_what(config, tmp_path):
    """Just below the ten medians beyond which an upload is left out."""
    four, flips = changed(config, "federation", clients=4, rounds=1), [HostileClient(2, flipping(8.0))]
    plain = changed(four, "federation", aggregator="none", norm_factor=10.0)
    held, pulled = (
        drive(each, tmp_path / name, flips, server_evaluation=True)
        for name, each in {"held": four, "pulled": plain}.items()
    )
    assert moved(pulled) > 1.5 * moved(held)
    assert "Aggregator: trimmed_mean, 1 clients left out at either end; a change counts up to 3 medians." in held.lines
    assert "Aggregator: the mean; a change counts up to 10 medians." in pulled.lines
    says((held.folder / CONFIG).read_text(), "aggregator: auto", "# aggregator: trimmed_mean")
    assert load_config(str(held.folder / CONFIG)).federation.aggregator == "auto"
    assert "# aggregator" not in (pulled.folder / CONFIG).read_text()


def test_a_simulation_takes_plain_means(config: Config, tmp_path: Path) -> None:
    for name in ("auto", "none"):
        experiment.run(changed(config, "federation", clients=4, rounds=1, aggregator=name), tmp_path / name)
    assert_same(ended(tmp_path / "auto"), ended(tmp_path / "none"))
    assert "# aggregator" not in (tmp_path / "auto" / CONFIG).read_text()


@pytest.mark.parametrize(
    ("method", "overrides", "chosen", "words"),
    [
        (
            "fedit",
            ["federation.clients=8"],
            "trimmed_mean",
            "2 clients left out at either end; a change counts up to 3",
        ),
        ("flame", ["federation.clients=20"], "trimmed_mean", "trimmed_mean, 4 clients"),
        ("hetlora", ["federation.clients=4", "federation.trim=0.4"], "trimmed_mean", "trimmed_mean, 1 clients"),
        ("fedit", ["federation.clients=8", "federation.client_fraction=0.3"], None, "With 2 client(s) a round nothing"),
        ("fedit", ["federation.aggregator=none", "federation.norm_factor=null"], None, "the mean; nothing bounds"),
        (
            "fedit",
            ["federation.aggregator=centered_clipping"],
            "centered_clipping",
            "centered_clipping; a change counts",
        ),
        ("flora", [], None, "that of flora, which is no mean and has no robust form; a change counts up to 3 medians"),
        ("fedit", ["federation.secure=true"], None, "Nobody sees a single upload, so no robust aggregator"),
        ("fedavg", [*NOISE, "privacy.trust_model=central"], None, "the mean of clipped changes, with"),
        ("fedavg", [*NOISE, "privacy.trust_model=local"], "trimmed_mean", "trimmed_mean, 2 clients"),
    ],
)
def test_which_aggregator_is_the_default(method: str, overrides: list[str], chosen: str | None, words: str) -> None:
    config = load_config(f"{method}/{TINY}", overrides)
    assert aggregator_of(config, method_of(config), real=True) == chosen
    says(what_a_member_can_do(config, method_of(config)), words)
    explicit = None if config.federation.aggregator == "auto" else chosen
    assert aggregator_of(config, method_of(config), real=False) == explicit


def test_centered_clipping_goes_on_after_a_kill_with_what_it_remembers(config: Config, tmp_path: Path) -> None:
    """The last round's change is in the checkpoint; no client is sent it, and no model holds it."""
    clipping = changed(config, "federation", aggregator="centered_clipping")
    experiment.run(clipping, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(clipping, tmp_path / "killed")
    experiment.resume(tmp_path / "killed")
    assert_same(ended(tmp_path / "killed"), ended(tmp_path / "whole"))
    state = ended(tmp_path / "whole").state
    change = state.part(LAST_CHANGE)
    assert change
    assert all(bool(torch.isfinite(value).all()) for value in change.values())
    assert math.isfinite(sum(float(value.norm()) for value in change.values()))
