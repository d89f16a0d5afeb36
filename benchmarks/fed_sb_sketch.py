"""Fed-SB's start from sketches against its exact start: the cosine of B R A, by width and spectrum of the gradient.

    python benchmarks/fed_sb_sketch.py --widths 1024 2048

The gradient is U diag(i^-p) V^T with random orthonormal U and V, so that p says how fast its singular values fall; the
sketch is that of the method's defaults, of twice the rank of the adapter. Prints one line for each width and p.
"""

from __future__ import annotations

import argparse

import torch
from timing import add_device, machine
from torch import Tensor

from fedguild.core.seeding import torch_rng
from fedguild.methods.fed_sb import FedSBSettings, initial_factors
from fedguild.methods.fed_sb.singular_vectors import random_orthonormal
from fedguild.methods.fed_sb.sketch import probes, rebuilt
from fedguild.model.adapters.lora import DOWN, UP

POWERS = (0.5, 1.0, 1.5)


def gradient(width: int, power: float, seed: int, where: tuple[torch.device, torch.dtype]) -> Tensor:
    """Returns [width, width] with the singular values i^-power, rounded to a dtype, in fp32."""
    rng = torch_rng(seed, "gradient", width)
    left, right = (random_orthonormal((width, width), rng) for _ in range(2))
    values = torch.arange(1, width + 1, dtype=torch.float32) ** -power
    return ((left * values) @ right.mT).to(*where).float()


def cosine(exact: Tensor, rank: int, size: int, seed: int) -> float:
    """Returns the cosine of the start B R A from a gradient's sketch of rank `size` to that from the gradient."""
    omega, psi = (probe.to(exact) for probe in probes(seed, "one", *exact.shape, size))
    sketched = dict(rebuilt({f"one.{UP}": exact @ omega, f"one.{DOWN}": psi @ exact}, seed))["one"]
    starts = []
    for value in (exact, sketched):
        up, middle, down = initial_factors(value, rank, 1.0, torch_rng(seed, "start"))
        starts.append((up @ middle @ down).flatten().double())
    return float(torch.nn.functional.cosine_similarity(*starts, dim=0))


def main() -> None:
    defaults = FedSBSettings()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[1024, 2048])
    parser.add_argument("--rank", type=int, default=defaults.rank)
    parser.add_argument("--sketch", type=int, default=None, help="by default twice the rank")
    parser.add_argument("--seeds", type=int, default=1)
    add_device(parser)
    arguments = parser.parse_args()
    where = arguments.device, arguments.dtype
    print(machine(*where))
    size = arguments.sketch or 2 * arguments.rank
    for width in arguments.widths:
        for power in POWERS:
            found = [
                cosine(gradient(width, power, seed, where), arguments.rank, size, seed)
                for seed in range(arguments.seeds)
            ]
            shown = ", ".join(f"{value:.3f}" for value in found)
            print(f"width {width}, singular values i^-{power}, rank {arguments.rank}, sketch {size}: cosine {shown}")


if __name__ == "__main__":
    main()
