"""The expert assignment of FedAMoLE: 32 modules, 30 experts, 10 clients, against SCIP module by module.

Run: python benchmarks/assignment.py
Prints the seconds for all modules; the aim is at most 0.5. SCIP, which the paper uses, is timed beside
it where pyscipopt is installed. Scores are random, and once all equal, where every choice is a tie.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable

import torch
from timing import add_device, machine, medians
from torch import Tensor

from fedguild.core.seeding import torch_rng
from fedguild.methods.fedamole.assignment import AssignmentRules, assign_experts, selection_probability

MODULES, CLIENTS, EXPERTS = 32, 10, 30
RULES = AssignmentRules(fewest=2, most=8, clients_per_expert=2)


def main() -> None:
    """Measures random and equal scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    add_device(parser)
    given = parser.parse_args()
    print(machine(given.device, given.dtype))
    scores = torch.randn(MODULES, CLIENTS, EXPERTS, generator=torch_rng(0, "scores"))
    for name, spread in (("random scores", 1.0), ("equal scores", 0.0)):
        measure(name, selection_probability(spread * scores.to(given.device, given.dtype)), given.repeats)


def measure(name: str, probability: Tensor, repeats: int) -> None:
    """Prints one matrix's seconds and, beside SCIP, the ratio."""
    steps: dict[str, Callable[[], object]] = {"ours": lambda: assign_experts(probability, RULES)}
    if importlib.util.find_spec("pyscipopt") is not None:
        steps["scip"] = lambda: [solve_with_scip(module) for module in probability]
    seconds = medians(steps, repeats=repeats)
    beside = f", SCIP {seconds['scip']:.2f} s, ratio {seconds['scip'] / seconds['ours']:.1f}" if "scip" in steps else ""
    print(
        f"{MODULES} modules x {EXPERTS} experts x {CLIENTS} clients, {name}: {seconds['ours']:.3f} s{beside}",
        flush=True,
    )


def solve_with_scip(probability: Tensor) -> float:
    """Returns the value of one module's program as SCIP solves it."""
    from pyscipopt import Model, quicksum

    model = Model()
    model.hideOutput()
    d = [[model.addVar(vtype="B") for _ in range(EXPERTS)] for _ in range(CLIENTS)]
    for row in d:
        model.addCons(quicksum(row) >= RULES.fewest)
        model.addCons(quicksum(row) <= RULES.most)
    for expert in range(EXPERTS):
        model.addCons(quicksum(row[expert] for row in d) == RULES.clients_per_expert)
    weights = probability.tolist()
    terms = (p * x for own, row in zip(weights, d, strict=True) for p, x in zip(own, row, strict=True))
    model.setObjective(quicksum(terms), "maximize")
    model.optimize()
    return float(model.getObjVal())


if __name__ == "__main__":
    main()
