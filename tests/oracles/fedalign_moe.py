"""FedAlign-MoE's Eq. 3-18, client by client, expert by expert, token by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def softmax(logits: Tensor) -> list[Tensor]:
    """One token's p over all experts, as scalars that carry gradients."""
    powers = [torch.exp(logits[e] - logits.max().detach()) for e in range(len(logits))]
    return [power / sum(powers) for power in powers]


def ranked(values: list[float], count: int) -> list[int]:
    """The `count` largest."""
    return sorted(range(len(values)), key=lambda e: values[e], reverse=True)[:count]


def routing_statistics(
    logits: Tensor, hidden: Tensor, real: list[bool], top_k: int
) -> tuple[list[float], list[float], list[list[float]]]:
    """Eq. 3, 5 and 12 over tokens: p-bar [M], m [M], mu [M][H].

    Where no token had e as its likeliest expert, mu is over the tokens with e in their top-k, else zero.
    """
    experts, width = logits.shape[1], hidden.shape[1]
    mean, margin = [0.0] * experts, [0.0] * experts
    likeliest: list[list[int]] = [[] for _ in range(experts)]
    active: list[list[int]] = [[] for _ in range(experts)]
    tokens = [token for token in range(len(logits)) if real[token]]
    for token in tokens:
        p = [float(value) for value in softmax(logits[token].double())]
        for e in range(experts):
            others = max(p[other] for other in range(experts) if other != e)
            mean[e] += p[e] / len(tokens)
            margin[e] += max(0.0, p[e] - others) / len(tokens)
        likeliest[ranked(p, 1)[0]].append(token)
        for e in ranked(p, top_k):
            active[e].append(token)
    regions = []
    for e in range(experts):
        members = likeliest[e] or active[e]
        region = [0.0] * width
        for token in members:
            for axis in range(width):
                region[axis] += float(hidden[token, axis]) / len(members)
        regions.append(region)
    return mean, margin, regions


def regulariser(
    layers: list[Tensor],
    real: list[bool],
    references: list[list[float]],
    alphas: list[list[float]],
    top_k: int,
    form: str,
) -> Tensor:
    """Eq. 10, the mean over one client's real tokens and over layers, of logits [N, M] of each layer."""
    total = torch.zeros((), dtype=layers[0].dtype)
    for logits, reference, alpha in zip(layers, references, alphas, strict=True):
        global_top = ranked(reference, top_k)
        layer = torch.zeros((), dtype=logits.dtype)
        for token in range(len(logits)):
            if not real[token]:
                continue
            p = softmax(logits[token])
            own_top = ranked([value.item() for value in p], top_k)
            for e in range(len(p)):
                if e not in own_top and e not in global_top:
                    continue
                term = p[e] * (safe_log(p[e]) - math.log(max(reference[e], 1e-8)))
                if form == "bernoulli":
                    rest = math.log(max(1 - reference[e], 1e-8))
                    term = term + (1 - p[e]) * (safe_log(1 - p[e]) - rest)
                if form == "generalised":
                    term = term - p[e] + reference[e]
                layer = layer + alpha[e] * term
        total = total + layer / max(1, sum(real))
    return total / len(layers)


def safe_log(p: Tensor) -> Tensor:
    return torch.log(p) if p.item() > 1e-8 else torch.log(torch.full_like(p, 1e-8))


def alpha(overlap: float, threshold: float, temperature: float = 1.0) -> float:
    """Eq. 9."""
    return sigmoid((overlap - threshold) / temperature)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def overlap(routing: list[list[float]], client: int, expert: int) -> float:
    """Eq. 4, over the clients' p-bar."""
    mean = sum(row[expert] for row in routing) / len(routing)
    return routing[client][expert] * mean


def consistency_weights(routing: list[list[float]], margins: list[list[float]]) -> list[list[float]]:
    """Eq. 6: omega[client][expert]; 1 / N where all s are zero."""
    clients, experts = len(routing), len(routing[0])
    omega = [[1 / clients] * experts for _ in range(clients)]
    for e in range(experts):
        scores = [overlap(routing, i, e) * margins[i][e] for i in range(clients)]
        if sum(scores) > 0:
            for i in range(clients):
                omega[i][e] = scores[i] / sum(scores)
    return omega


def reference(routing: list[list[float]], omega: list[list[float]]) -> list[float]:
    """Eq. 7, scaled to sum to one."""
    mixed = [sum(omega[i][e] * routing[i][e] for i in range(len(routing))) for e in range(len(routing[0]))]
    return [value / sum(mixed) for value in mixed]


def distance(routing: list[float], reference: list[float]) -> float:
    """KL(p-bar_i || p_g) of one client, in nats."""
    return math.fsum(p * math.log(p / g) for p, g in zip(routing, reference, strict=True) if p > 0)


def cosine(a: Tensor, b: Tensor) -> float:
    """Sim of Eq. 13; 0 where a norm is zero."""
    a, b = a.double().flatten(), b.double().flatten()
    norms = math.sqrt(float((a * a).sum())) * math.sqrt(float((b * b).sum()))
    return float((a * b).sum()) / norms if norms > 0 else 0.0


def threshold(regions: list[Tensor], tolerance: float) -> float:
    """Eq. 16 and 17."""
    pairs = [cosine(a, b) for a in regions for b in regions]
    mean = sum(pairs) / len(pairs)
    deviation = math.sqrt(sum((pair - mean) ** 2 for pair in pairs) / len(pairs))
    return mean - tolerance * deviation


def gamma(similarity: float, direction: float, tau: float, temperature: float = 1.0) -> float:
    """Eq. 18 (14)."""
    return sigmoid((similarity - tau) / temperature) * max(0.0, direction)


def aggregated(
    before: Tensor,
    updates: list[Tensor],
    regions: list[Tensor],
    *,
    tolerance: float = 1.0,
    fixed_threshold: float | None = None,
    directions: list[Tensor] | None = None,
    use_direction: bool = True,
    temperature: float = 1.0,
) -> Tensor:
    """Eq. 15 for one expert, over the clients that activated it.

    Args:
        before: The expert's parameters.
        updates: Each client's change of them.
        regions: Each client's mu.
        tolerance: beta.
        fixed_threshold: tau, where it is not adaptive.
        directions: What the cosines of Eq. 13 are taken of; the updates by default.
        use_direction: Whether D counts.
        temperature: Of the gate.
    """
    if not updates:
        return before
    tau = threshold(regions, tolerance) if fixed_threshold is None else fixed_threshold
    compared = updates if directions is None else directions
    rows = []
    for i in range(len(updates)):
        row = 0.0
        for j in range(len(updates)):
            direction = cosine(compared[i], compared[j]) if use_direction else 1.0
            row += gamma(cosine(regions[i], regions[j]), direction, tau, temperature)
        rows.append(row)
    result = before.clone().double()
    if sum(rows) > 0:
        for row, update in zip(rows, updates, strict=True):
            result += row / sum(rows) * update.double()
    return result
