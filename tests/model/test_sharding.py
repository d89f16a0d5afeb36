"""A backbone sharded over two processes against one that is not: equal results, half the bytes, and who hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.model.backbone import load_backbone, make_backbone
from fedguild.model.ranks import Direction, Event, Ranks
from fedguild.runs import experiment
from tests.backbones import tiny_model
from tests.model.ranks import FAMILIES, SHORT_SECONDS, federation, scenarios
from tests.ports import free_ports
from tests.runs.runs import assert_same, ended, save_model

SIZE = 2


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[subprocess.Popen[str]]]]:
    """Two ranks, which compute while the test process does; and their folder."""
    folder, port = tmp_path_factory.mktemp("ranks"), free_ports(5)[0]
    save_model(folder / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, "-m", "tests.model.ranks"]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(SIZE), str(port), str(folder)],
            cwd=Path(__file__).parents[2],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(SIZE)
    ]
    try:
        yield folder, ranks
    finally:
        for rank in ranks:
            rank.kill()


@pytest.fixture(scope="module")
def found(started, alone) -> list[dict[str, Any]]:
    """What each of two ranks computed."""
    folder, ranks = started
    said = [rank.communicate(timeout=300 if index == 0 else 30)[1] for index, rank in enumerate(ranks)]
    assert [rank.returncode for rank in ranks] == [0] * SIZE, "\n".join(text[-3000:] for text in said)
    return [{**torch.load(folder / f"rank-{rank}.pt"), "folder": folder} for rank in range(SIZE)]


@pytest.fixture(scope="module")
def alone(started) -> Iterator[dict[str, list[dict[str, Any]]]]:
    """The same, computed on a backbone that is not sharded."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {family: [scenarios(family, rank, None) for rank in range(SIZE)] for family in FAMILIES}
    torch.set_num_threads(threads)


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rank", range(SIZE))
def test_every_rank_gets_the_results_of_a_whole_backbone(found, alone, family, rank):
    """Unequal steps, a backward beside evaluation, unequal generation, merges, and passes that one rank alone wants."""
    ours, expected = found[rank][family], alone[family][rank]
    assert ours.keys() == expected.keys()
    for name in ours.keys() - {"held", "empty passes"}:
        torch.testing.assert_close(
            ours[name], expected[name], rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
    assert not torch.equal(ours["merged"], ours["after the merge"])


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_every_rank_holds_half_of_every_layer(found, alone, family):
    whole, halves = alone[family][0]["held"], [found[rank][family]["held"] for rank in range(SIZE)]
    layers = [name for name in whole if halves[0][name] != whole[name]]
    rest = whole.keys() - set(layers)
    assert layers
    assert all(halves[0][name] + halves[1][name] == whole[name] for name in layers)
    assert not any(".layers." in name or ".block." in name for name in rest), "embeddings, head and the last norm"
    each = [sum(half[name] for name in layers) / sum(whole[name] for name in layers) for half in halves]
    assert each == [0.5, 0.5]


@pytest.mark.long
@pytest.mark.parametrize("family", FAMILIES)
def test_a_rank_without_work_runs_empty_passes(found, family):
    counts = [found[rank][family]["empty passes"] for rank in range(SIZE)]
    assert counts[0] >= 2 * 1 + 2
    assert counts[1] >= 2 * 2 + 3


@pytest.mark.long
def test_a_run_under_torchrun_ends_as_in_one_process(found, tmp_path):
    """Four clients in cohorts of one on two ranks, changes to the backbone, and every client's own model scored."""
    folder = found[0]["folder"]
    experiment.run(federation(folder), tmp_path / "alone")
    assert_same(ended(folder / "together"), ended(tmp_path / "alone"))


@pytest.mark.long
@pytest.mark.parametrize("place", ["before", "within"])
def test_a_timeout_names_the_rank_that_hangs(found, place):
    assert found[0]["hanging"][place].startswith(f"Rank 1 of {SIZE} did not come to pass ")
    assert f"rank 0 waited for {SHORT_SECONDS:g} s" in found[0]["hanging"][place]


def test_a_rank_that_is_never_met_is_an_error():
    with pytest.raises(FedGuildError, match=r"Rank 1 did not meet the 1 others at 127.0.0.1:\d+ within 0.5 s"):
        Ranks.join(1, 2, torch.device("cpu"), "127.0.0.1", free_ports(1)[0], 0.5)


def test_what_cannot_be_sharded_is_refused():
    nobody = Ranks(0, 2, torch.device("cpu"), None)
    with pytest.raises(ConfigError, match="4 bit cannot be sharded"):
        load_backbone("embedded", load_in_4bit=True, ranks=nobody)
    model = tiny_model("olmoe")
    model.model.layers = torch.nn.ModuleList()
    with pytest.raises(FedGuildError, match="has no layers that can be sharded"):
        make_backbone(model, None, name="no layers", ranks=nobody)


def test_a_rank_takes_part_until_all_want_what_it_wants(monkeypatch):
    ranks = Ranks(0, 2, torch.device("cpu"), None)
    events, empty = iter([Event(Direction.BACKWARD), Event(Direction.FORWARD, 1), Event(Direction.NOTHING)]), []
    monkeypatch.setattr(ranks, "_agree", lambda wanted: next(events))
    ranks.empty = empty.append
    ranks.wait_for_others()
    assert empty == [Event(Direction.BACKWARD), Event(Direction.FORWARD, 1)]
    assert ranks.empty_passes == 2
