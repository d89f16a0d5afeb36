"""Runs that merge into the backbone: killed, resumed in a new process, and beside other runs."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedguild.client.merge_ledger import FOLDER
from fedguild.core.layout import CHECKPOINTS
from fedguild.model.backbone import Backbone
from fedguild.runs import experiment
from fedguild.server import checkpoint, merge_history
from tests.runs.runs import Killed, assert_same, ended, kill_at, small_config

METHODS = {
    "flora": ["method={name: flora, targets: [attention, router, experts]}"],
    "florist": ["method={name: florist, threshold: 0.8, targets: [attention, experts]}"],
    "fedex-lora": ["method={name: fedex-lora, rank: 2, targets: [attention, experts]}"],
}
RUN_ON = """
import os, signal, sys
from pathlib import Path
import fedguild.client.merge_ledger as merges
from fedguild.runs import experiment

folder, version = Path(sys.argv[1]), int(sys.argv[2])
receive = merges.MergeLedger.receive

def dying(ledger, *downloads):
    found = receive(ledger, *downloads)
    if version == merges.merge_version(downloads[0]):
        os.kill(os.getpid(), signal.SIGKILL)
    return found

if version:
    merges.MergeLedger.receive = dying
experiment.resume(folder)
"""
"""Resumes a run in a process of its own, which is killed as soon as it has received a version (0: never)."""


def config_of(model: Path, method: str, *more: str):
    without_rank = ["evaluation.max_examples=2", "evaluation.every=3", "federation.cohort_size=3", *more]
    return small_config(model, *without_rank, *METHODS[method])


def ledger(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / FOLDER).iterdir())}


def resumed_in_a_new_process(folder: Path, kill_at_version: int = 0) -> int:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-c", RUN_ON, str(folder), str(kill_at_version)]
    return subprocess.run(command, env=environment, check=False, capture_output=True, timeout=300).returncode


@pytest.mark.long
@pytest.mark.parametrize("method", METHODS)
def test_a_run_that_is_killed_twice_ends_like_one_that_was_not(method: str, olmoe_folder: Path, tmp_path: Path) -> None:
    """At the end of round 2, before its checkpoint; then in round 2 again, in a new process, version 1 received."""
    config = config_of(olmoe_folder, method, "federation.client_fraction=0.75")
    experiment.run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "cut")
    assert resumed_in_a_new_process(tmp_path / "cut", kill_at_version=1) == -signal.SIGKILL
    assert checkpoint.latest(tmp_path / "cut" / CHECKPOINTS) == 1
    assert resumed_in_a_new_process(tmp_path / "cut") == 0
    assert_same(ended(tmp_path / "cut"), ended(tmp_path / "whole"))
    assert ledger(tmp_path / "cut") == ledger(tmp_path / "whole")
    assert list(ledger(tmp_path / "whole")) == ["version-00001.merge", "version-00002.merge"]


def test_a_run_whose_changes_are_folded_is_resumed(olmoe_folder, tmp_path, monkeypatch):
    """Its ledger lost on the way; at the end there is one dense change, and no file of what it replaced."""
    monkeypatch.setattr(merge_history, "FLOOR", 0)
    settings = ("federation.rounds=5", "federation.save_total_limit=1", "evaluation.clients=true")
    config = config_of(olmoe_folder, "flora", *settings)
    experiment.run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 5)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / FOLDER)
    experiment.resume(tmp_path / "cut")
    assert_same(ended(tmp_path / "cut"), ended(tmp_path / "whole"))
    kept = ["folded-00002.merge", "folded-00003.merge", "version-00003.merge", "version-00004.merge"]
    assert list(ledger(tmp_path / "whole")) == kept, "each round's factors outweigh the weights of so small a model"
    assert len(list((tmp_path / "whole" / CHECKPOINTS / "history").iterdir())) == 2


def test_going_back_a_round_does_not_see_what_came_after(olmoe_folder: Path, tmp_path: Path) -> None:
    """A run whose last checkpoints are gone repeats its rounds, though the ledger has later versions."""
    config = config_of(olmoe_folder, "flora", "federation.save_total_limit=4")
    experiment.run(config, tmp_path)
    whole, versions = ended(tmp_path), ledger(tmp_path)
    for round in (2, 3):
        (tmp_path / CHECKPOINTS / f"round-{round:05d}.checkpoint").unlink()
    path = tmp_path / FOLDER / "version-00002.merge"
    path.write_bytes((tmp_path / FOLDER / "version-00001.merge").read_bytes())
    experiment.resume(tmp_path)
    assert_same(ended(tmp_path), whole)
    assert ledger(tmp_path) == versions


def test_merges_never_leak_into_another_run_on_the_same_backbone(olmoe_folder, tmp_path, monkeypatch):
    """A run is the same whether the backbone served a merging run before, also one that was killed in training."""
    fedit = ["method={name: fedit, rank: 2}", "evaluation.max_examples=2", "evaluation.every=3"]
    experiment.run(small_config(olmoe_folder, *fedit), tmp_path / "alone")
    held: list[Backbone] = []
    load = experiment.prepare.__globals__["load_backbone"]

    def shared(*arguments: object, **options: object) -> Backbone:
        if not held:
            held.append(load(*arguments, **options))
        return held[0]

    monkeypatch.setattr("fedguild.runs.setup.preparation.load_backbone", shared)
    published = experiment.prepare(config_of(olmoe_folder, "flora"), tmp_path / "unused").backbone.fingerprint()
    experiment.run(config_of(olmoe_folder, "flora"), tmp_path / "flora")
    assert held[0].fingerprint() == published
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.client.cohort.Cohort.read", 10)
        with pytest.raises(Killed):
            experiment.run(config_of(olmoe_folder, "florist"), tmp_path / "killed")
    assert checkpoint.latest(tmp_path / "killed" / CHECKPOINTS) >= 1
    assert not held[0].is_merged
    experiment.run(small_config(olmoe_folder, *fedit), tmp_path / "after")
    assert_same(ended(tmp_path / "after"), ended(tmp_path / "alone"))
    experiment.run(config_of(olmoe_folder, "flora"), tmp_path / "again")
    assert_same(ended(tmp_path / "again"), ended(tmp_path / "flora"))
