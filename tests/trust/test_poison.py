"""No poison in the state: not by one upload, not by the disk, and nobody honest is blamed for it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.config import Config
from fedguild.core.errors import CheckpointError, ConfigError, QuorumError
from fedguild.core.layout import CHECKPOINTS
from fedguild.federation.testing import HostileClient, Message, drive
from fedguild.runs import experiment
from fedguild.runs.setup import check_fit, fitted, method_of, model_of
from fedguild.server import checkpoint
from fedguild.server.guard import not_finite
from tests.federation.flower.loopback_federation import Lines
from tests.runs.runs import assert_same, ended, says
from tests.trust.attacks import filled, uploading
from tests.trust.conftest import config_of
from tests.trust.test_attacks import attacking, changed


def test_an_upload_of_1e30_is_rejected_and_its_sender_is_the_one_who_is(config: Config, tmp_path: Path) -> None:
    driven = drive(config, tmp_path, [attacking("train", lambda request: filled(1e30))], server_evaluation=True)
    assert driven.error is None
    assert driven.accepted == {1: [0, 1], 2: [0, 1]}
    assert driven.state is not None
    assert not not_finite(driven.state)


def test_a_change_of_a_thousand_times_the_others_is_rejected_where_four_upload(config: Config, tmp_path: Path) -> None:
    larger = uploading(lambda tensors: {name: value + 50.0 for name, value in tensors.items()})
    four = changed(config, "federation", clients=4)
    driven = drive(four, tmp_path, [attacking("train", lambda request: larger)], server_evaluation=True)
    assert driven.error is None
    assert driven.accepted == {1: [0, 1, 3], 2: [0, 1, 3]}
    says(driven.rejected[1][2], "beyond 10 times the round's median", "federation.norm_factor")


def test_an_honest_federation_of_four_rejects_nobody_and_computes_what_a_simulation_does(config, tmp_path):
    """By the plain mean and by a robust one, which is another."""
    states = []
    for robust in ("none", "median"):
        four, folder = changed(config, "federation", clients=4, aggregator=robust), tmp_path / robust
        driven = drive(four, folder / "real", server_evaluation=True)
        experiment.run(four, folder / "simulated")
        assert not any(driven.rejected.values())
        assert_same(replace(ended(driven.folder), memory={}), replace(ended(folder / "simulated"), memory={}))
        assert driven.state is not None
        states.append(driven.state.tensors)
    plain, median = states
    assert any(not torch.equal(median[name], value) for name, value in plain.items())


@pytest.mark.parametrize(
    ("method", "reason"),
    [
        ("flora", "the aggregate of flora is not a mean"),
        ("fedalign-moe", "the aggregate of fedalign-moe is not a mean"),
    ],
)
def test_a_robust_mean_is_refused_where_there_is_none(method: str, reason: str, config: Config) -> None:
    other = config_of(config.model.path, f"{method}/tiny-tasks", "federation.aggregator=trimmed_mean")
    model = model_of(other)
    with pytest.raises(ConfigError) as caught:
        check_fit(fitted(method_of(other), other, model), other, model)
    says(str(caught.value), "federation.aggregator is trimmed_mean", reason, "federation.norm_factor")


@pytest.mark.parametrize(
    ("method", "value", "verdict"),
    [
        ("fedit", 1e12, "The client is not to blame: it was sent values up to 1e+12"),
        ("fedit", 3e5, "The client may not be to blame: it was sent values up to 3e+05"),
        ("fedalign-moe", 1e12, "The client is not to blame: it was sent values up to 1e+12"),
    ],
)
def test_a_client_whose_download_was_poisoned_is_not_blamed(method, value, verdict, config, tmp_path):
    """The state was poisoned before, by whatever means: what cannot be trained from is not the clients' fault.

    Also with values that a bound on uploads lets pass, and in other parts than the adapter.
    """

    def fail(request: Message, honest: Callable[[], Message]) -> Message:
        return filled(float("nan"))(honest()) if request.kind == "train" else honest()

    config = config_of(config.model.path, f"{method}/tiny-tasks", "evaluation.pooled=false")
    begun = drive(config, tmp_path, server_evaluation=True)
    poison_round_one(begun.folder, config, value)
    nobody = [HostileClient(index, fail) for index in range(3)]
    driven = drive(config, tmp_path, nobody, server_evaluation=True)
    assert isinstance(driven.error, QuorumError)
    says(str(driven.error), verdict, "resume --round")


def test_a_state_that_is_not_finite_is_not_trained_from(config: Config, tmp_path: Path) -> None:
    experiment.run(config, tmp_path / "run")
    poison_round_one(tmp_path / "run", config, float("nan"))
    with pytest.raises(CheckpointError, match="The state before round 2 has NaN or infinity"):
        experiment.resume(tmp_path / "run")


def poison_round_one(folder: Path, config: Config, value: float) -> None:
    """Writes the first round's checkpoint again, with one value everywhere; that of the second is removed."""
    saved = checkpoint.load(folder / CHECKPOINTS, 1, fingerprint=config.fingerprint())
    tensors = {name: torch.full_like(tensor, value) for name, tensor in saved.state.tensors.items()}
    state = replace(saved.state, tensors=tensors)
    checkpoint.save(folder / CHECKPOINTS, 1, state, fingerprint=config.fingerprint(), extra=saved.extra)


@pytest.fixture(scope="module")
def finished(config: Config, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four rounds, of which three are kept."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    experiment.run(changed(config, "federation", rounds=4, save_total_limit=3), folder)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """A copy of it, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "run"))


def damage(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def test_a_damaged_newest_checkpoint_is_skipped_for_the_one_before_with_a_message(finished: Path, run: Path) -> None:
    damage(run / CHECKPOINTS / "round-00004.checkpoint")
    damage(run / CHECKPOINTS / "round-00003.checkpoint")
    lines = Lines()
    experiment.resume(run, progress=lines)
    assert lines.says("round-00004.checkpoint is damaged", "It is skipped for the checkpoint before it")
    assert lines.says("round-00003.checkpoint is damaged")
    assert_same(ended(run), ended(finished))


def test_no_checkpoint_is_left(run: Path) -> None:
    for path in (run / CHECKPOINTS).iterdir():
        damage(path)
    with pytest.raises(CheckpointError, match=r"round-00004\.checkpoint is damaged"):
        experiment.resume(run)


def test_resume_goes_back_to_a_round_by_hand(finished: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="holds no checkpoint of round 1"):
        experiment.resume(run, round=1)
    lines = Lines()
    result = experiment.resume(run, round=2, progress=lines)
    assert result.rounds == 4
    assert checkpoint.rounds(run / CHECKPOINTS) == [2, 3, 4]
    assert_same(ended(run), ended(finished))


def test_a_resume_leaves_no_half_written_files(run: Path) -> None:
    for folder in (run, run / CHECKPOINTS, run / "clients" / "client-000"):
        folder.mkdir(exist_ok=True, parents=True)
        (folder / ".state.x7.part").write_bytes(b"half")
    experiment.resume(run, round=3)
    assert not list(run.rglob("*.part"))


def test_a_log_that_lost_records_of_a_complete_round_is_found(run: Path) -> None:
    """Also if whole lines are missing from its end, which no line's own seal shows."""
    log = run / "metrics.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:-1]))
    with pytest.raises(CheckpointError, match="records are missing"):
        experiment.resume(run)
    experiment.resume(run, round=2)
    assert len(log.read_bytes().splitlines()) == len(lines)
