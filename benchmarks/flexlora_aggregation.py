"""FlexLoRA's aggregation of one MoE layer of OLMoE-1B-7B: stacked factors against a dense SVD of the same sum.

Run: OMP_NUM_THREADS=1 python benchmarks/flexlora_aggregation.py
Eight clients of ranks 6, 8, 12 and 20; 64 experts, hidden size 2048, width 1024. Prints the seconds of
both, their ratio (the aim is at least 50) and the largest relative difference of the products truncated
to each rank, ours in fp32 against a dense SVD in fp64 (the aim is at most 1e-5). The dense side takes one
expert after the other and runs for a few of them only; for the whole layer its seconds are multiplied.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from timing import add_device, machine, medians
from torch import Tensor

from fedguild.core.seeding import torch_rng
from fedguild.server.low_rank import Factors, Svd, decompose, stack, truncate

EXPERTS, HIDDEN, WIDTH = 64, 2048, 1024
RANKS = (6, 8, 12, 20)
PROJECTIONS = {"gate_proj": (WIDTH, HIDDEN), "up_proj": (WIDTH, HIDDEN), "down_proj": (HIDDEN, WIDTH)}
ALPHA = 16.0

Clients = Sequence[tuple[Factors, float]]


def main() -> None:
    """Measures the three projections together."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dense-experts", type=int, default=1, help="experts that the dense side runs for")
    add_device(parser)
    options = parser.parse_args()
    where = options.device, options.dtype
    print(machine(*where))
    layer = {name: clients(name, *sizes, where) for name, sizes in PROJECTIONS.items()}
    part = {name: [(some(own, options.dense_experts), w) for own, w in sent] for name, sent in layer.items()}
    seconds = medians(
        {
            "factored, all": lambda: [factored(sent) for sent in layer.values()],
            "factored, some": lambda: [factored(sent) for sent in part.values()],
            "dense, some": lambda: [dense(sent) for sent in part.values()],
        },
        repeats=options.repeats,
    )
    whole = seconds["dense, some"] * EXPERTS / options.dense_experts
    print(f"stacked factors, {EXPERTS} experts: {seconds['factored, all']:.2f} s")
    print(
        f"dense SVD, {options.dense_experts} of {EXPERTS} experts: {seconds['dense, some']:.2f} s, scaled {whole:.0f} s"
    )
    print(f"ratio: {whole / seconds['factored, all']:.0f} for the layer, ", end="")
    print(f"{seconds['dense, some'] / seconds['factored, some']:.0f} for the same experts")
    print(f"largest relative difference of the truncated products: {max(map(difference, part.values())):.1e}")


def clients(
    name: str, outputs: int, inputs: int, where: tuple[torch.device, torch.dtype]
) -> list[tuple[Factors, float]]:
    """Returns two clients of each rank with normal factors of LoRA's sizes, and their weights p_c alpha / r_c.

    The factors are rounded to a dtype, and fp32 as the server has them.
    """
    ranks = RANKS * 2
    sent = []
    for index, rank in enumerate(ranks):
        rng = torch_rng(0, "factors", name, index)
        down = torch.randn(EXPERTS, rank, inputs, generator=rng) / inputs**0.5
        up = torch.randn(EXPERTS, outputs, rank, generator=rng) / 100
        sent.append((Factors(*(factor.to(*where).float() for factor in (down, up))), (1 + index) / 36 * ALPHA / rank))
    return sent


def some(factors: Factors, experts: int) -> Factors:
    """Returns the first experts of a layer."""
    return Factors(factors.down[:experts], factors.up[:experts])


def factored(sent: Clients) -> Svd:
    """Returns the decomposition of the weighted sum by its stacked factors."""
    return decompose(stack(sent))


def dense(sent: Clients) -> list[Svd]:
    """Returns each expert's decomposition of the weighted sum as a whole matrix."""
    total = sum(weight * (factors.up @ factors.down) for factors, weight in sent)
    assert isinstance(total, Tensor)
    return [Svd(*torch.linalg.svd(matrix, full_matrices=False)) for matrix in total]


def difference(sent: Clients) -> float:
    """Returns the largest ||X - Y|| / ||Y|| over experts and ranks, X ours in fp32 and Y the dense one in fp64."""
    ours = factored(sent)
    exact = dense([(Factors(factors.down.double(), factors.up.double()), weight) for factors, weight in sent])
    found = []
    for expert, theirs in enumerate(exact):
        own = Svd(ours.u[expert], ours.s[expert], ours.vh[expert])
        for rank in RANKS:
            x, y = (pair.up.double() @ pair.down.double() for pair in (truncate(own, rank), truncate(theirs, rank)))
            found.append(float(torch.linalg.vector_norm(x - y) / torch.linalg.vector_norm(y)))
    return max(found)


if __name__ == "__main__":
    main()
