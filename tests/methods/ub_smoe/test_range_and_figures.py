"""UB-SMoE over rounds of small clients: phi in its range, and the figures of idle experts by budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.memory import ClientMemory
from fedguild.config import tables
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.server.method import excerpt_of
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client

IDLE, RATIO = "share of expert-steps without tokens", "injected pseudo-gradient over own gradient, norms"


def federation(folder: Path, **options: object) -> Federation:
    method = build_method("ub-smoe", {"rank": 2, "targets": ["experts"], **options})
    clients = [client(0, LARGE), client(1, SMALL), client(2, SMALL, 6), client(3, MIDDLE)]
    found = Federation(tiny_backbone("olmoe"), method, clients, folder)
    found.memory = ClientMemory(folder / "clients", trained=True)
    return found


def after(found: Federation, rounds: int, learning_rate: float = 0.05) -> Payload:
    state = found.start()
    for round in range(1, rounds + 1):
        state = found.method.aggregate(state, iter(found.train(state, round, learning_rate=learning_rate)))
    return state


@pytest.mark.parametrize("kind", ["hinge", "clamp"])
def test_a_clients_phi_stays_in_its_range_only_where_it_is_clamped(kind: str, tmp_path: Path) -> None:
    """Two steps at a learning rate of 0.5, a range of +-0.1: without the clamp Adam leaves it in the first step."""
    found = federation(tmp_path, phi_range=kind, phi_min=-0.1, phi_max=0.1, penalty="none")
    state = after(found, 2, learning_rate=0.5)
    assert found.memory.trained is not None
    kept = [found.memory.trained.load(who.name, 3).tensors for who in found.clients]
    largest = max(float(value.abs().max()) for one in kept for name, value in one.items() if name.endswith(".phi"))
    server = max(float(value.abs().max()) for value in state.part("phi").values())
    if kind == "clamp":
        assert largest <= 0.1 + 1e-7
        assert server <= 0.1 + 1e-7
    else:
        assert largest > 0.1


@pytest.mark.parametrize("kind", ["hinge", "scale"])
def test_the_server_moves_phi_by_its_range_only_where_it_is_scaled(kind: str, tmp_path: Path) -> None:
    """One round of clients whose utilisation the range does not change: phi is 0 in it, and does not train."""
    moved = {}
    for limit in (1.0, 0.1):
        options = {"phi_range": kind, "phi_min": -limit, "phi_max": limit, "phi": "fixed"}
        moved[limit] = after(federation(tmp_path / str(limit), **options), 1).part("phi")
    for name, value in moved[1.0].items():
        assert bool((value > 0).any())
        assert bool((value < 0).any())
        torch.testing.assert_close(moved[0.1][name], (0.1 if kind == "scale" else 1.0) * value)


def test_the_figures_are_by_budget_and_of_the_last_round(tmp_path: Path) -> None:
    """The fewer experts are active, the more are idle; G~ is injected from the second round on."""
    found = federation(tmp_path)
    for rounds in (1, 2):
        state = after(found, rounds)
        seen = {figure.name: figure for figure in found.method.observe(state, found.model)}
        idle, ratio = seen[IDLE], seen[RATIO]
        assert list(idle.columns) == list(ratio.columns) == ["large", "middle", "small"]
        assert list(idle.rows) == [f"layer {index}" for index in range(len(found.model.moe))]
        assert bool(((idle.values >= 0) & (idle.values < 1)).all())
        by_budget = idle.values.mean(dim=0)
        assert by_budget[0] < by_budget[1] < by_budget[2]
        assert bool(ratio.values.any()) == (rounds == 2)
    known = {
        f"{one.name} / {column}" for one in seen.values() for column in one.columns if one.name not in (IDLE, RATIO)
    }
    shown = {name for table in tables() if table.name.startswith("ub-smoe/") for name in table.load().shows}
    of_all = {f"{IDLE} / all", f"{RATIO} / all"}
    assert of_all < shown <= known | of_all | {f"{IDLE} / b4"}, "b4 is the smallest budget of the model from SmolLM2"


def test_normalised_it_is_injected_at_the_size_of_a_gradient(tmp_path: Path) -> None:
    """rho is 1 without scaling: what is injected is of the norm of the experts' own gradients, in every layer."""
    sizes = {}
    for norm in ("published", "expert"):
        options = {"scaling": "none", "pseudo_gradient_norm": norm, "pseudo_gradient_clip": None}
        found = federation(tmp_path / norm, **options)
        seen = {figure.name: figure.values for figure in found.method.observe(after(found, 2), found.model)}
        sizes[norm] = seen[RATIO][:, 2]
    assert bool(((sizes["expert"] > 0.3) & (sizes["expert"] < 3)).all())
    assert not torch.allclose(sizes["expert"], sizes["published"], rtol=0.2)


def test_a_client_is_not_sent_the_figures_of_budgets(tmp_path: Path) -> None:
    found = federation(tmp_path)
    state = after(found, 1)
    assert state.part("server/figures")
    for who in found.clients:
        assert not excerpt_of(found.method, state, found.model, who).part("server")
        assert not found.method.download(state, found.model, who).part("server")
