"""The optimizer of a cohort out of step against the same cohort in step; the aim is at most 1.3 times.

Run: python benchmarks/optimizer.py
A step of AdamW over LoRA on attention, routers and experts in OLMoE-1B-7B's layout (64 experts a layer;
16 layers with smaller matrices, and 2 with its own), for 4 and 8 slots: all at one rate; one of them finished; all at
rates of their own. Prints both ratios, and the time in step against that by torch's fused kernel, where a kernel of
ours runs (FEDGUILD_KERNELS=none measures torch's alone); the largest of each last, and the time of clipping.
"""

from __future__ import annotations

import argparse

import torch
from timing import add_device, keep_freed_pages, machine, medians

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.model import kernels
from fedguild.model.adapters.storage import SlotTensor

EXPERTS, RANK = 64, 4
SIZES = {"small matrices": (16, 32, 16), "larger matrices": (16, 128, 64), "OLMoE's own, two layers": (2, 2048, 1024)}
"""Name -> the number of layers, and the model's and the experts' width."""


def trainables(slots: int, layers: int, hidden: int, width: int, device: torch.device) -> dict[str, SlotTensor]:
    """Returns the adapter's tensors with gradients, as `SlotModel` stores them."""
    rng = torch.Generator().manual_seed(0)
    tensors = {}

    def add(name: str, shape: tuple[int, ...], axis: int, swapped: bool = False) -> None:
        stored = torch.randn(shape, generator=rng).to(device).requires_grad_()
        stored.grad = torch.randn(shape, generator=rng).to(device)
        tensors[name] = SlotTensor(name, stored, axis, swapped, (shape[:axis] + shape[axis + 1 :],) * slots)

    for layer in range(layers):
        for module in ("q", "k", "v", "o"):
            add(f"{layer}.{module}.A", (slots, RANK, hidden), 0)
            add(f"{layer}.{module}.B", (slots, hidden, RANK), 0)
        add(f"{layer}.router.A", (slots, RANK, hidden), 0)
        add(f"{layer}.router.B", (slots, EXPERTS, RANK), 0)
        for module, inner, outer in (("gate", hidden, width), ("up", hidden, width), ("down", width, hidden)):
            add(f"{layer}.{module}.A", (EXPERTS, slots, RANK, inner), 1)
            add(f"{layer}.{module}.B", (EXPERTS, slots, RANK, outer), 1, swapped=True)
    return tensors


class ByTorch(SlotOptimizer):
    """Leaves every step to torch; setting FEDGUILD_KERNELS around each would be timed, too."""

    def _by_kernel(self) -> bool:
        return False


def measure(slots: int, name: str, device: torch.device) -> tuple[float, float, float]:
    """Prints one size's times and ratios; returns the ratios."""
    tensors = trainables(slots, *SIZES[name], device)
    settings = TrainingSettings(optimizer="adamw", weight_decay=0.0)
    rates: dict[str, list[float | None]] = {
        "in step": [1e-3] * slots,
        "one finished": [None, *[1e-3] * (slots - 1)],
        "rates unequal": [1e-3 / (slot + 1) for slot in range(slots)],
    }
    optimizers = {kind: SlotOptimizer(tensors, settings) for kind in rates}
    steps = {kind: lambda kind=kind: optimizers[kind].step(rates[kind]) for kind in rates}
    plain = ByTorch(tensors, settings)
    steps["by torch"] = lambda: plain.step(rates["in step"])
    steps["clip"] = lambda: optimizers["in step"].clip(1e9)
    seconds = medians(steps, repeats=15, warmup=2)
    finished, unequal = (seconds[kind] / seconds["in step"] for kind in ("one finished", "rates unequal"))
    against = seconds["in step"] / seconds["by torch"]
    elements = sum(trainable.stored.numel() for trainable in tensors.values())
    print(
        f"{slots} slots, {name} ({elements / 1e6:.1f} M elements): in step {1e3 * seconds['in step']:.1f} ms, "
        f"clip {1e3 * seconds['clip']:.1f} ms; one finished ratio {finished:.2f}, rates unequal ratio {unequal:.2f}; "
        f"against torch's fused kernel in step: ratio {against:.2f}",
        flush=True,
    )
    return finished, unequal, against


def main() -> None:
    """Measures 4 and 8 slots at three sizes."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    device = parser.parse_args().device
    keep_freed_pages()
    print(machine(device))
    print(f"the step is {'our kernel' if kernels.runs('optimizer', device) else 'torch'}'s")
    ratios = [measure(slots, name, device) for name in SIZES for slots in (4, 8)]
    finished, unequal, against = zip(*ratios, strict=True)
    print(f"one finished: largest ratio {max(finished):.2f}")
    print(f"rates unequal: largest ratio {max(unequal):.2f}")
    print(f"against torch's fused kernel in step: largest ratio {max(against):.2f}")


if __name__ == "__main__":
    main()
