"""Definition 4.1 against SCIP and against trying everything; ties, bounds, and what cannot be satisfied."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import scipy.optimize
import torch
from torch import Tensor

from fedguild.core.errors import ConfigError
from fedguild.core.seeding import numpy_rng, torch_rng
from fedguild.methods.fedamole import assignment
from fedguild.methods.fedamole.assignment import AssignmentRules, assign_experts, selection_probability
from tests.oracles import fedamole as oracle

PAPER = AssignmentRules(fewest=2, most=8, clients_per_expert=2)
SIZES = (
    (3, 4, AssignmentRules(1, 3, 1)),
    (3, 4, AssignmentRules(2, 3, 2)),
    (2, 5, AssignmentRules(1, 4, 1)),
    (4, 4, AssignmentRules(1, 2, 1)),
    (4, 3, AssignmentRules(1, 2, 2)),
)
"""Clients, experts and rules small enough to try every assignment."""


def check(assigned: Tensor, rules: AssignmentRules) -> None:
    """Asserts every constraint of Definition 4.1."""
    assert assigned.dtype is torch.bool
    assert (assigned.sum(dim=-2) == rules.clients_per_expert).all()
    held = assigned.sum(dim=-1)
    assert (held >= rules.fewest).all()
    assert (held <= rules.most).all()


def objective(probability: Tensor, assigned: Tensor) -> Tensor:
    """<P, D> of each module."""
    return (probability.double() * assigned).sum(dim=(-2, -1))


def picks(assigned: Tensor) -> oracle.Assignment:
    """D [clients, experts] as the oracle writes it."""
    return tuple(tuple(column.nonzero().flatten().tolist()) for column in assigned.T)


def random_rules(draw: np.random.Generator) -> tuple[int, int, AssignmentRules]:
    """Sizes and rules that are feasible, many of them just so."""
    while True:
        clients, experts, fewest = (int(draw.integers(low, high)) for low, high in ((1, 9), (1, 13), (1, 4)))
        per_expert = int(draw.integers(1, clients + 1))
        most = int(draw.integers(max(1, experts * per_expert // clients), experts + 2))
        if clients * fewest <= experts * per_expert <= clients * most:
            return clients, experts, AssignmentRules(fewest, most, per_expert)


# the optimum


def test_scip_finds_nothing_better() -> None:
    """60 random instances; both solvers are exact, so their values agree up to their tolerances."""
    scip = pytest.importorskip("pyscipopt")
    draw = numpy_rng(0, "referee")
    for instance in range(60):
        clients, experts, rules = random_rules(draw)
        scores = torch.from_numpy(draw.normal(size=(1, clients, experts)) * draw.choice([0.0, 0.1, 1.0, 10.0]))
        probability = selection_probability(scores)
        found = assign_experts(probability, rules)
        check(found, rules)
        expected = referee(scip, probability[0], rules)
        assert float(objective(probability, found)) == pytest.approx(expected, abs=1e-7), instance


@pytest.mark.parametrize("spread", [0.1, 1.0, 10.0])
def test_scip_finds_nothing_better_at_the_papers_size(spread: float) -> None:
    """10 clients and 30 experts, under the paper's rules; two modules of each spread."""
    scip = pytest.importorskip("pyscipopt")
    scores = torch.from_numpy(numpy_rng(1, "referee", str(spread)).normal(size=(2, 10, 30)) * spread)
    probability = selection_probability(scores)
    found = assign_experts(probability, PAPER)
    check(found, PAPER)
    for module, value in zip(probability, objective(probability, found).tolist(), strict=True):
        assert value == pytest.approx(referee(scip, module, PAPER), abs=1e-7)


def referee(scip, probability: Tensor, rules: AssignmentRules) -> float:
    """The value of Definition 4.1 as a mixed integer program, solved by SCIP as the paper does."""
    model = scip.Model()
    model.hideOutput()
    clients, experts = probability.shape
    d = [[model.addVar(vtype="B") for _ in range(experts)] for _ in range(clients)]
    for row in d:
        model.addCons(scip.quicksum(row) >= rules.fewest)
        model.addCons(scip.quicksum(row) <= rules.most)
    for expert in range(experts):
        model.addCons(scip.quicksum(row[expert] for row in d) == rules.clients_per_expert)
    pairs = [(i, j) for i in range(clients) for j in range(experts)]
    model.setObjective(scip.quicksum(float(probability[i, j]) * d[i][j] for i, j in pairs), "maximize")
    model.optimize()
    assert model.getStatus() == "optimal"
    return float(sum(probability[i, j] for i, j in pairs if model.getVal(d[i][j]) > 0.5))


@pytest.mark.parametrize(("clients", "experts", "rules"), SIZES)
def test_nothing_better_among_all_assignments(clients: int, experts: int, rules: AssignmentRules) -> None:
    probability = selection_probability(torch.randn(4, clients, experts, generator=torch_rng(0, "scores")))
    found = assign_experts(probability, rules)
    check(found, rules)
    for module, assigned in zip(probability.tolist(), found, strict=True):
        every = oracle.feasible(clients, experts, rules.fewest, rules.most, rules.clients_per_expert)
        assert picks(assigned) == max(every, key=lambda one: oracle.value(module, one))


# ties


def tied(clients: int, experts: int, levels: int, seed: int) -> Tensor:
    """A matrix of few different, exactly representable values."""
    return torch.randint(0, levels, (clients, experts), generator=torch_rng(seed, "levels")).double() / 8


