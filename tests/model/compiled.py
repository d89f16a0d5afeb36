"""Our kernels compiled for GPUs; a program, for the interpreter is chosen when Triton is imported: CAPABILITY CASE...

Prints a line of JSON for each case: its name, the bytes of machine code and of shared memory, and whether it uses
tensor cores; or its error.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fedguild.model.adapters import dropout

TYPES = {
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.float32: "*fp32",
    torch.float64: "*fp64",
    torch.int64: "*i64",
    torch.int32: "*i32",
    torch.uint8: "*u8",
}
ENDS = torch.tensor([3, 3, 40, 64], dtype=torch.int32)


def source(kernel: Any, args: tuple[Any, ...], constants: dict[str, Any]) -> Any:
    """Returns a launch as Triton specialises it: an integer of 1 is a constant, and multiples of 16 are known."""
    from triton.compiler import ASTSource

    types: dict[str, str] = {}
    known: dict[str, Any] = {}
    attributes: dict[tuple[int, ...], list[list[Any]]] = {}
    for place, (name, value) in enumerate(zip(kernel.arg_names, (*args, *constants.values()), strict=True)):
        if name in constants:
            types[name], known[name] = "constexpr", constants[name]
        elif isinstance(value, Tensor):
            types[name] = TYPES[value.dtype]
            attributes[place,] = [["tt.divisibility", 16]]
        elif value == 1:
            types[name], known[name] = "constexpr", 1
        else:
            types[name] = "i32"
            if value % 16 == 0:
                attributes[place,] = [["tt.divisibility", 16]]
    return ASTSource(kernel, types, known, attributes)


def rows(
    dtype: torch.dtype, *, adds: bool, scaled: bool, summed: bool, height: int = 64
) -> Callable[[ModuleType], object]:
    """A product of rows with two projections, [64, 48] -> 2 x 80 columns, or their sum."""

    def call(module: ModuleType) -> object:
        segments = module.Segments.of(ENDS, 64, dtype)
        matrices = [torch.zeros(4, 48, 80, dtype=dtype)] * 2
        total = torch.zeros(64, 80 if summed else 160, dtype=dtype) if adds else None
        scale = torch.zeros(2, 80) if scaled else None
        given = torch.zeros(64, 96 if summed else 48, dtype=dtype)
        return module.segmented_rows(given, matrices, segments, total=total, scale=scale, summed=summed)

    return call


def outer(dtype: torch.dtype, *, weighted: bool) -> Callable[[ModuleType], object]:
    """Each group's left rows [n, 24] transposed times its right ones [n, 2048]; the result in fp32 for a half dtype."""

    def call(module: ModuleType) -> object:
        segments = module.Segments.of(ENDS, 64, dtype)
        weight = torch.zeros(64, 1, dtype=dtype) if weighted else None
        left, right = torch.zeros(64, 24, dtype=dtype), torch.zeros(64, 2048, dtype=dtype)
        return module.segmented_outer(
            left, right, segments, weight=weight, dtype=torch.promote_types(dtype, torch.float32)
        )

    return call


def entropy(dtype: torch.dtype, *, smoothing: float, gradients: bool) -> Callable[[ModuleType], object]:
    def call(module: ModuleType) -> object:
        logits = torch.zeros(2, 50304, dtype=dtype)
        return module.losses_and_gradients(logits, torch.zeros(2, dtype=torch.int64), smoothing, gradients=gradients)

    return call


def mask(module: ModuleType) -> object:
    keys, least = torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32)
    return module.kept_elements(keys, least, 2048, dropout.GAMMA, dropout.MULTIPLIERS, dropout.SHIFTS)


BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
CASES: dict[str, tuple[str, Callable[[ModuleType], object]]] = {
    "rows added, scaled, bf16": ("segmented", rows(BF16, adds=True, scaled=True, summed=False)),
    "rows of two projections summed, bf16": ("segmented", rows(BF16, adds=True, scaled=False, summed=True)),
    "frozen rows, bf16": ("segmented", rows(BF16, adds=False, scaled=False, summed=False)),
    "rows added, scaled, fp16": ("segmented", rows(FP16, adds=True, scaled=True, summed=False)),
    "rows added, scaled, fp32": ("segmented", rows(FP32, adds=True, scaled=True, summed=False)),
    "rows added, scaled, fp64": ("segmented", rows(FP64, adds=True, scaled=True, summed=False)),
    "outer, weighted, bf16": ("segmented", outer(BF16, weighted=True)),
    "outer, fp16": ("segmented", outer(FP16, weighted=False)),
    "outer, weighted, fp32": ("segmented", outer(FP32, weighted=True)),
    "outer, fp64": ("segmented", outer(FP64, weighted=False)),
    "cross-entropy with gradients, bf16": ("cross_entropy", entropy(BF16, smoothing=0.0, gradients=True)),
    "cross-entropy smoothed, fp32": ("cross_entropy", entropy(FP32, smoothing=0.1, gradients=True)),
    "cross-entropy alone, fp64": ("cross_entropy", entropy(FP64, smoothing=0.0, gradients=False)),
    "dropout's mask": ("dropout", mask),
}


def compiled(name: str, capability: int) -> dict[str, Any]:
    """Returns what a case's launch compiles to."""
    import triton
    from triton.backends.compiler import GPUTarget

    kept: list[Any] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool, **constants: Any) -> None:
        kept.append(triton.compile(source(self, args, constants), target=GPUTarget("cuda", capability, 32)))

    module, call = CASES[name]
    triton.JITFunction.run, before = run, triton.JITFunction.run
    try:
        call(importlib.import_module(f"fedguild.model.kernels.{module}"))
    except Exception as error:
        return {"name": name, "error": f"{type(error).__name__}: {error}"[:2000]}
    finally:
        triton.JITFunction.run = before
    (found,) = kept
    return {
        "name": name,
        "code_bytes": len(found.asm["cubin"]),
        "shared_bytes": found.metadata.shared,
        "tensor_cores": "mma" in found.asm["ptx"],
    }


if __name__ == "__main__":
    for case in sys.argv[2:] or CASES:
        print(json.dumps(compiled(case, int(sys.argv[1]))), flush=True)
