"""The training step of a client with fewer active experts, at one OLMoE-size layer.

Run: python benchmarks/active_experts.py
Prints the ratio of the times to the step with 8 active experts, for 512 tokens; the aim for 1
active expert is at most 0.55.
"""

from __future__ import annotations

import argparse

from models import LAYER, our_backbone, our_step, rows
from timing import add_device, keep_freed_pages, machine, medians

RANK = 8
TARGETS = ("experts",)
TOKENS = 512


def main() -> None:
    """Measures 8, 4, 2 and 1 active experts, taking turns on a backbone each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    add_device(parser)
    given = parser.parse_args()
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    examples = [rows(LAYER, 1, seed=1, tokens=TOKENS)]
    steps = {}
    for active in (8, 4, 2, 1):
        steps[str(active)], _ = our_step(
            our_backbone(LAYER, given.dtype, given.device), examples, RANK, TARGETS, active
        )
    seconds = medians(steps, repeats=given.repeats)
    for active, value in seconds.items():
        print(f"{active} active experts: {1e3 * value:.0f} ms, {value / seconds['8']:.2f} of 8", flush=True)


if __name__ == "__main__":
    main()
