"""Grouped products: ours against torch's `grouped_mm`, at sizes of a training step.

Run: python benchmarks/grouped_products.py
Prints the ratio grouped_mm / ours; docs/decisions/0004 explains it.
"""

from __future__ import annotations

import argparse

import torch
from timing import add_device, keep_freed_pages, machine, medians

from fedguild.model.moe.products import grouped_rows

REHEARSED = (("small", 4, 32, 16, 16),)
CASES = (
    ("one OLMoE-size layer, 128 tokens", 64, 1024, 2048, 2048),
    ("one OLMoE-size layer, 8 x 128 tokens", 64, 8192, 2048, 2048),
    ("hidden 256, 8 x 128 tokens", 16, 8192, 256, 256),
    ("hidden 256, 128 tokens", 16, 1024, 256, 256),
)


def main() -> None:
    """Measures each case with groups of uneven size."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    given = parser.parse_args()
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    for name, groups, rows, inner, outer in REHEARSED if given.small else CASES:
        measure(name, groups, rows, inner, outer, given.device, given.dtype)


def measure(
    name: str, groups: int, rows: int, inner: int, outer: int, device: torch.device, dtype: torch.dtype
) -> None:
    """Prints one case's ratio."""
    rng = torch.Generator().manual_seed(0)
    left = torch.randn(rows, inner, generator=rng).to(device, dtype)
    right = torch.randn(groups, outer, inner, generator=rng).to(device, dtype).transpose(1, 2)
    share = torch.softmax(0.5 * torch.randn(groups, generator=rng), 0)
    ends = (share.cumsum(0) * rows).round().to(torch.int32)
    ends[-1] = rows
    ends = ends.to(device)
    seconds = medians(
        {
            "ours": lambda: grouped_rows(left, right, ends),
            "torch": lambda: torch.nn.functional.grouped_mm(left, right, offs=ends),
        },
        repeats=9,
    )
    print(
        f"{name}: grouped_mm {1e3 * seconds['torch']:.2f} ms, ours {1e3 * seconds['ours']:.2f} ms, "
        f"ratio {seconds['torch'] / seconds['ours']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
