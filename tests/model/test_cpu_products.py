"""The products of groups with large matrices on a CPU, against one product after the other in fp64."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.model.moe import products as ways
from tests.model.kernels import let_run

cpu_products = pytest.importorskip("fedguild.model.kernels.cpu_products", reason="Numba is an extra")
LANES, WIDTH, DEPTH, ROWS = cpu_products.LANES, cpu_products.WIDTH, cpu_products.DEPTH, cpu_products.ROWS

SIZES = {
    "ragged": (3, 0, 17, 1, 20, 0),
    "one row each": (1, 1, 1),
    "one group": (2 * ROWS + 5,),
    "the first and the last are empty": (0, 33, 0),
    "empty in between": (4, 0, 0, 0, 5, 0, 7),
    "none but empty": (0, 0),
}
CASES = pytest.mark.parametrize("sizes", [pytest.param(sizes, id=name) for name, sizes in SIZES.items()])
WIDTHS = pytest.mark.parametrize(
    ("inner", "outer"),
    [(LANES, LANES), (3 * LANES, 2 * WIDTH), (DEPTH + LANES, WIDTH), (2 * LANES, WIDTH + LANES)],
    ids=str,
)
TRANSPOSED = pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def matrices_of(groups: int, inner: int, outer: int, transposed: bool) -> Tensor:
    if transposed:
        return normal(groups, outer, inner, seed=2).transpose(1, 2)
    return normal(groups, inner, outer, seed=2)


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def by_loop(rows: Tensor, matrices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = rows.double().split(list(sizes))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.double(), strict=True)])


def assert_near(found: Tensor, expected: Tensor, inner: int) -> None:
    """Within a few roundings of sums of `inner` products of values around 1."""
    assert found.shape == expected.shape
    if found.numel():
        assert float((found.double() - expected).abs().max()) <= 1e-6 * inner**0.5 * 10


@CASES
@WIDTHS
@TRANSPOSED
def test_rows_times_their_groups_matrix(sizes, inner, outer, transposed):
    """Rows that are part of a wider tensor."""
    rows = normal(sum(sizes), inner + 3, seed=1)[:, 2:-1]
    matrices = matrices_of(len(sizes), inner, outer, transposed)
    assert_near(cpu_products.products(rows, matrices, ends_of(sizes)), by_loop(rows, matrices, sizes), inner)


@CASES
@WIDTHS
@TRANSPOSED
def test_products_are_added_in_place(sizes, inner, outer, transposed):
    """To a part of a wider tensor, whose other columns stay."""
    rows, matrices = normal(sum(sizes), inner, seed=1), matrices_of(len(sizes), inner, outer, transposed)
    wide = normal(sum(sizes), outer + 5, seed=3)
    before = wide.double().clone()
    cpu_products.products(rows, matrices, ends_of(sizes), wide[:, 5:])
    assert_near(wide[:, 5:], before[:, 5:] + by_loop(rows, matrices, sizes), inner)
    assert torch.equal(wide[:, :5].double(), before[:, :5])


def test_matrices_in_no_order_are_copied():
    sizes = SIZES["ragged"]
    rows, matrices = normal(sum(sizes), LANES, seed=1), normal(len(sizes), LANES, 2 * LANES, seed=2)[:, :, ::2]
    assert 1 not in matrices.stride()[1:]
    assert_near(cpu_products.products(rows, matrices, ends_of(sizes)), by_loop(rows, matrices, sizes), LANES)


def test_what_is_beside_a_group_is_not_read():
    """Not even to multiply it by zero: NaN stays where it is."""
    sizes = (5, 8, 3)
    rows, matrices = normal(16, 2 * LANES, seed=1), matrices_of(3, 2 * LANES, WIDTH, True).clone()
    rows[5:13], matrices[1] = torch.nan, torch.nan
    found = cpu_products.products(rows, matrices, ends_of(sizes))
    assert found[5:13].isnan().all()
    assert not found[:5].isnan().any()
    assert not found[13:].isnan().any()


@TRANSPOSED
def test_results_are_the_same_bits_on_any_number_of_threads(transposed, number_of_threads):
    sizes = (150, 0, 90, 200)
    rows, matrices = normal(sum(sizes), 5 * LANES, seed=1), matrices_of(4, 5 * LANES, 3 * WIDTH, transposed)
    found = cpu_products.products(rows, matrices, ends_of(sizes))
    torch.set_num_threads(1)
    assert torch.equal(found, cpu_products.products(rows, matrices, ends_of(sizes)))


@pytest.mark.parametrize("size", range(1, 2 * ROWS + 2))
def test_a_row_has_the_same_bits_alone_and_among_others(size):
    rows, matrices = normal(size, DEPTH + 2 * LANES, seed=1), matrices_of(1, DEPTH + 2 * LANES, WIDTH, True)
    together = cpu_products.products(rows, matrices, ends_of((size,)))
    alone = cpu_products.products(rows[-1:], matrices, ends_of((1,)))
    assert torch.equal(together[-1:], alone)


def test_both_layouts_give_the_same_bits():
    """The sums are taken in the same order."""
    sizes = SIZES["ragged"]
    rows, matrices = normal(sum(sizes), 3 * LANES, seed=1), matrices_of(len(sizes), 3 * LANES, WIDTH, True)
    found = [cpu_products.products(rows, one, ends_of(sizes)) for one in (matrices, matrices.contiguous())]
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("rows", "inner", "outer", "expected"),
    [
        (normal(3, LANES), LANES, WIDTH, True),
        (normal(3, LANES), LANES, LANES, True),
        (normal(3, LANES + 1), LANES + 1, WIDTH, False),
        (normal(3, LANES), LANES, WIDTH + 1, False),
        (normal(0, LANES), LANES, WIDTH, False),
        (normal(LANES, 3).t(), LANES, WIDTH, False),
    ],
)
def test_what_it_takes(rows, inner, outer, expected):
    assert cpu_products.takes(rows, inner, outer) is expected


@pytest.mark.parametrize("outer", [WIDTH, WIDTH + 1], ids=["ours", "torch's"])
def test_grouped_products_are_the_kernels_where_it_takes_them(outer, monkeypatch):
    """Others are torch's; where there is a total, either is added to it."""
    let_run(monkeypatch, {"grouped"}, language="numba")
    ran = []
    run = cpu_products.products
    monkeypatch.setattr(cpu_products, "products", lambda *args: ran.append(1) or run(*args))
    sizes = SIZES["ragged"]
    rows, matrices = normal(sum(sizes), LANES, seed=1), matrices_of(len(sizes), LANES, outer, True)
    expected = by_loop(rows, matrices, sizes)
    assert_near(ways.grouped_rows(rows, matrices, ends_of(sizes)), expected, LANES)
    total = normal(sum(sizes), outer, seed=3)
    with_total = total.double() + expected
    ways.add_grouped_rows(total, rows, matrices, ends_of(sizes))
    assert_near(total, with_total, LANES)
    assert len(ran) == (2 if outer == WIDTH else 0)
    exact = ways.grouped_rows(rows.double(), matrices.double(), ends_of(sizes))
    assert torch.allclose(exact, expected, rtol=1e-14, atol=1e-13)
    ways.grouped_rows(rows.bfloat16(), matrices.bfloat16(), ends_of(sizes))
    assert len(ran) == (2 if outer == WIDTH else 0)


