from __future__ import annotations

from pathlib import Path

import pytest

from fedguild.measuring.log.folder import Run, load_run
from fedguild.report.html import write_comparison, write_report
from tests.report.runs import RANKS_FINAL, write_run

REFUSED = (2, 3, "adapter/x.lora_A holds 4 values that are <NaN>")


@pytest.fixture(scope="session")
def run_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished FLAME run with a rejected upload and scores on the clients' own data."""
    return write_run(tmp_path_factory.mktemp("runs") / "flame", own_scores=True, rejected=[REFUSED])


@pytest.fixture(scope="session")
def run(run_folder: Path) -> Run:
    return load_run(run_folder)


@pytest.fixture(scope="session")
def run_page(run_folder: Path) -> Path:
    return write_report(run_folder)


@pytest.fixture(scope="session")
def personal_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run in which every client has a model of its own, with figures that the method reports."""
    folder = tmp_path_factory.mktemp("runs") / "fedamole"
    return write_run(folder, name="fedamole", method="fedamole", personal=True)


@pytest.fixture(scope="session")
def personal_run(personal_folder: Path) -> Run:
    return load_run(personal_folder)


@pytest.fixture(scope="session")
def personal_page(personal_folder: Path) -> Path:
    return write_report(personal_folder)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """FLAME and rank-budget LoRA, three seeds each."""
    root = tmp_path_factory.mktemp("comparison")
    flame = [write_run(root / "flame" / f"seed-{seed}", seed=seed) for seed in range(3)]
    ranks = [
        write_run(
            root / "ranks" / f"seed-{seed}",
            name="fedit-ranks",
            method="fedit",
            seed=seed,
            final=RANKS_FINAL,
            rank_budget=True,
        )
        for seed in range(3)
    ]
    return {"flame": flame, "fedit-ranks": ranks}


@pytest.fixture(scope="session")
def comparison_page(folders: dict[str, list[Path]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("pages") / "out"
    return write_comparison(folders, output, reference="fedit-ranks", title="Ranks & experts")


@pytest.fixture(scope="session")
def runs(folders: dict[str, list[Path]]) -> dict[str, list[Run]]:
    return {label: [load_run(folder) for folder in members] for label, members in folders.items()}