@pytest.mark.parametrize(("clients", "experts", "rules"), SIZES)
@pytest.mark.parametrize("levels", [1, 2, 3])
def test_the_smallest_preference_wins_a_tie(clients: int, experts: int, rules: AssignmentRules, levels: int) -> None:
    """Among all optimal assignments, tried one by one, it is that of the smallest <w, D>: the optimum is untouched."""
    preference = np.random.default_rng(0).random((clients, experts)).tolist()
    for seed in range(4):
        probability = tied(clients, experts, levels, seed)
        values = {
            one: oracle.value(probability.tolist(), one)
            for one in oracle.feasible(clients, experts, rules.fewest, rules.most, rules.clients_per_expert)
        }
        optimal = [one for one, value in values.items() if value == max(values.values())]
        expected = min(optimal, key=lambda one: oracle.value(preference, one))
        assert picks(assign_experts(probability[None], rules)[0]) == expected
    assert len(optimal) > 1 or levels == 3


@pytest.fixture
def solver(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[str]:
    """Another of HiGHS's algorithms in place of the dual simplex."""
    calls = []

    def other(*arguments, method: str, options: dict, **named):
        calls.append(method)
        return scipy.optimize.linprog(*arguments, method=request.param[0], options=options | request.param[1], **named)

    monkeypatch.setattr(assignment, "linprog", other)
    yield request.param[0]
    assert calls


REFERENCE = {levels: assign_experts(tied(10, 30, levels, 1)[None], PAPER) for levels in (1, 2, 5)}


@pytest.mark.parametrize("solver", [("highs-ipm", {}), ("highs-ds", {"presolve": False})], indirect=True)
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_the_solvers_path_does_not_matter(solver: str, levels: int) -> None:
    assert torch.equal(assign_experts(tied(10, 30, levels, 1)[None], PAPER), REFERENCE[levels])


def test_modules_do_not_matter_to_each_other() -> None:
    probability = torch.stack([tied(10, 30, levels, 7) for levels in (1, 2, 4, 8)])
    alone = torch.cat([assign_experts(module[None], PAPER) for module in probability])
    assert torch.equal(assign_experts(probability, PAPER), alone)


def test_noise_below_the_tie_is_no_preference() -> None:
    noise = 1e-13 * torch.randn(10, 30, dtype=torch.float64, generator=torch_rng(0, "noise"))
    assert torch.equal(assign_experts((tied(10, 30, 2, 1) + noise)[None], PAPER), REFERENCE[2])


# awkward sizes


@pytest.mark.parametrize(
    ("clients", "experts", "rules"),
    [
        (1, 1, AssignmentRules(1, 1, 1)),
        (1, 5, AssignmentRules(2, 5, 1)),
        (4, 3, AssignmentRules(3, 3, 4)),
        (5, 10, AssignmentRules(4, 9, 2)),
        (5, 10, AssignmentRules(2, 4, 2)),
        (5, 10, AssignmentRules(4, 4, 2)),
        (10, 30, AssignmentRules(2, 100, 2)),
    ],
    ids=["one", "one client", "everything to everybody", "as few as possible", "as many as possible", "equal", "no b"],
)
def test_just_feasible(clients: int, experts: int, rules: AssignmentRules) -> None:
    check(assign_experts(selection_probability(torch.randn(3, clients, experts)), rules), rules)


def test_selection_is_a_softmax_over_the_clients() -> None:
    scores = torch.randn(3, 4, 5, generator=torch_rng(0, "scores"))
    expected = [oracle.selection(module) for module in scores.tolist()]
    torch.testing.assert_close(selection_probability(scores), torch.tensor(expected, dtype=torch.float64))


# what cannot be satisfied


@pytest.mark.parametrize(
    ("clients", "experts", "rules", "told"),
    [
        (2, 30, AssignmentRules(2, 30, 3), r"clients_per_expert is 3, but the federation has 2(.|\n)*from 1 to 2"),
        (
            10,
            9,
            AssignmentRules(2, 8, 2),
            r"9 x 2 is less than 10 x 2(.|\n)*clients_per_expert to at least 3 .*experts to at least 10\.",
        ),
        (2, 1, AssignmentRules(2, 8, 2), r"1 x 2 is less than 2 x 2\.\nSet method\.experts to at least 2\."),
        (
            10,
            30,
            AssignmentRules(2, 5, 2),
            r"30 x 2 is more than 10 x 5(.|\n)*experts_per_client to at least 6, or method.experts to at most 25",
        ),
    ],
)
def test_no_assignment(clients: int, experts: int, rules: AssignmentRules, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        assign_experts(torch.zeros(1, clients, experts), rules)


def test_the_check_is_exact() -> None:
    """It refuses all that has no assignment, and nothing else."""
    for clients, experts, fewest, most, per_expert in np.ndindex(4, 4, 4, 4, 4):
        sizes, rules = (clients + 1, experts + 1), AssignmentRules(fewest + 1, most + 1, per_expert + 1)
        possible = next(oracle.feasible(*sizes, fewest + 1, most + 1, per_expert + 1), None) is not None
        if possible:
            rules.require_feasible(*sizes)
        else:
            with pytest.raises(ConfigError):
                rules.require_feasible(*sizes)


@pytest.mark.parametrize(("clients", "expected"), [(10, 2), (15, 2), (20, 2), (31, 3), (50, 4)])
def test_scaling_raises_the_clients_per_expert_as_far_as_needed(clients: int, expected: int) -> None:
    rules = AssignmentRules(fewest=2, most=8, clients_per_expert=2).scaled(clients, experts=30)
    assert rules.clients_per_expert == expected
    rules.require_feasible(clients, 30)
