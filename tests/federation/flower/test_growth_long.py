"""Growth of logs and memory over a thousand rounds, in which one member is rejected or late each time."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest
import torch

from fedguild.core.codec import encode
from fedguild.core.payload import Payload
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.serving import FlowerEngine
from tests.federation.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of
from tests.federation.flower.test_faults import Clock, last

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]
ROUNDS, EARLY = 1000, 200


@pytest.mark.parametrize("attack", ["rejected", "late", "another reason each time"])
def test_a_thousand_rounds_under_attack(attack, olmoe_folder: Path, tmp_path: Path, monkeypatch) -> None:
    clock = Clock()
    for module in ("engine", "client_registry"):
        monkeypatch.setattr(f"fedguild.federation.flower.{module}.time", clock)
    extra = (
        "evaluation.every=99999",
        "evaluation.max_examples=2",
        "evaluation.eval_on_start=false",
        "training.steps=1",
    )
    config = small_config(olmoe_folder, *QUICK, *extra, f"federation.rounds={ROUNDS}", base="fedit/tiny-tasks")
    trainers = trainers_of(config, tmp_path)
    grid, samples, made = grid_of(trainers), {}, []
    initialise = FlowerEngine.__init__
    monkeypatch.setattr(FlowerEngine, "__init__", lambda self, *a, **b: made.append(self) or initialise(self, *a, **b))

    def trained(message: Message) -> Message:
        """An answer to a task without a training: the download, moved a little."""
        download = read_payload(message.body, "the download")
        moved = {name: value + 1e-3 * torch.randn_like(value) for name, value in download.tensors.items()}
        report = {"steps": 1, "tokens": 8, "examples": 2, "loss": 1.0, "seconds": 0.1, "frequency": None}
        return message.reply(metadata={**report, "peak_memory_bytes": None}, body=encode(Payload(moved)))

    for node, trainer in zip(grid.nodes.values(), trainers, strict=True):
        honest = trainer.handle
        node.handle = lambda message, honest=honest: trained(message) if message.kind == "train" else honest(message)
    answer = last(grid).handle

    def hostile(message: Message) -> Message | None:
        if message.kind == "hello" and message.round == 0:
            return answer(message)
        if attack == "late":
            return None
        return message.reply(failure="no" if attack == "rejected" else f"reason {message.round} " + "x" * 10_000)

    last(grid).handle = hostile
    first = grid.nodes[100].handle

    def sampled(message: Message) -> Message | None:
        if message.kind == "train" and message.round in (EARLY, ROUNDS):
            (engine,) = made
            held = {name: len(value) for name, value in vars(engine).items() if hasattr(value, "__len__")}
            held |= {name: len(value) for name, value in vars(engine.registry).items() if hasattr(value, "__len__")}
            held["abandoned"], held["sent"] = len(engine._abandoned), len(engine.registry.transport._sent)
            samples[message.round] = held, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return first(message)

    grid.nodes[100].handle = sampled
    serve_on(grid, config, tmp_path, patience_seconds=60.0)
    files = {str(path.relative_to(tmp_path)): path.stat().st_size for path in tmp_path.rglob("*") if path.is_file()}
    (early, early_kib), (late, late_kib) = samples[EARLY], samples[ROUNDS]
    assert all(late[name] <= early[name] + 30 for name in early), "nothing in the server's memory grows with the rounds"
    assert late_kib - early_kib < 64 * 1024
    assert len(files) < 60, "checkpoints and uploads do not stay"
    grown = {Path(name).name: size for name, size in files.items() if size > 1e5}
    assert grown.keys() <= {"metrics.jsonl", "activity.jsonl", "audit.jsonl"}, "records of what happened"
    assert all(size < ROUNDS * 6000 for size in grown.values()), "a reason is cut before it is written down"
