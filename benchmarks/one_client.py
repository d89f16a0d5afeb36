"""One client's expert-LoRA training step against peft's `target_parameters` on the same model.

Run: python benchmarks/one_client.py
Prints the ratio peft / ours; the aim is at least 1.65 (hidden 256) and 6.5 (one OLMoE-size layer).
"""

from __future__ import annotations

import argparse

import torch
from models import LAYER, SMALL, TINY, Size, our_backbone, our_step, peft_step, rows
from timing import add_device, keep_freed_pages, machine, medians

RANK = 8
TARGETS = ("experts",)


def main() -> None:
    """Measures the three sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=9)
    add_device(parser)
    given = parser.parse_args()
    repeats, where = given.repeats, (given.dtype, given.device)
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    for name, size, batch, turns in (
        ("small (hidden 64), batch 1", SMALL, 1, 3 * repeats),
        ("tiny (hidden 256), batch 1", TINY, 1, 2 * repeats),
        ("tiny (hidden 256), batch 8", TINY, 8, repeats),
        ("one OLMoE-size layer, 128 tokens", LAYER, 1, repeats),
    ):
        measure(name, size, batch, turns, where)


def measure(name: str, size: Size, batch: int, repeats: int, where: tuple[torch.dtype, torch.device]) -> None:
    """Prints one size's ratio."""
    examples = rows(size, batch, seed=1)
    backbone = our_backbone(size, *where)
    ours, model = our_step(backbone, [examples], RANK, TARGETS)
    theirs = peft_step(size, examples, RANK, TARGETS, *where)
    seconds = medians({"ours": ours, "peft": theirs}, repeats=repeats)
    model.close()
    print(
        f"{name}: peft {1e3 * seconds['peft']:.1f} ms, ours {1e3 * seconds['ours']:.1f} ms, "
        f"ratio {seconds['peft'] / seconds['ours']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
