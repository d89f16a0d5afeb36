"""What a client is sent of the method's state, where it scores its own model or takes it home."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from fedguild import experiment
from fedguild.config import Config
from fedguild.engines.flower.engine import read_upload
from fedguild.engines.flower.parcel import Parcel
from fedguild.experiment import CHECKPOINTS
from fedguild.methods.fedamole.pool import Pool, held_experts
from fedguild.server import checkpoint
from tests.engines.equality import case_config
from tests.engines.flower.guild import Lines, desks_of, serve_on
from tests.engines.flower.loopback import LoopbackGrid, LoopbackNode
from tests.experiment.runs import save_model


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {family: save_model(folder / family, family) for family in ("llama", "olmoe")}


def listening(config: Config, folder: Path) -> tuple[LoopbackGrid, list[Parcel]]:
    """Returns a Grid of the config's clients, and a list into which every question to them goes."""
    heard: list[Parcel] = []

    def of(answer: Callable[[Parcel], Parcel]) -> Callable[[Parcel], Parcel]:
        return lambda parcel: heard.append(parcel) or answer(parcel)  # type: ignore[func-returns-value]

    desks = desks_of(config, folder)
    return LoopbackGrid(LoopbackNode(100 + desk.site.client, of(desk.answer)) for desk in desks), heard


def scoring(config: Config) -> Config:
    """The run with both scores that clients compute themselves."""
    wanted = {"clients": True, "received": True}
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=wanted)})


def test_a_client_of_fedamole_is_sent_its_own_experts_and_no_others(models: dict[str, Path], tmp_path: Path) -> None:
    config, lines = scoring(case_config("fedamole", models)), Lines()
    grid, heard = listening(config, tmp_path / "sites")
    result = serve_on(grid, config, tmp_path / "server", lines, reads_data=False, deliver=True)
    saved = checkpoint.load(
        tmp_path / "server/state/run" / CHECKPOINTS, result.rounds, fingerprint=config.fingerprint()
    )
    pool = Pool.of(saved.state)
    asked = [parcel for parcel in heard if parcel.kind == "score" and parcel.round == result.rounds]
    assert {parcel.client for parcel in asked} == set(range(config.federation.clients))
    for parcel in asked:
        sent = read_upload(parcel.body, "test")
        assert not sent.scalars
        assert {name.partition("/")[0] for name in sent.tensors} == {"common", "experts"}
        held = {module: rows[parcel.client].nonzero().flatten() for module, rows in pool.assigned.items()}
        own = {module: tuple(ids.tolist()) for module, ids in held.items()}
        assert held_experts(sent.part("experts")) == own
        assert all(len(ids) < config.method.options["experts"] for ids in own.values())
    assert not [parcel for parcel in heard if parcel.kind == "deliver"]
    assert lines.says("No client takes a model home", "fedamole", "MixtureOfLora", "clients")
    assert not list((tmp_path / "sites").rglob("models"))


@pytest.mark.parametrize("label", ["fedamole", "fedmoe", "hetlora", "flame"])
def test_the_scores_are_those_of_a_simulation(label: str, models: dict[str, Path], tmp_path: Path) -> None:
    config = scoring(case_config(label, models))
    local = experiment.run(config, tmp_path / "local")
    grid, _ = listening(config, tmp_path / "sites")
    found = serve_on(grid, config, tmp_path / "server", reads_data=False)
    assert local.own
    assert found.own == local.own


def test_all_clients_are_sent_the_same_bytes_where_a_state_is_about_none(
    models: dict[str, Path], tmp_path: Path
) -> None:
    config = scoring(case_config("fedavg", models))
    grid, heard = listening(config, tmp_path / "sites")
    result = serve_on(grid, config, tmp_path / "server", reads_data=False)
    assert len({parcel.body for parcel in heard if parcel.kind == "score" and parcel.round == result.rounds}) == 1
