"""Many random answers to a run, through the server's own loop: it never stops, and its state is the honest clients'."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import torch

from fedguild.config import Config
from fedguild.core.codec import encode
from fedguild.core.payload import Payload
from fedguild.federation.testing import Driven, HostileClient, Message, drive
from fedguild.privacy.secure_sum.session import STEPS
from fedguild.server.guard import not_finite
from tests.runs.runs import comparable
from tests.trust.conftest import config_of
from tests.trust.fuzzing import mutate, mutate_step
from tests.trust.test_attacks import assert_printable

CLIENTS, HOSTILE = 5, (2, 3, 4)
ROUNDS, NODES = 20, 41
FEW_ROUNDS, FEW_NODES = 5, 13
"""A quarter of that, for a quarter of the answers: a hostile client's share of a run in `make test`."""
LONG_SEEDS = range(1, 11)
QUICK_METHODS = ("flora", "flame", "fed-sb")
METHODS = (*QUICK_METHODS, "fedit", "rolora")
"""Of merged changes, of activation frequencies, of two stages, of a mean, and of factors that take turns."""
QUICK = {**dict.fromkeys(QUICK_METHODS, 60), "secure": 20}
"""Run of `make test` -> how many answers of it are changed at least."""
SECURE = ("federation.secure=true", "training.optimizer=sgd")
"""SGD, since Adam makes a whole step out of what two sums in fixed point differ by."""
SIZES = {index: 20 + index for index in range(CLIENTS)}
"""Pinned, since a change may leave a valid size."""


class Fuzzer:
    """Answers of hostile clients; counts of changed ones by kind, and what was sent by client and round."""

    def __init__(self, seed: int, nodes: int = NODES, *, secure: bool = False) -> None:
        self.rng = random.Random(seed)
        self.nodes, self.secure = nodes, secure
        self.changed: Counter[str] = Counter()
        self.sent: dict[tuple[int, int], Message | bytes | None] = {}
        self.said_hello: dict[int, int] = {}

    def client(self, index: int) -> HostileClient:
        """Returns a client all of whose answers are changed, but the last one to the question who it is.

        In a secure run it changes one step of each round, after which it is left out.
        """

        def answer(request: Message, honest: Callable[[], Message]) -> Message | bytes | None:
            true = _delivered(request) if request.kind == "deliver" else honest()
            if request.kind == "hello":
                self.said_hello[index] = self.said_hello.get(index, 0) + 1
                if self.said_hello[index] == self.nodes:
                    return true
            elif self.secure:
                step = STEPS[(request.round - 1) % len(STEPS)]
                if request.metadata.get("step") != step:
                    return true
                self.changed[step] += 1
                return mutate_step(true, self.rng)
            self.changed[request.kind] += 1
            said = mutate(true, self.rng)
            if request.kind == "train":
                self.sent[index, request.round] = said
            return said

        return HostileClient(index, answer, nodes=self.nodes)


def _delivered(request: Message) -> Message:
    return request.reply(metadata={"folder": "model", "form": "adapter", "reason": ""})


def fuzz_config(config: Config, method: str, *more: str, rounds: int = ROUNDS) -> Config:
    size = (f"federation.clients={CLIENTS}", f"federation.rounds={rounds}", "federation.quorum=0.4")
    return config_of(config.model.path, f"{method}/tiny-tasks", *size, "evaluation.every=3", *more)


def again(
    config: Config, folder: Path, hostile: Driven, sent: Mapping[tuple[int, int], Message | bytes | None]
) -> Driven:
    """Runs the same federation, in which nothing of a hostile client arrives but the uploads that were valid.

    A secure run is compared with a plain one.
    """

    def client(index: int) -> HostileClient:
        def answer(request: Message, honest: Callable[[], Message]) -> Message:
            true = honest()
            if request.kind != "train":
                return true
            compared = "(federation.norm_factor)" in hostile.rejected[request.round].get(index, "")
            if index not in hostile.accepted[request.round] and not compared:
                return true.reply(failure="no")
            said = sent.get((index, request.round), true)
            said = Message.from_bytes(said) if isinstance(said, bytes) else said or true
            return true.reply(metadata=said.metadata, body=said.body)

        return HostileClient(index, answer)

    secure = config.federation.secure
    mean = {"aggregator": "none", "norm_factor": None} if secure else {}  # a secure run can have nothing else
    plain = config.federation.model_copy(update={"secure": False, **mean})
    evaluation = config.evaluation.model_copy(update={"every": 999})
    quick = config.model_copy(update={"evaluation": evaluation, "federation": plain})
    sizes = {} if secure else SIZES
    return drive(quick, folder, [client(index) for index in HOSTILE], server_evaluation=True, sizes=sizes)