@pytest.mark.parametrize(
    ("features", "lanes", "vectors"),
    [
        ({"avx512f": True, "avx2": True}, 16, 4),
        ({"avx512f": False, "avx2": True}, 8, 2),
        ({"neon": True}, 4, 4),
        ({}, 4, 2),
        (None, 4, 2),
    ],
    ids=["AVX-512", "AVX2", "NEON", "another", "unknown"],
)
def test_the_registers_are_those_of_the_cpu(features, lanes, vectors, monkeypatch):
    def known():
        if features is None:
            raise RuntimeError("failed to get host cpu features")
        return features

    monkeypatch.setattr(cpu_products.llvmlite.binding, "get_host_cpu_features", known)
    assert cpu_products._registers() == (lanes, vectors)


@pytest.mark.long
@pytest.mark.processes
@pytest.mark.parametrize("feature", ["avx2", "neon", "sse2"])
def test_the_kernel_of_other_cpus(feature, tmp_path):
    """This file's tests, with the registers of another CPU: LLVM splits or widens them for this one."""
    script = (
        "import llvmlite.binding as binding, pytest, sys\n"
        f"binding.get_host_cpu_features = lambda: binding.targets.FeatureMap({feature}=True)\n"
        f"sys.exit(pytest.main([{str(Path(__file__))!r}, '-m', 'not long', '-k', 'not registers']))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
