"""Assignment of experts to clients: FedAMoLE's program, solved exactly as a linear program.

Y. Zhang et al., "Personalized Federated Fine-Tuning for LLMs via Data-Driven Heterogeneous Model
Architectures", Definition 4.1: for every module, maximise <P, D> over binary D [clients, experts],
where every client gets k^e to b experts and every expert goes to k^c clients.

The paper calls the program NP-hard and solves it with SCIP. It is a degree-constrained subgraph of a
bipartite graph: the constraint matrix is an incidence matrix of that graph, hence totally
unimodular, so every vertex of the linear relaxation is binary. The simplex method ends at a vertex.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linprog
from scipy.sparse import csc_array, eye_array, kron, vstack
from torch import Tensor

from fedguild.core.errors import ConfigError

TIE = 1e-9
"""Reduced costs up to this count as zero, so that a tie is found whatever the solver's rounding.

The chosen assignment may therefore be below the optimum, by up to this for every choice that differs
from the optimum's: a few 1e-9 in all.
"""
_TOLERANCES = {"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10}


@dataclass(frozen=True)
class AssignmentRules:
    """The constraints of Definition 4.1 on an assignment.

    Attributes:
        fewest: k^e, fewest experts of a module that a client gets.
        most: b, most experts of a module that a client gets.
        clients_per_expert: k^c, clients that every expert goes to.
    """

    fewest: int
    most: int
    clients_per_expert: int

    def require_feasible(self, clients: int, experts: int) -> None:
        """Raises ConfigError unless C k^e <= E k^c <= C b and k^c <= C.

        That suffices: d_ij = k^c / C then meets every constraint, and if the linear program
        is feasible, it has a binary solution.
        """
        per_expert, places = self.clients_per_expert, experts * self.clients_per_expert
        if per_expert > clients:
            raise ConfigError(
                f"method.clients_per_expert is {per_expert}, but the federation has {clients} client(s).",
                f"Set method.clients_per_expert from 1 to {clients}.",
            )
        if places < clients * self.fewest:
            needed = _fewest_clients_per_expert(self.fewest, clients, experts)
            remedy = (
                f"Set method.clients_per_expert to at least {needed} (or method.scale_clients_per_expert: true), or"
                if needed <= clients
                else "Set"
            )
            raise ConfigError(
                f"{experts} experts (method.experts) that go to {per_expert} clients each "
                f"(method.clients_per_expert) do not give {clients} clients {self.fewest} experts each "
                f"(method.active_experts): {experts} x {per_expert} is less than {clients} x {self.fewest}.",
                f"{remedy} method.experts to at least {math.ceil(clients * self.fewest / per_expert)}.",
            )
        if places > clients * self.most:
            raise ConfigError(
                f"{experts} experts (method.experts) that go to {per_expert} clients each "
                f"(method.clients_per_expert) do not fit {clients} clients that hold at most {self.most} experts "
                f"each (method.experts_per_client): {experts} x {per_expert} is more than {clients} x {self.most}.",
                f"Set method.experts_per_client to at least {math.ceil(places / clients)}, or method.experts to at "
                f"most {clients * self.most // per_expert}.",
            )

    def feasible_experts(self, clients: int, experts: int) -> int:
        """Returns the number of experts nearest to a wanted one for which `require_feasible` holds, if there is any."""
        least = math.ceil(clients * self.fewest / self.clients_per_expert)
        return max(least, min(experts, clients * self.most // self.clients_per_expert))

    def scaled(self, clients: int, experts: int) -> AssignmentRules:
        """Returns the rules with k^c raised just enough for every client to get k^e experts."""
        needed = _fewest_clients_per_expert(self.fewest, clients, experts)
        return replace(self, clients_per_expert=max(self.clients_per_expert, needed))


def selection_probability(relevance: Tensor) -> Tensor:
    """Returns P, the softmax of the relevance over the clients, in fp64 (Definition 4.1).

    Args:
        relevance: s [.., clients, experts].
    """
    return relevance.double().softmax(dim=-2)


def assign_experts(probability: Tensor, rules: AssignmentRules) -> Tensor:
    """Returns D, bool [modules, clients, experts], the assignment that maximises <P, D> in every module.

    Among tied assignments (up to a few 1e-9 below the optimum, see `TIE`) it is the one of the
    smallest <w, D>, where w is drawn once for every position in the matrix: a second linear program
    on the optimal face of the first. The result therefore depends neither on the solver's path nor on
    the other modules.

    Args:
        probability: P [modules, clients, experts].
        rules: k^e, b and k^c.

    Raises:
        ConfigError: no assignment satisfies the rules.
    """
    modules, clients, experts = probability.shape
    rules.require_feasible(clients, experts)
    count = modules * clients * experts
    per_client = _over_modules(modules, kron(eye_array(clients), np.ones((1, experts))))
    per_expert = _over_modules(modules, kron(np.ones((1, clients)), eye_array(experts)))
    bounds = np.repeat([[0.0, 1.0]], count, axis=0)
    at_most = vstack([per_client, -per_client], format="csc")
    limits = np.repeat([float(rules.most), -float(rules.fewest)], modules * clients)
    exact = np.full(modules * experts, float(rules.clients_per_expert))

    best = _solved(-probability.double().cpu().numpy().ravel(), at_most, limits, per_expert, exact, bounds)
    slope = best.lower.marginals + best.upper.marginals
    decided = np.abs(slope) > TIE
    bounds[decided] = np.round(best.x[decided])[:, None]
    binding = np.abs(best.ineqlin.marginals) > TIE
    face, at = vstack([per_expert, at_most[binding]], format="csc"), np.concatenate([exact, limits[binding]])

    preference = np.tile(np.random.default_rng(0).random(clients * experts), modules)
    chosen = _solved(preference, at_most, limits, face, at, bounds)
    return torch.from_numpy(chosen.x > 0.5).reshape(modules, clients, experts)


def _solved(
    costs: NDArray[Any], at_most: csc_array, limits: NDArray[Any], equal: csc_array, to: NDArray[Any], bounds: Any
) -> Any:
    """Returns HiGHS's solution of min <costs, x> under at_most x <= limits, equal x = to and the bounds."""
    solution = linprog(
        costs, A_ub=at_most, b_ub=limits, A_eq=equal, b_eq=to, bounds=bounds, method="highs-ds", options=_TOLERANCES
    )
    if not solution.success:
        raise RuntimeError(f"HiGHS found no expert assignment: {solution.message}")
    return solution


def _over_modules(modules: int, block: Any) -> csc_array:
    return csc_array(kron(eye_array(modules), block))


def _fewest_clients_per_expert(fewest: int, clients: int, experts: int) -> int:
    return math.ceil(clients * fewest / experts)
