"""The engine `flower` gives the results of `local`, bit for bit; here without Flower's network."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild import experiment
from fedguild.methods import METHODS
from tests.engines.equality import case_config, save_models, traffic
from tests.engines.flower.loopback_federation import QUICK, grid_of, serve_on, small_config, trainers_of
from tests.experiment.runs import Ended, assert_same, ended, save_model


def newest(run: Ended) -> Ended:
    """Returns a run with the newest memory of each client only."""
    memory = {name.split("/")[-2]: content for name, content in sorted(run.memory.items())}
    return replace(run, memory=memory)


def memories(folder: Path) -> dict[str, bytes]:
    """Returns client -> its newest memory, wherever it lies below a folder."""
    paths = sorted(folder.rglob("*.memory"), key=lambda path: path.name)
    return {path.parent.name: path.read_bytes() for path in paths}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return save_models(tmp_path_factory.mktemp("models"))


@pytest.mark.parametrize("label", sorted(METHODS))
def test_flower_gives_the_results_of_local(label: str, models: dict[str, Path], tmp_path: Path) -> None:
    config = case_config(label, models)
    experiment.run(config, tmp_path / "local")
    trainers = trainers_of(config, tmp_path / "sites")
    serve_on(grid_of(trainers), config, tmp_path / "server")
    assert traffic(tmp_path / "server/state/run") == traffic(tmp_path / "local")
    found, expected = (ended(folder) for folder in (tmp_path / "server/state/run", tmp_path / "local"))
    assert_same(replace(found, memory=memories(tmp_path / "sites")), newest(expected))
    assert {trainer.loads for trainer in trainers} == {1}


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_codec_loses_the_same_on_every_engine(codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.wire.codec.SMALLEST_SHRUNK", 1)
    model = save_model(tmp_path / "model")
    plain, coded = (
        small_config(model, *QUICK, f"federation.codec={name}", base="fedit/tiny-tasks") for name in ("fp32", codec)
    )
    experiment.run(plain, tmp_path / "plain")
    experiment.run(coded, tmp_path / "local")
    serve_on(grid_of(trainers_of(coded, tmp_path)), coded, tmp_path / "server")
    exact, local, flower = (
        ended(folder) for folder in (tmp_path / "plain", tmp_path / "local", tmp_path / "server/state/run")
    )
    assert_same(replace(flower, memory={}), replace(local, memory={}))
    changed = [
        name for name, tensor in exact.state.tensors.items() if not torch.equal(tensor, local.state.tensors[name])
    ]
    assert changed

    def sent(run: Ended) -> int:
        return sum(record["upload_bytes"] for record in run.records if record["kind"] == "client")

    assert sent(local) < 0.75 * sent(exact)
