"""Eight clients in one fused step against peft, and against our own steps, one client after the other.

Run: python benchmarks/cohort.py
Prints the ratios sequential / fused; the aim is at least 2.7 (hidden 256) and 10 (one OLMoE-size layer) over
sequential peft. Every client has one sequence of its own per step.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from models import LAYER, SMALL, TINY, Size, our_backbone, our_step, peft_step, rows
from timing import add_device, keep_freed_pages, machine, medians

RANK = 8
TARGETS = ("q_proj", "v_proj", "experts")
CLIENTS = 8


def main() -> None:
    """Measures the three sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    add_device(parser)
    given = parser.parse_args()
    repeats, where = given.repeats, (given.dtype, given.device)
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    measure("small (hidden 64), 32 tokens", SMALL, 2 * repeats, where)
    measure("tiny (hidden 256), 128 tokens", TINY, repeats, where)
    measure("one OLMoE-size layer, 128 tokens", LAYER, max(3, repeats // 2), where)


def measure(name: str, size: Size, repeats: int, where: tuple[torch.dtype, torch.device]) -> None:
    """Prints one size's ratios."""
    batches = [rows(size, 1, seed) for seed in range(CLIENTS)]
    backbone = our_backbone(size, *where)
    theirs = peft_step(size, batches[0], RANK, TARGETS, *where)
    fused, _ = our_step(backbone, batches, RANK, TARGETS)
    alone, _ = our_step(our_backbone(size, *where), batches[:1], RANK, TARGETS)

    def one_after_the_other(step: Callable[[], None]) -> Callable[[], None]:
        def steps() -> None:
            for _ in range(CLIENTS):
                step()

        return steps

    seconds = medians(
        {"fused": fused, "peft": one_after_the_other(theirs), "ours": one_after_the_other(alone)}, repeats=repeats
    )
    print(
        f"{name}: peft x {CLIENTS} {1e3 * seconds['peft']:.0f} ms, ours x {CLIENTS} {1e3 * seconds['ours']:.0f} ms, "
        f"fused {1e3 * seconds['fused']:.0f} ms; peft / fused {seconds['peft'] / seconds['fused']:.2f}, "
        f"ours / fused {seconds['ours'] / seconds['fused']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
