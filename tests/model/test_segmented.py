"""The segmented products in Triton's interpreter, against one product after the other in fp64, at awkward sizes."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor

segmented = pytest.importorskip("fedguild.model.kernels.segmented", reason="Triton is there for Linux only")
Segments, row_block = segmented.Segments, segmented.row_block
segmented_outer, segmented_rows = segmented.segmented_outer, segmented.segmented_rows

SIZES = {
    "ragged": (3, 0, 17, 1, 20, 0),
    "one row each": (1, 1, 1),
    "one group": (5,),
    "the last is empty": (0, 33, 0),
    "no rows": (0, 0),
}
TOLERANCES = {torch.float64: 1e-13, torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
CASES = pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(SIZES["ragged"], dtype) for dtype in TOLERANCES]
    + [(sizes, torch.float32) for name, sizes in SIZES.items() if name != "ragged"],
    ids=[*map(str, TOLERANCES), *(name for name in SIZES if name != "ragged")],
)


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def ends_of(sizes: tuple[int, ...]) -> Tensor:
    return torch.tensor(sizes).cumsum(0).to(torch.int32)


def assert_near(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    assert found.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    assert float((found.double() - expected).abs().max() if found.numel() else 0.0) <= TOLERANCES[dtype] * largest


def by_loop(rows: Tensor, matrices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = rows.double().split(list(sizes))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.double(), strict=True)])


@CASES
def test_rows_times_their_groups_matrix(sizes, dtype):
    """Scaled, and added to what is there; matrices stored either way round, rows and total parts of wider tensors."""
    n, groups, inner, outer, slots = sum(sizes), len(sizes), 20, 24, max(1, len(sizes) // 3)
    rows = normal(n, inner + 3, seed=1, dtype=dtype)[:, 2:-1]
    matrices = normal(groups, outer, inner, seed=2, dtype=dtype).transpose(1, 2)
    scale = normal(slots, outer, seed=3, dtype=dtype).abs() + 0.1
    wide = normal(n, outer + 5, seed=4, dtype=dtype)
    before = wide.double().clone()
    segments = Segments.of(ends_of(sizes), n, dtype)
    product = by_loop(rows, matrices, sizes)
    assert_near(segmented_rows(rows, [matrices], segments), product, dtype)
    out = segmented_rows(rows, [matrices], segments, total=wide[:, 5:], scale=scale)
    assert out.data_ptr() == wide[:, 5:].data_ptr()
    slot = (torch.arange(groups) % slots).repeat_interleave(torch.tensor(sizes))
    assert_near(wide[:, 5:], before[:, 5:] + scale.double()[slot] * product, dtype)
    assert torch.equal(wide[:, :5].double(), before[:, :5])


@DTYPES
def test_two_projections_at_once(dtype):
    """From common rows side by side, each from its own rows, and their sum."""
    sizes = SIZES["ragged"]
    n, groups, inner, outer = sum(sizes), len(sizes), 17, 18
    shared, both = normal(n, inner, seed=1, dtype=dtype), normal(n, 2 * inner, seed=2, dtype=dtype)
    first, second = (normal(groups, inner, outer, seed=seed, dtype=dtype) for seed in (3, 4))
    segments = Segments.of(ends_of(sizes), n, dtype)
    of_shared = [by_loop(shared, matrices, sizes) for matrices in (first, second)]
    own = [by_loop(part, m, sizes) for part, m in zip(both.chunk(2, dim=1), (first, second), strict=True)]
    assert_near(segmented_rows(shared, [first, second], segments), torch.cat(of_shared, dim=1), dtype)
    assert_near(segmented_rows(both, [first, second], segments), torch.cat(own, dim=1), dtype)
    assert_near(segmented_rows(both, [first, second], segments, summed=True), own[0] + own[1], dtype)


@CASES
def test_left_rows_transposed_times_right_rows(sizes, dtype):
    n = sum(sizes)
    left, right = normal(n, 40, seed=1, dtype=dtype)[:, 20:], normal(n, 18, seed=2, dtype=dtype)
    weight = normal(n, 1, seed=3, dtype=dtype)
    segments, exact = Segments.of(ends_of(sizes), n, dtype), torch.promote_types(dtype, torch.float32)
    bounds = list(pairwise([0, *ends_of(sizes).tolist()]))
    plain, weighted = (
        torch.stack([(factor * left.double())[start:end].t() @ right.double()[start:end] for start, end in bounds])
        for factor in (1.0, weight.double())
    )
    found = segmented_outer(left, right, segments)
    assert found.dtype is dtype
    assert_near(found, plain, dtype)
    precise = segmented_outer(left, right, segments, weight=weight, dtype=exact)
    assert precise.dtype is exact
    assert_near(precise, weighted, dtype)
    assert not found[torch.tensor(sizes) == 0].any()


@pytest.mark.filterwarnings("ignore:invalid value")
def test_rank_columns_with_scale_zero_are_masked():
    """Whatever is stored beyond a slot's rank, infinities included, adds nothing."""
    rows = normal(6, 8, seed=1, dtype=torch.float32)
    matrices = normal(2, 8, 4, seed=2, dtype=torch.float32)
    matrices[0, :, 2:] = float("inf")
    scale = torch.tensor([[2.0, 2.0, 0.0, 0.0], [3.0, 3.0, 3.0, 3.0]])
    low = segmented_rows(rows, [matrices], Segments.of(ends_of((4, 2)), 6, torch.float32), scale=scale)
    assert not low[:4, 2:].any()
    torch.testing.assert_close(low[4:], 3 * rows[4:] @ matrices[1])
    torch.testing.assert_close(low[:4, :2], 2 * rows[:4] @ matrices[0, :, :2])


def test_results_repeat_bit_for_bit():
    rows = normal(90, 33, seed=1, dtype=torch.float32)
    matrices = normal(3, 33, 20, seed=2, dtype=torch.float32)
    segments = Segments.of(ends_of((50, 1, 39)), 90, torch.float32)
    products = [segmented_rows(rows, [matrices], segments) for _ in range(2)]
    outers = [segmented_outer(products[0], rows, segments) for _ in range(2)]
    assert torch.equal(*products)
    assert torch.equal(*outers)


@pytest.mark.parametrize("sizes", [(0, 0, 5), (130, 1, 0, 64), (1,) * 7], ids=str)
def test_every_row_is_in_one_tile_of_its_group(sizes):
    segments = Segments.of(ends_of(sizes), sum(sizes), torch.bfloat16)
    tiles = [-(-size // segments.height) for size in sizes]
    expected = [group for group, count in enumerate(tiles) for _ in range(count)]
    found = segments.group_of_tile.tolist()
    assert found[: len(expected)] == expected
    assert set(found[len(expected) :]) <= {len(sizes)}


def test_tiles_are_as_high_as_groups_are_large():
    half, single, double = torch.bfloat16, torch.float32, torch.float64
    assert [row_block(rows, 10, half) for rows in (0, 100, 170, 330, 9000)] == [16, 16, 32, 64, 64]
    assert [row_block(9000, 10, dtype) for dtype in (half, single, double)] == [64, 32, 16]
