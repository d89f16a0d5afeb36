"""FedAlign-MoE's server: Eq. 4, 6, 7 and 13-18 against slow loops, and what waits for all clients."""

from __future__ import annotations

import math
import tempfile

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.seeding import torch_rng
from fedguild.methods.fedalign_moe import aggregation as region
from fedguild.methods.fedalign_moe.parts import expert_vectors, from_expert_vectors
from fedguild.methods.fedalign_moe.uploads import RegionUploads, Spool
from tests.oracles import fedalign_moe as oracle


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch_rng(seed, "normal"))


def distributions(clients: int, experts: int, seed: int = 0) -> Tensor:
    return (normal(clients, experts, seed=seed).double() * 2).softmax(dim=-1)


def close(found: Tensor, expected: object, tolerance: float = 1e-10) -> None:
    torch.testing.assert_close(
        found.double(), torch.as_tensor(expected, dtype=torch.float64), rtol=tolerance, atol=tolerance
    )


# Eq. 4, 6, 7


@pytest.mark.parametrize(("clients", "experts"), [(1, 4), (2, 3), (7, 5)])
@pytest.mark.parametrize("margins", ["some", "none", "one expert's zero"])
def test_the_reference(clients: int, experts: int, margins: str) -> None:
    routing = distributions(clients, experts)
    margin = torch.rand(clients, experts, generator=torch_rng(1, "margin"), dtype=torch.float64)
    if margins == "none":
        margin.zero_()
    elif margins == "one expert's zero":
        margin[:, 1] = 0.0
    found = region.overlap(routing)
    rows = routing.tolist()
    close(found, [[oracle.overlap(rows, i, e) for e in range(experts)] for i in range(clients)])
    omega = region.consistency_weights(found, margin)
    expected = oracle.consistency_weights(rows, margin.tolist())
    close(omega, expected)
    close(omega.sum(dim=0), torch.ones(experts))
    reference = region.global_reference(routing, omega)
    close(reference, oracle.reference(rows, expected))
    assert float(reference.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize(("clients", "experts"), [(1, 4), (7, 5)])
def test_the_distance_to_the_reference(clients: int, experts: int) -> None:
    routing, reference = distributions(clients, experts), distributions(1, experts, seed=3)[0]
    expected = [oracle.distance(row, reference.tolist()) for row in routing.tolist()]
    close(region.distances(routing, reference), expected)
    assert min(expected) > 0
    close(region.distances(reference[None], reference), [0.0])


def test_the_distance_by_hand() -> None:
    """From (1/2, 1/4, 1/4): (1, 0, 0) is ln 2 away, (1/4, 1/2, 1/4) (ln 1/2 + 2 ln 2) / 4 = ln 2 / 4."""
    found = region.distances(torch.tensor([[1.0, 0.0, 0.0], [0.25, 0.5, 0.25]]), torch.tensor([0.5, 0.25, 0.25]))
    close(found, [math.log(2), math.log(2) / 4], 1e-6)
    assert math.isfinite(float(region.distances(torch.tensor([[0.5, 0.5]]), torch.tensor([1.0, 0.0]))[0]))


def test_two_clients_routing_by_hand() -> None:
    """p-bar_1 = (.6, .4), p-bar_2 = (.2, .8): the consensus is (.4, .6), o_1 = (.24, .24), o_2 = (.08, .48).

    m_1 = (.5, 0), m_2 = (.5, .25): s_1 = (.12, 0), s_2 = (.04, .12), omega_1 = (.75, 0), omega_2 = (.25, 1).
    Eq. 7 gives (.75 · .6 + .25 · .2, .8) = (.5, .8), and scaled p_g = (5/13, 8/13).
    """
    routing = torch.tensor([[0.6, 0.4], [0.2, 0.8]]).double()
    overlap = region.overlap(routing)
    close(overlap, [[0.24, 0.24], [0.08, 0.48]], 1e-6)
    omega = region.consistency_weights(overlap, torch.tensor([[0.5, 0.0], [0.5, 0.25]]).double())
    close(omega, [[0.75, 0.0], [0.25, 1.0]], 1e-6)
    close(region.global_reference(routing, omega), [5 / 13, 8 / 13], 1e-6)


# Eq. 13


@pytest.mark.parametrize("clients", [1, 2, 6])
@pytest.mark.parametrize("size", [1, 7, region.COLUMNS + 3])
def test_cosines_by_a_gram_matrix(clients: int, size: int) -> None:
    """Also across blocks of columns; client 0 of several has a zero vector."""
    rows = normal(clients, size)
    if clients > 1:
        rows[0] = 0.0
    found = region.cosines(region.gram(rows))
    close(found, [[oracle.cosine(a, b) for b in rows] for a in rows], 1e-9)


def test_tiny_and_huge_updates_have_directions() -> None:
    """Their squares are beyond fp32."""
    rows = torch.tensor([[1e-30, 0.0], [3e30, 4e30], [-1e-30, 0.0]])
    close(region.cosines(region.gram(rows)), [[1, 0.6, -1], [0.6, 1, -0.6], [-1, -0.6, 1]], 1e-6)


@pytest.mark.parametrize("clients", [1, 3])
@pytest.mark.parametrize("start", ["zero B", "trained"])
@pytest.mark.parametrize("rank", [1, 4])
def test_directions_of_the_product_are_those_of_the_formed_products(clients: int, start: str, rank: int) -> None:
    before = {f"{name}.lora_A": normal(rank, 5, seed=1) for name in ("gate", "up")}
    before |= {f"{name}.lora_B": normal(6, rank, seed=2) * (start == "trained") for name in ("gate", "up")}
    changes = [{name: normal(*value.shape, seed=10 + i) for name, value in before.items()} for i in range(clients)]
    rows = torch.cat([expert_vectors({n: v[None] for n, v in change.items()}) for change in changes])
    formed = []
    for change in changes:
        after = {name: before[name].double() + change[name].double() for name in before}
        formed.append(
            torch.cat(
                [
                    (after[f"{n}.lora_B"] @ after[f"{n}.lora_A"]).flatten()
                    - (before[f"{n}.lora_B"].double() @ before[f"{n}.lora_A"].double()).flatten()
                    for n in ("gate", "up")
                ]
            )
        )
    close(region.product_gram(rows, before), [[float(a @ b) for b in formed] for a in formed], 1e-9)


# Eq. 14 to 18


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("tolerance", [0.0, 1.0, 2.5])
def test_the_threshold(clients: int, tolerance: float) -> None:
    regions = normal(clients, 4)
    found = region.adaptive_threshold(region.cosines(region.gram(regions)), tolerance)
    assert found == pytest.approx(oracle.threshold(list(regions), tolerance))


@pytest.mark.parametrize("clients", [1, 2, 6])
@pytest.mark.parametrize(
    "options",
    [{}, {"tolerance": 0.3}, {"fixed_threshold": 0.5}, {"use_direction": False}, {"temperature": 0.05}],
    ids=str,
)
def test_the_update_of_an_expert(clients: int, options: dict[str, float | bool]) -> None:
    before, updates, regions = normal(11, seed=1), normal(clients, 11, seed=2), normal(clients, 4, seed=3)
    if clients > 2:
        updates[1] = 0.0
        regions[2] = 0.0
    similarity = region.cosines(region.gram(regions))
    tau = options.get("fixed_threshold")
    tau = region.adaptive_threshold(similarity, options.get("tolerance", 1.0)) if tau is None else tau
    direction = region.cosines(region.gram(updates)) if options.get("use_direction", True) else None
    pairs = region.pair_weights(similarity, direction, tau, options.get("temperature", 1.0))
    found = before + region.combined(updates, region.client_weights(pairs))
    close(found, oracle.aggregated(before, list(updates), list(regions), **options), 1e-6)


def test_two_clients_update_by_hand() -> None:
    """mu_1 = (1, 0), mu_2 = (3, 4): S_12 = .6, M = (1 + .6 + .6 + 1) / 4 = .8, Sigma = .2, beta = 1: tau = .6.

    dtheta_1 = (1, 0), dtheta_2 = (2, 2): D_12 = 1 / sqrt 2 = .707107. gamma_11 = gamma_22 = sigmoid(.4) = .598688,
    gamma_12 = sigmoid(0) · .707107 = .353553: both rows sum to .952241, so each weighs a half.
    With a third client opposed to both, dtheta_3 = (-1, -1) and mu_3 = mu_1, its row is its own gamma alone.
    """
    regions = torch.tensor([[1.0, 0.0], [3.0, 4.0]])
    updates = torch.tensor([[1.0, 0.0], [2.0, 2.0]])
    similarity, direction = (region.cosines(region.gram(rows)) for rows in (regions, updates))
    assert region.adaptive_threshold(similarity, 1.0) == pytest.approx(0.6)
    pairs = region.pair_weights(similarity, direction, 0.6)
    close(pairs, [[0.598688, 0.353553], [0.353553, 0.598688]], 1e-5)
    close(region.client_weights(pairs), [0.5, 0.5])
    close(region.combined(updates, region.client_weights(pairs)), [1.5, 1.0])
    updates = torch.cat([updates, torch.tensor([[-1.0, -1.0]])])
    regions = torch.cat([regions, regions[:1]])
    similarity, direction = (region.cosines(region.gram(rows)) for rows in (regions, updates))
    pairs = region.pair_weights(similarity, direction, 0.6)
    close(pairs[2], [0.0, 0.0, 0.598688], 1e-5)
    close(region.client_weights(pairs), [0.952241 / 2.503171, 0.952241 / 2.503171, 0.598688 / 2.503171], 1e-5)


def test_updates_without_a_direction_change_nothing() -> None:
    pairs = region.pair_weights(torch.ones(2, 2), region.cosines(region.gram(torch.zeros(2, 3))), 0.0)
    weights = region.client_weights(pairs)
    assert weights.tolist() == [0.0, 0.0]
    assert not region.combined(torch.zeros(2, 3), weights).any()


# Expert vectors


def test_an_experts_vector_and_back() -> None:
    tensors = {"b": normal(3, 2, 4), "a": normal(3, 5), "c": normal(3, 1, 1)}
    vectors = expert_vectors(tensors)
    assert vectors.shape == (3, 14)
    close(vectors[2], torch.cat([tensors["a"][2], tensors["b"][2].flatten(), tensors["c"][2].flatten()]))
    back = from_expert_vectors(vectors, tensors)
    assert list(back) == list(tensors)
    assert all(torch.equal(back[name], value) for name, value in tensors.items())


# What waits


@pytest.mark.parametrize("memory_bytes", [1, 100, 2**20])
def test_a_spool_returns_what_it_got(memory_bytes: int, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it stays in memory or goes to disk, and when it is read between two additions."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    values = {(key, who): normal(size, seed=who) for who in (3, 1, 2) for key, size in (("a", 7), ("b", 20))}
    del values["a", 1]
    with Spool(memory_bytes) as spool:
        for (key, who), value in values.items():
            spool.add(key, who, value.to(torch.bfloat16) if key == "b" else value)
            assert torch.equal(spool.rows(key)[-1], value.to(torch.bfloat16).float() if key == "b" else value)
        assert spool.clients("a") == [3, 2]
        assert torch.equal(spool.rows("a"), torch.stack([values["a", 3], values["a", 2]]))
        assert spool.rows("b").shape == (3, 20)
        assert spool.clients("c") == []
        assert spool._file._rolled == (memory_bytes < 500)
    assert not list(tmp_path.iterdir())


def test_uploads_of_a_round() -> None:
    """Client 1 had no tokens in layer a, client 2 sent half an expert."""
    with Spool() as spool:
        uploads = RegionUploads(spool)
        for index, examples in ((0, 10), (1, 20), (2, 30)):
            routing = torch.tensor([0.0, 0.0] if index == 1 else [0.75, 0.25])
            own = {"a/1": torch.full((3,), float(index))}
            regions = {} if index == 2 else {"a/1": torch.ones(2)}
            who = ClientInfo(index, Budget("all", 4, 1), examples)
            uploads.add(who, {"a": routing}, {"a": routing * 2 - 0.6}, regions, own)
        mean, margin = uploads.statistics("a")
        assert mean.tolist() == [[0.75, 0.25], [0.75, 0.25]]
        close(margin, [[0.9, 0.0], [0.9, 0.0]], 1e-6)
        assert uploads.statistics("b")[0].shape == (0, 0)
        clients, regions, updates = uploads.versions("a/1")
        assert clients == [0, 1]
        assert regions.tolist() == [[1.0, 1.0]] * 2
        assert updates.tolist() == [[0.0] * 3, [1.0] * 3]
        assert uploads.versions("a/0")[0] == []
        close(uploads.shares([0, 1]), [1 / 6, 1 / 3])


def test_sigma_is_of_all_pairs() -> None:
    """Eq. 16 divides by N squared: of (1, 0, 0, 1) the mean is .5 and the deviation .5."""
    assert math.isclose(region.adaptive_threshold(torch.eye(2), 1.0), 0.0, abs_tol=1e-12)