def fuzz(config: Config, folder: Path, seed: int, *, deliver: bool = False, nodes: int = NODES) -> Counter[str]:
    """Runs a federation with hostile clients; returns the number of their changed answers by kind."""
    secure = config.federation.secure
    fuzzer = Fuzzer(seed, nodes, secure=secure)
    clients = [fuzzer.client(index) for index in (HOSTILE[-1:] if secure else HOSTILE)]
    sizes = {} if secure else SIZES
    driven = drive(config, folder / "fuzzed", clients, deliver=deliver, sizes=sizes, server_evaluation=secure)
    if driven.error is not None:
        raise driven.error
    assert len(driven.rounds) == config.federation.rounds
    assert driven.state is not None
    assert not not_finite(driven.state)
    everybody = set(range(CLIENTS)) - {client.client for client in clients}
    assert all(everybody <= set(accepted) for accepted in driven.accepted.values()), "an honest client was left out"
    assert_printable(driven)
    assert comparable(driven.records)
    honest = again(config, folder / "honest", driven, fuzzer.sent)
    assert honest.error is None
    assert honest.accepted == driven.accepted
    assert honest.state is not None
    assert honest.state.scalars == driven.state.scalars
    assert honest.state.tensors.keys() == driven.state.tensors.keys()
    for name, value in honest.state.tensors.items():
        if secure:
            torch.testing.assert_close(driven.state.tensors[name], value, rtol=1e-3, atol=1e-5, msg=name.__add__)
        else:
            assert torch.equal(driven.state.tensors[name], value), name
    print(f"Changed answers: {dict(fuzzer.changed)}")
    return fuzzer.changed


def test_any_tensor_of_an_answer_can_be_changed() -> None:
    """Also one without dimensions, as FLAME's rescaler: a fuzzer that fails would look like a run that stops."""
    honest = Message("train", "run", 1, 0, body=encode(Payload({"rescaler/layer": torch.tensor(2.0)})))
    changed = [mutate(honest, random.Random(seed)) for seed in range(300)]
    assert any(isinstance(message, Message) and message.body != honest.body for message in changed)


@pytest.mark.parametrize("run", QUICK)
def test_two_hundred_changed_answers(run: str, config: Config, tmp_path: Path) -> None:
    """Of every kind, in three runs of three methods and a secure one, in which every step is changed once."""
    secure = run == "secure"
    quick = (
        fuzz_config(config, "fedit", *SECURE, rounds=len(STEPS))
        if secure
        else fuzz_config(config, run, rounds=FEW_ROUNDS)
    )
    changed = fuzz(quick, tmp_path, list(QUICK).index(run), deliver=run == "flora", nodes=FEW_NODES)
    assert changed.total() >= QUICK[run]
    if secure:
        assert {step: changed[step] for step in STEPS} == dict.fromkeys(STEPS, 1)
    else:
        fewest = {"hello": 36, "train": 3 * FEW_ROUNDS, "score": 9, **({"deliver": 3} if run == "flora" else {})}
        assert {kind: min(changed[kind], number) for kind, number in fewest.items()} == fewest


def test_the_runs_have_two_hundred_changed_answers() -> None:
    assert sum(QUICK.values()) >= 200


@pytest.mark.long
@pytest.mark.parametrize("seed", LONG_SEEDS)
def test_two_thousand_changed_answers(seed: int, config: Config, tmp_path: Path) -> None:
    """Two hundred to a run, in ten runs of five methods; the second run of each delivers its models."""
    method = METHODS[seed % len(METHODS)]
    assert fuzz(fuzz_config(config, method), tmp_path, seed, deliver=seed > len(METHODS)).total() >= 200


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_every_step_of_a_secure_round_many_times(seed: int, config: Config, tmp_path: Path) -> None:
    changed = fuzz(fuzz_config(config, "fedit", *SECURE, rounds=6 * len(STEPS)), tmp_path, seed)
    assert {changed[step] for step in STEPS} == {6}
