"""The products of groups on a CPU, in Numba, against one product after the other in fp64, at awkward sizes."""

from __future__ import annotations

import ctypes
from functools import partial
from itertools import pairwise

import numba
import pytest
import torch
from torch import Tensor

from fedguild.model.kernels import cpu_groups, threads

Groups, LowRankProduct = cpu_groups.Groups, cpu_groups.LowRankProduct
LANES, WIDTH, DEPTH, ROWS = cpu_groups.LANES, cpu_groups.WIDTH, cpu_groups.DEPTH, cpu_groups.ROWS

SIZES = {
    "ragged": (3, 0, 17, 1, 20, 0),
    "one row each": (1, 1, 1),
    "one group": (5,),
    "the first and the last are empty": (0, 33, 0),
    "no rows": (0, 0),
    "empty in between": (4, 0, 0, 0, 5, 0, 7),
    "more rows than a piece": (150, 0, 90, 200),
}
CASES = pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES.keys())
WIDTHS = pytest.mark.parametrize(
    ("inner", "outer"),
    [(20, 24), (17, 5), (1, 3), (3, 1), (64, 8), (2 * LANES, WIDTH + LANES), (80, 2 * WIDTH)],
    ids=str,
)


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups_of(sizes: tuple[int, ...]) -> Groups:
    return Groups(torch.tensor(sizes).cumsum(0).to(torch.int32))


def assert_near(found: Tensor, expected: Tensor, inner: int = 256) -> None:
    """Within 1e-6 of the largest value; the rounding of longer sums grows with the root of their length."""
    assert found.shape == expected.shape
    largest = float(expected.abs().max()) if expected.numel() else 1.0
    assert (
        float((found.double() - expected).abs().max() if found.numel() else 0.0)
        <= 1e-6 * largest * max(1.0, inner / 256) ** 0.5
    )


