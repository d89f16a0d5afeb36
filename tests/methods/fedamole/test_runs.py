"""FedAMoLE as a whole: a run that is killed and resumed, and what a round sends on Llama-3.2-1B."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import load_config
from fedguild.core.accounting import count_traffic
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.measuring.log.records import EvaluationRecord, ObservationRecord, RunLog
from fedguild.methods import build_method
from fedguild.model.backbone import describe_config
from fedguild.model.info import ModelInfo
from fedguild.runs import experiment
from tests.runs.runs import Killed, assert_same, ended, kill_at, save_model, small_settings

MEBIBYTE = 2**20
OPTIONS = (
    "method.experts=5",
    "method.experts_per_client=4",
    "method.privacy_eta=5",
    "federation.client_fraction=0.5",
    "federation.cohort_size=1",
    "evaluation.clients=true",
    "evaluation.received=true",
)


@pytest.fixture(autouse=True)
def _plain_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedguild.runs.experiment.write_report", lambda folder: folder / "report.html")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Architecture -> folder of a random model."""
    models = tmp_path_factory.mktemp("models")
    return {family: save_model(models / family, family) for family in ("llama", "olmoe")}


@pytest.mark.parametrize("family", [pytest.param("llama", marks=pytest.mark.long), "olmoe"])
def test_a_resumed_run_is_an_uninterrupted_one(family: str, folders: dict[str, Path], tmp_path: Path) -> None:
    """Half of the clients a round, noise on the embeddings, killed in round 2; on attention, dense or with experts."""
    settings = small_settings(folders[family], *OPTIONS, "federation.budgets=[{name: all}]")
    config = load_config("fedamole/tiny-tasks", settings)
    whole = experiment.run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.client.optimizer.SlotOptimizer.step", 6)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "killed")
    experiment.resume(tmp_path / "killed")
    assert_same(ended(tmp_path / "killed"), ended(tmp_path / "whole"))
    records = RunLog(tmp_path / "whole").read()
    scored = [record for record in records if isinstance(record, EvaluationRecord) and record.round == 3]
    assert {record.scope for record in scored} == {"client", "received", "summary"}
    assert whole.mean == next(record.score for record in scored if record.name == "mtal")
    assert len({r.name for r in records if isinstance(r, ObservationRecord)}) == 5


def test_a_run_leaves_the_backbone_as_it_was(folders: dict[str, Path], tmp_path: Path) -> None:
    config = load_config("fedamole/tiny-tasks", small_settings(folders["llama"], *OPTIONS))
    prepared = experiment.prepare(config, tmp_path / "prepared")
    before = prepared.backbone.fingerprint()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedguild.runs.experiment.prepare", lambda *_: prepared)
        experiment.run(config, tmp_path / "prepared")
    assert prepared.backbone.fingerprint() == before


# traffic


@pytest.fixture(scope="module")
def llama_1b() -> ModelInfo:
    """What Llama-3.2-1B looks like, without weights."""
    return describe_config("llama-3.2-1b")


def mean_traffic(name: str, options: dict[str, object], model: ModelInfo) -> tuple[float, float]:
    """Mean MiB up and down of ten clients in the first round, in bf16, as the wire counts it."""
    method = build_method(name, options)
    clients = [ClientInfo(index, Budget("all", 0, 8), 100) for index in range(10)]
    state = method.start(model, [clients[0].budget], torch_rng(0, "start"))
    state = method.enroll(state, model, clients)
    up, down = [], []
    for client in clients:
        download = method.download(state, model, client)
        shapes = method.expected_upload(model, client, download)
        traffic = count_traffic(
            1,
            client.index,
            in_bf16({name: tuple(tensor.shape) for name, tensor in download.tensors.items()}),
            in_bf16(shapes),
        )
        up.append(traffic.upload_bytes / MEBIBYTE)
        down.append(traffic.download_bytes / MEBIBYTE)
    return fmean(up), fmean(down)


def in_bf16(shapes: Mapping[str, tuple[int, ...]]) -> Payload:
    """A payload of these shapes, without values."""
    return Payload({name: torch.empty(shape, dtype=torch.bfloat16, device="meta") for name, shape in shapes.items()})


@pytest.mark.parametrize(
    ("experts", "paper_up", "paper_down"), [(15, 7.59, 7.59), (20, 9.24, 9.23), (25, 10.88, 10.87), (30, 12.52, 12.51)]
)
def test_the_traffic_of_table_4(experts: int, paper_up: float, paper_down: float, llama_1b: ModelInfo) -> None:
    """(E k^c / C + 1) experts and W^t; the names of the tensors add less than 1 %, the paper's own overhead 1.2 %."""
    up, down = mean_traffic("fedamole", {"experts": experts}, llama_1b)
    weights = 2 * 16 * 8 * ((experts * 2 / 10 + 1) * (2048 + 2048 + 2048 + 512) + 2 * 2048) / MEBIBYTE
    assert weights == {15: 7.5, 20: 9.125, 25: 10.75, 30: 12.375}[experts]
    for found, paper in ((up, paper_up), (down, paper_down)):
        assert weights < found < 1.01 * weights
        assert found == pytest.approx(paper, rel=0.012)


def test_the_traffic_of_the_issue(llama_1b: ModelInfo) -> None:
    up, down = mean_traffic("fedamole", {}, llama_1b)
    plain = mean_traffic("fedit", {"rank": 8, "targets": ("q_proj", "v_proj")}, llama_1b)
    assert [round(value, 2) for value in plain] == [1.63, 1.63]
    assert [round(value, 1) for value in (up, down)] == [12.4, 12.4]


def test_a_federation_without_an_assignment_leaves_no_run_behind(folders: dict[str, Path], tmp_path: Path) -> None:
    """Another folder is not needed once the setting is mended."""
    settings = small_settings(folders["llama"], *OPTIONS, "federation.rounds=1", "federation.clients=6")
    with pytest.raises(ConfigError, match="clients_per_expert to at least 3"):
        experiment.run(load_config("fedamole/tiny-tasks", settings), tmp_path / "run")
    mended = load_config("fedamole/tiny-tasks", [*settings, "method.scale_clients_per_expert=true"])
    assert experiment.run(mended, tmp_path / "run").rounds == 1
