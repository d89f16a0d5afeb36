"""Many random answers to a run, through the server's own loop: it never stops, and its state is the honest clients'."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from fedguild.config import Config
from fedguild.server.guard import not_finite
from fedguild.server.run_log import comparable
from fedguild.testing import Driven, HostileClient, Message, drive
from tests.trust.conftest import config_of
from tests.trust.fuzzing import mutate
from tests.trust.test_attacks import assert_printable

CLIENTS, HOSTILE = 5, (2, 3, 4)
ROUNDS, NODES = 20, 41
FEW_ROUNDS, FEW_NODES = 5, 13
"""A quarter of that, for a quarter of the answers: a hostile client's share of a run in `make test`."""
LONG_SEEDS = range(1, 11)
QUICK_METHODS = ("fedit", "flame", "flora", "fed-sb")
METHODS = (*QUICK_METHODS, "rolora")
"""Of a mean, of activation frequencies, of merged changes, of two stages, and of factors that take turns."""
SIZES = {index: 20 + index for index in range(CLIENTS)}
"""Pinned, since a change may leave a valid size."""


class Fuzzer:
    """Answers of hostile clients, and how many of them were changed."""

    def __init__(self, seed: int, nodes: int = NODES) -> None:
        self.rng = random.Random(seed)
        self.nodes = nodes
        self.mutations = 0
        self.said_hello: dict[int, int] = {}

    def client(self, index: int) -> HostileClient:
        """Returns a client all of whose answers are changed, but the last one to the question who it is."""

        def answer(request: Message, honest: Callable[[], Message]) -> Message | bytes | None:
            true = _delivered(request) if request.kind == "deliver" else honest()
            if request.kind == "hello":
                self.said_hello[index] = self.said_hello.get(index, 0) + 1
                if self.said_hello[index] == self.nodes:
                    return true
            self.mutations += 1
            return mutate(true, self.rng)

        return HostileClient(index, answer, nodes=self.nodes)


def _delivered(request: Message) -> Message:
    """Returns the answer of a client that took its model home, without making it."""
    return request.reply(metadata={"folder": "model", "form": "adapter", "reason": ""})


def fuzz_config(config: Config, method: str, rounds: int = ROUNDS) -> Config:
    size = (f"federation.clients={CLIENTS}", f"federation.rounds={rounds}", "federation.quorum=0.4")
    return config_of(config.model.path, f"{method}/tiny-tasks", *size, "evaluation.every=3")


def honest_alone(config: Config, folder: Path, hostile: Driven) -> Driven:
    """Runs the same federation, in which a hostile client answers honestly where its answer counted, or not at all."""

    def client(index: int) -> HostileClient:
        def answer(request: Message, honest: Callable[[], Message]) -> Message:
            true = honest()
            counts = request.kind != "train" or index in hostile.accepted[request.round]
            return true if counts else true.reply(failure="no")

        return HostileClient(index, answer)

    quick = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"every": 999})})
    return drive(quick, folder, [client(index) for index in HOSTILE], reads_data=True, sizes=SIZES)


def fuzz(config: Config, folder: Path, seed: int, *, deliver: bool, nodes: int = NODES) -> int:
    """Runs a federation with three hostile clients; returns the number of their changed answers."""
    fuzzer = Fuzzer(seed, nodes)
    clients = [fuzzer.client(index) for index in HOSTILE]
    driven = drive(config, folder / "fuzzed", clients, deliver=deliver, sizes=SIZES)
    assert driven.error is None
    assert len(driven.rounds) == config.federation.rounds
    assert driven.state is not None
    assert not not_finite(driven.state)
    assert all({0, 1} <= set(accepted) for accepted in driven.accepted.values()), "an honest client was left out"
    assert_printable(driven)
    assert comparable(driven.records)
    honest = honest_alone(config, folder / "honest", driven)
    assert honest.error is None
    assert honest.accepted == driven.accepted
    assert honest.state is not None
    assert honest.state.scalars == driven.state.scalars
    assert honest.state.tensors.keys() == driven.state.tensors.keys()
    for name, value in honest.state.tensors.items():
        assert torch.equal(driven.state.tensors[name], value), name
    return fuzzer.mutations


@pytest.mark.parametrize("method", QUICK_METHODS)
def test_two_hundred_changed_answers(method: str, config: Config, tmp_path: Path) -> None:
    """Fifty to a run, in four runs of four methods."""
    quick = fuzz_config(config, method, FEW_ROUNDS)
    seed = QUICK_METHODS.index(method)
    assert fuzz(quick, tmp_path, seed, deliver=False, nodes=FEW_NODES) >= 200 / len(QUICK_METHODS)


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_two_thousand_changed_answers(seed: int, config: Config, tmp_path: Path) -> None:
    """Two hundred to a run, in ten runs of five methods; the second run of each delivers its models."""
    method = METHODS[seed % len(METHODS)]
    assert fuzz(fuzz_config(config, method), tmp_path, seed, deliver=seed > len(METHODS)) >= 200