def by_loop(rows: Tensor, matrices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    parts = rows.double().split(list(sizes))
    return torch.cat([part @ matrix for part, matrix in zip(parts, matrices.double(), strict=True)])


@CASES
@WIDTHS
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_times_their_groups_matrix(sizes, inner, outer, transposed):
    """Matrices stored either way round; rows that are part of a wider tensor."""
    rows = normal(sum(sizes), inner + 3, seed=1)[:, 2:-1]
    stored = normal(len(sizes), *((outer, inner) if transposed else (inner, outer)), seed=2)
    matrices = stored.transpose(1, 2) if transposed else stored
    assert_near(groups_of(sizes).rows(rows, [matrices]), by_loop(rows, matrices, sizes))


@CASES
@pytest.mark.parametrize("transposed", [False, True])
def test_rows_that_are_not_gathered_first(sizes, transposed):
    """Of tokens that are part of a wider tensor, some more than once."""
    tokens = normal(11, DEPTH + 20, seed=1)[:, 3:-2]
    places = torch.randint(0, 11, (sum(sizes),), generator=torch.Generator().manual_seed(2))
    inner, outer = tokens.shape[1], WIDTH + 3
    stored = normal(len(sizes), *((outer, inner) if transposed else (inner, outer)), seed=3)
    matrices = stored.transpose(1, 2) if transposed else stored
    groups, rows = groups_of(sizes), tokens[places]
    found = groups.gathered(tokens, places, matrices)
    assert_near(found, by_loop(rows, matrices, sizes), inner)
    assert torch.equal(found, groups.rows(rows, [matrices]))


@CASES
@WIDTHS
def test_products_are_added_in_place(sizes, inner, outer):
    """To a part of a wider tensor, whose other columns stay."""
    rows, matrices = normal(sum(sizes), inner, seed=1), normal(len(sizes), inner, outer, seed=2)
    wide = normal(sum(sizes), outer + 5, seed=3)
    before = wide.double().clone()
    groups_of(sizes).add(wide[:, 5:], rows, [matrices])
    assert_near(wide[:, 5:], before[:, 5:] + by_loop(rows, matrices, sizes))
    assert torch.equal(wide[:, :5].double(), before[:, :5])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("outer", [WIDTH, WIDTH + 5, LANES], ids=str)
def test_sums_are_taken_up_again_for_the_next_panel(outer, transposed):
    sizes, inner = (2 * ROWS + 5, 0, 3), 2 * DEPTH + LANES + 3
    rows = normal(sum(sizes), inner, seed=1)
    stored = normal(len(sizes), *((outer, inner) if transposed else (inner, outer)), seed=2)
    matrices = stored.transpose(1, 2) if transposed else stored
    assert_near(groups_of(sizes).rows(rows, [matrices]), by_loop(rows, matrices, sizes), inner)


def test_matrices_without_a_side_of_adjacent_values_are_copied():
    sizes = SIZES["ragged"]
    rows, matrices = normal(sum(sizes), LANES, seed=1), normal(len(sizes), LANES, 2 * LANES, seed=2)[:, :, ::2]
    assert 1 not in matrices.stride()[1:]
    assert_near(groups_of(sizes).rows(rows, [matrices]), by_loop(rows, matrices, sizes))


def test_what_is_beside_a_group_is_not_read():
    """Not even to multiply it by zero: NaN stays where it is."""
    sizes = (5, 8, 3)
    rows, matrices = normal(16, 33, seed=1), normal(3, 70, 33, seed=2)
    rows[5:13], matrices[1] = torch.nan, torch.nan
    found = groups_of(sizes).rows(rows, [matrices.transpose(1, 2)])
    assert found[5:13].isnan().all()
    assert not found[:5].isnan().any()
    assert not found[13:].isnan().any()


@pytest.mark.parametrize("size", [1, ROWS, 2 * ROWS + 1])
def test_a_matrix_gives_the_same_bits_either_way_round(size):
    """The sums are taken in the same order, wherever a row stands."""
    rows, matrices = normal(size, DEPTH + 40, seed=1), normal(1, DEPTH + 40, WIDTH, seed=2)
    turned = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    found = groups_of((size,)).rows(rows, [matrices])
    assert torch.equal(found, groups_of((size,)).rows(rows, [turned]))
    assert torch.equal(found[-1:], groups_of((1,)).rows(rows[-1:], [turned]))


@pytest.mark.parametrize("sizes", [(3, 0, 17, 1, 20, 0), (0, 0, 0, 0, 0, 5), (9, 9, 0, 0, 70, 1)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(
    ("inner", "outer", "rank", "summed"),
    [(40, 2 * WIDTH, 5, False), (40, 2 * WIDTH, 5, True), (DEPTH + 7, 2 * LANES, 20, False), (33, 37, 3, True)],
)
def test_low_rank_products_beside_a_frozen_one(sizes, transposed, inner, outer, rank, summed):
    """Three experts of two slots each; one projection as well as two."""
    groups, experts = groups_of(sizes), torch.tensor(sizes).cumsum(0)[1::2].to(torch.int32)
    merged = tuple(torch.tensor(sizes).view(3, 2).sum(dim=1).tolist())
    rows = normal(sum(sizes), inner, seed=1)
    stored = normal(3, *((outer, inner) if transposed else (inner, outer)), seed=2)
    frozen = stored.transpose(1, 2) if transposed else stored
    for projections in (1, 2):
        each = outer if summed else outer // projections
        low = normal(sum(sizes), projections * rank + 2, seed=3)[:, 1:-1]
        ups = [normal(6, rank, each, seed=seed) for seed in range(4, 4 + projections)]
        product = LowRankProduct(low, ups, summed=summed)
        width = LANES * min(cpu_groups.VECTORS, -(-outer // LANES))
        assert product.suits(outer) is (summed or projections == 1 or each % width == 0)
        if not product.suits(outer):
            continue
        parts = [by_loop(part, up, sizes) for part, up in zip(low.chunk(projections, dim=1), ups, strict=True)]
        expected = by_loop(rows, frozen, merged) + (sum(parts) if summed else torch.cat(parts, dim=1))
        found = groups.add_to_frozen(rows, frozen, experts, product)
        assert_near(found, expected, inner)
        if summed and projections == 2:
            first = LowRankProduct(low[:, :rank], ups[:1], summed=True)
            apart = groups.add_to_frozen(rows, frozen, experts, first)
            assert not torch.equal(found, apart)


def test_two_projections_at_once():
    """From common rows side by side, each from its own rows, and their sum."""
    sizes = SIZES["ragged"]
    groups, n, inner, outer = groups_of(sizes), sum(sizes), 17, 18
    shared, both = normal(n, inner, seed=1), normal(n, 2 * inner, seed=2)
    pair = [normal(len(sizes), inner, outer, seed=seed) for seed in (3, 4)]
    own = [by_loop(part, matrices, sizes) for part, matrices in zip(both.chunk(2, dim=1), pair, strict=True)]
    of_shared = torch.cat([by_loop(shared, matrices, sizes) for matrices in pair], dim=1)
    turned = [matrices.transpose(1, 2).contiguous().transpose(1, 2) for matrices in pair]
    for matrices in (pair, turned):
        assert_near(groups.rows(shared, matrices), of_shared)
        assert_near(groups.rows(both, matrices), torch.cat(own, dim=1))
    total, side_by_side = torch.zeros(n, outer), torch.zeros(n, 2 * outer)
    groups.add(total, both, pair, summed=True)
    groups.add(side_by_side, both, pair)
    assert_near(total, own[0] + own[1])
    assert_near(side_by_side, torch.cat(own, dim=1))


@CASES
@WIDTHS
def test_left_rows_transposed_times_right_rows(sizes, inner, outer):
    left, right = normal(sum(sizes), inner + 7, seed=1)[:, 7:], normal(sum(sizes), outer, seed=2)
    bounds = pairwise([0, *torch.tensor(sizes).cumsum(0).tolist()])
    found = groups_of(sizes).outer(left, right)
    expected = torch.stack([left[start:end].double().t() @ right[start:end].double() for start, end in bounds])
    assert_near(found, expected)
    assert not found[torch.tensor(sizes) == 0].any()


def all_products(rows: Tensor, down: Tensor, up: Tensor, sizes: tuple[int, ...]) -> list[Tensor]:
    groups = groups_of(sizes)
    low = groups.rows(rows, [down.transpose(1, 2)])
    total = rows.clone()
    groups.add(total, low, [up])
    return [low, total, groups.outer(low, rows)]


def test_low_rank_rows_with_other_strides_are_copied():
    """And kept until the kernel has run."""
    low, up, rows, frozen = (
        normal(8, 50, seed=1).t(),
        normal(1, 8, 16, seed=2),
        torch.zeros(50, 16),
        torch.zeros(1, 16, 16),
    )
    groups = groups_of((50,))
    found = groups.add_to_frozen(rows, frozen, groups.ends, LowRankProduct(low, [up]))
    assert_near(found, by_loop(low, up, (50,)))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_sum_of_nothing_is_zero(transposed):
    nothing = torch.zeros(2, 20, 0).transpose(1, 2) if transposed else torch.zeros(2, 0, 20)
    groups, total = groups_of((3, 4)), torch.ones(7, 20)
    assert not groups.rows(torch.zeros(7, 0), [nothing]).any()
    assert not groups.rows(torch.zeros(7, 0), [nothing, nothing]).any()
    groups.add(total, torch.zeros(7, 0), [nothing])
    assert (total == 1).all()
    assert groups.rows(torch.zeros(7, 5), [torch.zeros(2, 5, 0)]).shape == (7, 0)
    assert groups.outer(torch.zeros(7, 0), torch.zeros(7, 5)).shape == (2, 0, 5)


ENDS = torch.tensor([3, 7], dtype=torch.int32)
ROWS_OF, MATRICES = torch.ones(7, 5), torch.ones(2, 5, 20)


@pytest.mark.parametrize(
    "call",
    [
        lambda: Groups(ENDS.long()),
        lambda: Groups(torch.tensor([[3, 0], [7, 0]], dtype=torch.int32)[:, 0]),
        lambda: Groups(ENDS).rows(ROWS_OF, [torch.ones(2, 6, 20)]),
        lambda: Groups(ENDS).rows(ROWS_OF, [torch.ones(1, 5, 20)]),
        lambda: Groups(ENDS).rows(ROWS_OF[:6], [MATRICES]),
        lambda: Groups(ENDS).rows(torch.ones(8, 5), [MATRICES]),
        lambda: Groups(ENDS).gathered(ROWS_OF, torch.zeros(6, dtype=torch.int64), MATRICES),
        lambda: Groups(ENDS).gathered(ROWS_OF, torch.zeros(7, dtype=torch.int32), MATRICES),
        lambda: Groups(ENDS).add(torch.ones(7, 19), ROWS_OF, [MATRICES]),
        lambda: Groups(ENDS).add(torch.ones(6, 20), ROWS_OF, [MATRICES]),
        lambda: Groups(ENDS).add(torch.ones(7, 40)[:, ::2], ROWS_OF, [MATRICES]),
        lambda: Groups(ENDS).add(torch.ones(7, 20), ROWS_OF, [torch.ones(1, 5, 20)]),
        lambda: Groups(ENDS).add(torch.ones(7, 41), torch.ones(7, 10), [MATRICES, MATRICES]),
        lambda: Groups(ENDS).outer(ROWS_OF, ROWS_OF[:6]),
        lambda: Groups(ENDS).outer(ROWS_OF[:6], ROWS_OF[:6]),
        lambda: Groups(ENDS).add_to_frozen(ROWS_OF, MATRICES, ENDS, LowRankProduct(ROWS_OF, [torch.ones(2, 4, 20)])),
        lambda: Groups(ENDS).add_to_frozen(ROWS_OF, MATRICES, ENDS, LowRankProduct(ROWS_OF, [torch.ones(1, 5, 20)])),
        lambda: Groups(ENDS).add_to_frozen(ROWS_OF, MATRICES[:1], ENDS[1:], LowRankProduct(ROWS_OF[:6], [MATRICES])),
    ],
)
def test_what_does_not_fit_is_refused(call):
    """Instead of read or written beyond its end."""
    with pytest.raises(ValueError, match="A product of groups needs that"):
        call()


def test_results_are_the_same_bits_on_any_number_of_threads(number_of_threads):
    sizes = SIZES["more rows than a piece"]
    given = normal(sum(sizes), 40, seed=1), normal(4, 12, 40, seed=2), normal(4, 12, 40, seed=3), sizes
    found = all_products(*given)
    torch.set_num_threads(1)
    for one, alone in zip(found, all_products(*given), strict=True):
        assert torch.equal(one, alone)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 7])
def test_a_row_has_the_same_bits_alone_and_among_others(size):
    rows, down, up = normal(size, 33, seed=1), normal(1, 11, 33, seed=2), normal(1, 11, 33, seed=3)
    together, alone = all_products(rows, down, up, (size,)), all_products(rows[:1], down, up, (1,))
    assert torch.equal(together[0][:1], alone[0])
    assert torch.equal(together[1][:1], alone[1])


def test_without_torchs_openmp_the_calling_thread_does_all(monkeypatch):
    def load(name):
        raise OSError(name)

    sizes = SIZES["more rows than a piece"]
    rows, matrices = normal(sum(sizes), 8, seed=1), normal(4, 8, 8, seed=2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    monkeypatch.setattr(ctypes, "CDLL", load)
    threads._parallel.cache_clear()
    assert threads._parallel() is None
    assert_near(groups_of(sizes).rows(rows, [matrices]), by_loop(rows, matrices, sizes))
    threads._parallel.cache_clear()


def test_a_kernel_is_compiled_again_when_the_source_of_any_has_changed(tmp_path, monkeypatch):
    """Numba looks at the kernel's own file alone."""
    for name in ("one.py", "two.py"):
        (tmp_path / name).write_text("x = 1")
    first = threads.digest(tmp_path)
    threads.digest.cache_clear()
    assert threads.digest(tmp_path) == first
    (tmp_path / "two.py").write_text("x = 2")
    threads.digest.cache_clear()
    assert threads.digest(tmp_path) != first
    threads.digest.cache_clear()
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    hits = []
    for digest in ("one", "one", "another"):
        monkeypatch.setattr(threads, "digest", partial(str, digest))
        hits.append(threads.Kernel(cpu_groups._outer._function)._compile()._cache_hits)
    assert hits == [0, 1, 0]


def test_where_nothing_can_be_written_a_kernel_is_compiled_for_this_process(monkeypatch):
    asked = []
    compile_for = threads.cfunc

    def without_a_cache(signature, cache=False, **options):
        asked.append(cache)
        if cache:
            raise RuntimeError("cannot cache function: no locator available")
        return compile_for(signature, **options)

    monkeypatch.setattr(threads, "cfunc", without_a_cache)
    monkeypatch.setattr(cpu_groups._outer, "_compiled", None)
    left, right = normal(3, 2, seed=1), normal(3, 2, seed=2)
    assert_near(groups_of((3,)).outer(left, right), (left.double().t() @ right.double())[None])
    assert asked == [True, False]
