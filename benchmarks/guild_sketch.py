"""Errors of the mean of the clients' products that two sketches give back, beside those of the mean of A and B apart.

    python benchmarks/guild_sketch.py

Eight clients change a LoRA of the English model's sizes. The singular values of each change of A and of B fall like
1 / j; a part of it (`--common`, in squares) is the same for all, the rest a client's own. A's change is a twentieth of
A, and in a later round that of B A about a third of B A, whose singular values fall like 1 / j; in the first B is 0.
Each line has the medians over the seeds of |found - mean| / |mean - B A|, for an expert's first layers, its last, and
attention. What is found has the rank `--rank` at most, and its sketches as many numbers as LoRA of that rank; the
clients' own rank is `--own`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from torch import Tensor

from fedguild.methods.guild_parts.sketch import Probes, sizes
from fedguild.seeding import torch_rng
from fedguild.server.low_rank import Factors, decompose, stack, truncate

SHAPES = ((64, 256), (256, 64), (256, 256))
"""Outputs and inputs: of an expert's first layers, of its last one, and of attention."""
SIZES = (1, 2, 3, 4, 1, 2, 3, 4)
"""The clients' relative numbers of examples."""
RATIOS = (1.0, 1.5, 2.0)
"""s2 / s1."""
NORM = 5.0


def falling(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    """Returns a matrix of norm 1 with singular values like 1 / j and random singular vectors."""
    values = 1 / torch.arange(1, min(rows, columns) + 1, dtype=torch.float64)
    left, right = (
        torch.linalg.qr(torch.randn(side, len(values), generator=rng, dtype=torch.float64)).Q
        for side in (rows, columns)
    )
    return (left * (values / values.norm())) @ right.mT


def clients(shape: tuple[int, int], rank: int, common: float, rng: torch.Generator, *, later: bool) -> list[Factors]:
    """Returns the LoRA that all received, and after it that of each client."""
    outputs, inputs = shape
    down = NORM * torch.linalg.qr(torch.randn(inputs, rank, generator=rng, dtype=torch.float64)).Q.mT
    up = falling(outputs, rank, rng) if later else torch.zeros(outputs, rank, dtype=torch.float64)
    together = falling(rank, inputs, rng), falling(outputs, rank, rng)
    found = [Factors(down, up)]
    for _ in SIZES:
        a, b = (
            common**0.5 * all_alike + (1 - common) ** 0.5 * falling(*all_alike.shape, rng) for all_alike in together
        )
        found.append(Factors(down + 0.05 * float(down.norm()) * a, up + 0.35 * b))
    return found


def errors(
    shape: tuple[int, int], options: argparse.Namespace, seed: int, *, later: bool
) -> Iterator[tuple[str, float]]:
    """Yields the name and the relative error of each way to the mean."""
    rng = torch_rng(seed, "guild sketch", *shape, int(later))
    before, *trained = clients(shape, options.own, options.common, rng, later=later)
    weights = [size / sum(SIZES) for size in SIZES]
    exact = stack(list(zip(trained, weights, strict=True)))
    base, mean = before.up @ before.down, exact.up @ exact.down
    down, up = (
        sum(weight * getattr(one, side) for one, weight in zip(trained, weights, strict=True))
        for side in ("down", "up")
    )

    def error(found: Factors) -> float:
        return float((found.up @ found.down - mean).norm() / (mean - base).norm())

    yield "A and B apart", error(Factors(down, up))
    yield "best of the rank", error(truncate(decompose(exact), options.rank))
    for ratio in RATIOS:
        probes = Probes.drawn(*shape, *sizes(*shape, options.rank, ratio), rng)
        for what, beside in (("product", []), ("change", [(before, 1.0)])):
            sketched = stack([(exact, 1.0), *((one, -weight) for one, weight in beside)])
            recovered = probes.recovered(probes.sketch(sketched), transposed=shape[0] < shape[1])
            yield (
                f"{what}, s2 / s1 = {ratio:g}",
                error(truncate(decompose(stack([(recovered, 1.0), *beside])), options.rank)),
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rank", type=int, default=20)
    parser.add_argument("--own", type=int, default=20)
    parser.add_argument("--common", type=float, default=0.5)
    parser.add_argument("--seeds", type=int, default=20)
    options = parser.parse_args()
    for later in (False, True):
        print("a later round" if later else "the first round")
        columns = [
            [dict(errors(shape, options, seed, later=later)) for seed in range(options.seeds)] for shape in SHAPES
        ]
        for name in columns[0][0]:
            shown = (f"{statistics.median(found[name] for found in column):8.3f}" for column in columns)
            print(f"{name:24}", *shown)


if __name__ == "__main__":
    main()
