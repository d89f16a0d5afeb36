"""Counts of operations, FLOPs and bytes in a training step, ours and peft's.

Run: python benchmarks/traffic.py
The bytes are the sizes of what every operation reads and writes, as if nothing stayed in a cache; a view costs nothing.
The ratio of a machine, peft / ours, depends on which of them it is short of: with its measured speed and bandwidth the
script prints the ratio of a roofline, in which a step takes the time of its FLOPs and that of its bytes, beside the
ratio that it measures. Our kernels are switched off, since what Numba computes is no operation that could be counted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from typing import Any

import torch
from models import LAYER, SMALL, TINY, Size, our_backbone, our_step, peft_step, rows
from timing import add_device, bandwidth, keep_freed_pages, machine, medians, speed
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedguild.model.kernels import VARIABLE

RANK = 8
CLIENTS = 8


class Traffic(TorchDispatchMode):
    """Counts operations, their FLOPs, and the bytes of the tensors that they read and write.

    Attributes:
        operations: Operations other than views.
        flops: Of matrix products and attention, two for each multiplication and addition.
        read: Bytes read.
        written: Bytes written.
    """

    def __init__(self) -> None:
        super().__init__()
        self.operations = self.flops = self.read = self.written = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Counts one operation."""
        result = func(*args, **(kwargs or {}))
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        own = {tensor.untyped_storage().data_ptr() for tensor in given}
        if not func._schema.is_mutable and all(tensor.untyped_storage().data_ptr() in own for tensor in made):
            return result  # a view, or nothing but a number
        self.operations += 1
        self.read += sum(_bytes(tensor) for tensor in given)
        changed = [
            leaf
            for argument, value in zip(func._schema.arguments, args, strict=False)
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(value)
            if isinstance(leaf, torch.Tensor)
        ]
        self.written += sum(_bytes(tensor) for tensor in (changed or made))
        self.flops += _flops(str(func.overloadpacket), given, made)
        return result


def _bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of a tensor's elements; those of an expanded axis count once."""
    distinct = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    elements = 1
    for size in distinct:
        elements *= size
    return elements * tensor.element_size() if tensor.numel() else 0


def _flops(name: str, given: list[torch.Tensor], made: list[torch.Tensor]) -> int:
    """Returns the FLOPs of a product or of attention; 0 of anything else."""
    if "_grouped_mm" in name:  # rows [n, in] of groups; or [a, n] times [n, b], summed over the rows of a group
        left, right = given[0], given[1]
        return 2 * left.numel() * right.shape[-1]
    if name.endswith(("linear_pointwise", ".mm", ".addmm", ".addmm_", ".bmm", ".baddbmm", ".baddbmm_")):
        left, right = [tensor for tensor in given if tensor.dim() >= 2][-2:] if "add" in name else given[:2]
        outer = right.shape[0] if "linear" in name else right.shape[-1]
        return 2 * left.numel() * outer
    if "attention" in name:
        query, key = (given[1], given[2]) if "backward" in name else (given[0], given[1])
        return (5 if "backward" in name else 2) * 2 * query.numel() * key.shape[-2]
    return 0


def counted(step: Callable[[], None]) -> Traffic:
    """Returns what a step does, after one that allocates what is kept."""
    step()
    with Traffic() as traffic:
        step()
    return traffic


def main() -> None:
    """Counts and measures one client and eight, at three sizes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    add_device(parser)
    given = parser.parse_args()
    where = (given.dtype, given.device)
    os.environ[VARIABLE] = "none"
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    for name, size in (("hidden 64", SMALL), ("hidden 256", TINY), ("one OLMoE-size layer", LAYER)):
        for clients, targets in ((1, ("experts",)), (CLIENTS, ("q_proj", "v_proj", "experts"))):
            measure(
                f"{name}, {clients} client{'s' if clients > 1 else ''}", size, clients, targets, where, given.repeats
            )


def measure(
    name: str,
    size: Size,
    clients: int,
    targets: tuple[str, ...],
    where: tuple[torch.dtype, torch.device],
    repeats: int,
) -> None:
    """Prints one size's counts and ratios."""
    batches = [rows(size, 1, seed) for seed in range(clients)]
    ours, model = our_step(our_backbone(size, *where), batches, RANK, targets)
    theirs = peft_step(size, batches[0], RANK, targets, *where)

    def in_turn() -> None:
        for _ in range(clients):
            theirs()

    of = {"ours": counted(ours), "peft": counted(in_turn)}
    seconds = medians({"ours": ours, "peft": in_turn}, repeats=repeats)
    model.close()
    dtype, device = where
    moved = {side: traffic.read + traffic.written for side, traffic in of.items()}
    roofline = {side: of[side].flops / speed(device, dtype) + moved[side] / bandwidth(device) for side in of}
    for side, traffic in of.items():
        print(
            f"{name}, {side}: {traffic.operations:,} operations, {traffic.flops / 1e9:.2f} GFLOP, "
            f"{moved[side] / 1e6:,.0f} MB; {1e3 * seconds[side]:.0f} ms, roofline {1e3 * roofline[side]:.0f} ms"
        )
    print(
        f"{name}: peft / ours: FLOPs {of['peft'].flops / of['ours'].flops:.2f}, "
        f"bytes {moved['peft'] / moved['ours']:.2f}, roofline ratio {roofline['peft'] / roofline['ours']:.2f}, "
        f"measured ratio {seconds['peft'] / seconds['ours']:.2f}",
        flush=True,
    )


if __name__ == "__main__":
    main()
