"""The kernels of Adam, in Triton's interpreter and in Numba, against `torch.optim` slot by slot."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from fedguild.model.kernels.adam_updates import State, Update

BLOCK, CHUNK = 1024, 8
"""As in the kernel of a GPU."""
SHAPES = [((3, 2, 5, 4), 1), ((3, 2, 5, 3), 1), ((2, BLOCK * CHUNK + 3), 0), ((2, BLOCK + 8), 0), ((2,), 0)]
"""Of two slots, with the slot axis: of rows that fill 16 bytes and not, of two programs, of two blocks, and numbers."""
BETAS, EPS, DECAY = (0.8, 0.99), 1e-6, 0.1


@pytest.fixture(params=["adam", "cpu_adam"])
def adam_step(request):
    """Of the kernels for a GPU and for a CPU."""
    module = pytest.importorskip(f"fedguild.model.kernels.{request.param}", reason="Triton is there for Linux only")
    assert (getattr(module, "BLOCK", BLOCK), getattr(module, "CHUNK", CHUNK)) == (BLOCK, CHUNK)
    return module.adam_step


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 1e-6)], ids=str)
def test_three_steps_of_two_slots(adam_step, dtype, tolerance, decoupled):
    """One slot rests once; other experts are left out in each step; every other trainable decays."""
    rng = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=dtype)

    values = [normal(*shape) for shape, _ in SHAPES]
    moments = [[torch.zeros_like(value) for value in values] for _ in range(2)]
    kind = torch.optim.AdamW if decoupled else torch.optim.Adam
    leaves = [
        [value.select(axis, slot).clone() for value, (_, axis) in zip(values, SHAPES, strict=True)] for slot in (0, 1)
    ]
    alone = [
        [kind([leaf], betas=BETAS, eps=EPS, weight_decay=DECAY * (index % 2)) for index, leaf in enumerate(of_slot)]
        for of_slot in leaves
    ]
    counts = [0, 0]
    for step, rates in enumerate(([0.1, 0.02], [0.3, None], [0.05, 0.05])):
        grads = [normal(*shape) for shape, _ in SHAPES]
        masks = [(torch.rand(2, 3, generator=rng) < (0.6 if step else 2)).T if axis else None for _, axis in SHAPES]
        factor = torch.tensor([0.5, 1.0], dtype=torch.float64)
        counts = [count + (rate is not None) for count, rate in zip(counts, rates, strict=True)]
        tensors = zip(values, grads, *moments, SHAPES, masks, strict=True)
        updates = [
            Update(State(value, first, second, axis, index % 2 == 1), grad, mask)
            for index, (value, grad, first, second, (_, axis), mask) in enumerate(tensors)
        ]
        adam_step(updates, rates, counts, betas=BETAS, eps=EPS, decay=DECAY, decoupled=decoupled, factor=factor)
        for slot, rate in enumerate(rates):
            for leaf, optimizer, grad, mask, (_, axis) in zip(
                leaves[slot], alone[slot], grads, masks, SHAPES, strict=True
            ):
                if rate is None:
                    continue
                leaf.grad = grad.select(axis, slot) * factor[slot].to(dtype)
                changing = [leaf, *(optimizer.state[leaf].get(name) for name in ("exp_avg", "exp_avg_sq"))]
                before = [None if one is None else one.clone() for one in changing]
                optimizer.param_groups[0]["lr"] = rate
                optimizer.step()
                if mask is not None and before[1] is not None:
                    for one, old in zip(changing, before, strict=True):
                        one[~mask[:, slot]] = old[~mask[:, slot]]
    for slot in (0, 1):
        for leaf, optimizer, value, first, second, (_, axis) in zip(
            leaves[slot], alone[slot], values, *moments, SHAPES, strict=True
        ):
            state = optimizer.state[leaf]
            pairs = ((value, leaf), (first, state["exp_avg"]), (second, state["exp_avg_sq"]))
            for found, expected in pairs:
                torch.testing.assert_close(found.select(axis, slot), expected, rtol=tolerance, atol=tolerance)


COMPILE = """
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from fedguild.model.kernels.adam import BLOCK, CHUNK, COLUMNS, NUMBERS, _adam_kernel

names = _adam_kernel.arg_names
for width, name in ((tl.float32, "fp32"), (tl.float64, "fp64")):
    constants = dict(CLIPPED=True, DECOUPLED=True, ALIGNED=True, WIDTH=width, LANES=128 // width.primitive_bitwidth)
    constants |= dict(COLUMNS=COLUMNS, NUMBERS=NUMBERS, BLOCK=BLOCK, CHUNK=CHUNK)
    types = dict(of_tile_at="*i32", table_at="*i64", numbers_at="*fp64", factor_at="*fp64", slots="i32")
    types |= dict.fromkeys(constants, "constexpr")
    places = {(names.index(key),): value for key, value in constants.items()}
    source = ASTSource(_adam_kernel, signature={key: types[key] for key in names}, constexprs=places)
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    print(name, code.count("st.global"), sum("st.global" in line and ".v" in line for line in code.splitlines()))
"""


@pytest.mark.long
def test_it_compiles_for_hopper_and_stores_16_bytes_at_a_time():
    """Triton's compiler needs no GPU; the interpreter accepts what it refuses."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", COMPILE], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        name, stores, wide = line.split()
        assert int(stores) == int(wide) > 0, name
