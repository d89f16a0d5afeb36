"""A training step on rows of unequal length, padded and packed.

Run: python benchmarks/packing.py
The lengths are log-normal like those of instructions (the median a tenth of the longest), for four clients. Prints the
ratio padded / packed with both ways of attending, and the tokens computed for each real one; the aim is at least 1.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace

import torch
from models import SMALL, TINY, Size, our_backbone, our_step
from timing import add_device, keep_freed_pages, machine, medians

from fedguild.data.batches import Encoded, collate
from fedguild.model import packed_rows

CLIENTS = 4
TARGETS = ("attention", "router", "experts")
WAYS: dict[str, tuple[str, ...]] = {"row by row": ("cpu", "cuda"), "padded within the attention": ()}
"""Name -> types of device on which rows attend one after the other."""


def main() -> None:
    """Measures each size and length."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    add_device(parser)
    given = parser.parse_args()
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    for name, size, longest, batch in (
        ("hidden 64, up to 32 tokens", SMALL, 32, 8),
        ("hidden 64, up to 128 tokens", SMALL, 128, 8),
        ("hidden 256, up to 128 tokens", TINY, 128, 4),
        ("hidden 256, up to 512 tokens", TINY, 512, 4),
        ("hidden 64, up to 1024 tokens", SMALL, 1024, 4),
        ("hidden 256, up to 128 tokens, one client of one row each", TINY, 128, 1),
    ):
        measure(name, size, longest, batch, given.repeats, (given.dtype, given.device))


def lengths(longest: int, batch: int, seed: int) -> list[int]:
    """Returns the tokens of a client's rows; the first client has one of the longest."""
    rng = torch.Generator().manual_seed(seed)
    drawn = (torch.randn(batch, generator=rng) * 0.9).exp() * longest / 10
    cut = drawn.round().clamp(3, longest).int().tolist()
    return [longest, *cut[1:]] if seed == 0 else cut


def measure(
    name: str, size: Size, longest: int, batch: int, repeats: int, where: tuple[torch.dtype, torch.device]
) -> None:
    """Prints one case's ratios."""
    rng = torch.Generator().manual_seed(1)

    def row(length: int) -> Encoded:
        return Encoded(tuple(torch.randint(2, size.vocabulary, (length,), generator=rng).tolist()), 1)

    batches = [[row(length) for length in lengths(longest, batch, client)] for client in range(CLIENTS)]
    backbone = our_backbone(replace(size, tokens=longest), *where)
    step, model = our_step(backbone, batches, 8, TARGETS)

    def way(packs: bool, devices: tuple[str, ...]) -> Callable[[], None]:
        def run() -> None:
            backbone.packs, packed_rows.ROW_BY_ROW = packs, devices
            step()

        return run

    steps = {"padded": way(False, ()), **{key: way(True, devices) for key, devices in WAYS.items()}}
    seconds = medians(steps, repeats=repeats)
    model.close()
    mask = collate(batches, 0).mask
    ratios = ", ".join(
        f"{key} {1e3 * seconds[key]:.0f} ms, ratio {seconds['padded'] / seconds[key]:.2f}" for key in WAYS
    )
    print(
        f"{name} (mean {int(mask.sum()) / mask.shape[0]:.0f}): {mask.numel() / int(mask.sum()):.2f} tokens for each "
        f"real one; padded {1e3 * seconds['padded']:.0f} ms, {ratios}",
        flush=True,
    )


if __name__ == "__main__":
    main()
