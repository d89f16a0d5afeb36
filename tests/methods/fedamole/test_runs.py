"""FedAMoLE as a whole: a run that is killed and resumed, and what a round sends on Llama-3.2-1B."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.config import load_config
from fedguild.core.errors import ConfigError
from fedguild.runs import experiment
from tests.runs.runs import save_model, small_settings

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


# traffic


def test_a_federation_without_an_assignment_leaves_no_run_behind(folders: dict[str, Path], tmp_path: Path) -> None:
    """Another folder is not needed once the setting is mended."""
    settings = small_settings(folders["llama"], *OPTIONS, "federation.rounds=1", "federation.clients=6")
    with pytest.raises(ConfigError, match="clients_per_expert to at least 3"):
        experiment.run(load_config("fedamole/tiny-tasks", settings), tmp_path / "run")
    mended = load_config("fedamole/tiny-tasks", [*settings, "method.scale_clients_per_expert=true"])
    assert experiment.run(mended, tmp_path / "run").rounds == 1
