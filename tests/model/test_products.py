"""Grouped products by either way, with groups of no rows, against one product after the other."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from fedguild.model.moe import products
from fedguild.model.moe.products import FrozenProduct, add_grouped_rows, grouped_outer, grouped_rows
from tests.model.kernels import let_run

ENDS = torch.tensor([0, 3, 3, 4, 9, 9], dtype=torch.int32)
GROUPS = list(pairwise([0, *ENDS.tolist()]))


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64).to(dtype)


@pytest.fixture(params=["kernel", "onednn"])
def way(request, monkeypatch):
    """Sends every product to torch's kernel, or to oneDNN where the dtype is fp32."""
    let_run(monkeypatch, ())
    monkeypatch.setattr(products, "WORTHWHILE", 10**12 if request.param == "kernel" else 0)
    taken = []
    original = products._onednn
    monkeypatch.setattr(products, "_onednn", lambda *args: (taken.append(1), original(*args))[1])
    yield taken
    assert request.param == "onednn" or not taken


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-14), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_products_equal_one_after_the_other(dtype, tolerance):
    rows, other, matrices = normal(9, 8, dtype=dtype), normal(9, 16, dtype=dtype), normal(6, 8, 16, dtype=dtype)
    by_rows = torch.cat([rows[start:end] @ matrices[group] for group, (start, end) in enumerate(GROUPS)])
    by_outer = torch.stack([rows[start:end].t() @ other[start:end] for start, end in GROUPS])
    assert torch.allclose(grouped_rows(rows, matrices, ENDS), by_rows, rtol=tolerance, atol=tolerance)
    assert torch.allclose(grouped_outer(rows, other, ENDS), by_outer, rtol=tolerance, atol=tolerance)
    transposed = matrices.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.allclose(grouped_rows(rows, transposed, ENDS), by_rows, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("inner", "outer"), [(7, 5), (8, 5), (7, 16)])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str)
def test_widths_that_are_no_multiple_of_16_bytes(dtype, tolerance, inner, outer):
    """torch's kernel refuses them, on any device; chunks of a wider tensor, as of gate and up together, too."""
    rows, other = (normal(9, 2 * width, dtype=dtype).chunk(2, dim=1)[1] for width in (inner, outer))
    matrices = normal(6, inner, outer, dtype=dtype)
    by_rows = torch.cat([rows[start:end] @ matrices[group] for group, (start, end) in enumerate(GROUPS)])
    by_outer = torch.stack([rows[start:end].t() @ other[start:end] for start, end in GROUPS])
    assert torch.allclose(grouped_rows(rows, matrices, ENDS), by_rows, rtol=tolerance, atol=tolerance)
    assert torch.allclose(grouped_outer(rows, other, ENDS), by_outer, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_trainable_matrices_are_taken_where_gradients_are_off(mode):
    """As inside an autograd function's forward."""
    rows, matrices = normal(9, 8, dtype=torch.float32), normal(6, 8, 16, dtype=torch.float32).requires_grad_()
    with mode():
        out = grouped_rows(rows, matrices, ENDS)
        grouped_outer(out, rows, ENDS)
    assert not out.requires_grad
    assert out.is_inference() == (mode is torch.inference_mode)


def test_large_groups_go_to_onednn(way, request):
    grouped_rows(normal(9, 8, dtype=torch.float32), normal(6, 8, 16, dtype=torch.float32), ENDS)
    filled = sum(end > start for start, end in GROUPS)
    assert len(way) == (filled if request.node.callspec.params["way"] == "onednn" else 0)


@pytest.mark.parametrize("sizes", [[1], [7, 0, 1], [8, 9, 30], [100, 3], [5, 200]], ids=str)
def test_neighbours_rows_are_dropped(sizes, monkeypatch):
    """oneDNN multiplies rounded-up groups; also where the last, or the only, group is smaller than its window."""
    let_run(monkeypatch, ())
    monkeypatch.setattr(products, "WORTHWHILE", 0)
    rows, matrices = normal(sum(sizes), 12, dtype=torch.float32), normal(len(sizes), 12, 5, dtype=torch.float32)
    parts = rows.split(sizes)
    expected = torch.cat([part @ matrix for part, matrix in zip(parts, matrices, strict=True)])
    found = grouped_rows(rows, matrices, torch.tensor(sizes).cumsum(0).to(torch.int32))
    assert torch.allclose(found, expected, atol=1e-5)


def test_more_groups_than_a_kernel_takes_are_split(monkeypatch):
    monkeypatch.setattr(products, "GROUP_LIMIT", 4)
    rows, matrices = normal(9, 8, dtype=torch.float32), normal(6, 8, 16, dtype=torch.float32)
    expected = torch.cat([rows[start:end] @ matrices[group] for group, (start, end) in enumerate(GROUPS)])
    assert torch.allclose(products._in_chunks(rows, matrices, ENDS), expected, atol=1e-5)


@pytest.mark.parametrize("outer", [16, 37], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_in_fp32_a_cpu_s_products_are_our_kernel_s(outer, transposed, monkeypatch):
    """Others are torch's; a total is added to."""
    let_run(monkeypatch, {"grouped"}, language="numba")
    from fedguild.model.kernels import cpu_groups

    ran = []
    multiply = cpu_groups.Groups._multiply
    monkeypatch.setattr(
        cpu_groups.Groups, "_multiply", lambda *args, **options: ran.append(1) or multiply(*args, **options)
    )
    rows, matrices = normal(9, 80, dtype=torch.float64), normal(6, 80, outer, dtype=torch.float64)
    expected = torch.cat([rows[start:end] @ matrices[group] for group, (start, end) in enumerate(GROUPS)])
    single = matrices.float()
    single = single.transpose(1, 2).contiguous().transpose(1, 2) if transposed else single
    total = torch.ones(9, outer)
    add_grouped_rows(total, rows.float(), single, ENDS)
    product = FrozenProduct(rows.float(), single, ENDS)
    for found in (grouped_rows(rows.float(), single, ENDS), total - 1, product.computed()):
        assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-5)
    assert product.suits_kernel()
    places = torch.tensor([4, 0, 8, 1, 1, 2, 7, 3, 8])
    of_places = torch.cat([rows[places][start:end] @ matrices[group] for group, (start, end) in enumerate(GROUPS)])
    found = FrozenProduct(rows.float(), single, ENDS, places).computed()
    assert torch.allclose(found.double(), of_places, rtol=1e-5, atol=1e-5)
    assert torch.allclose(FrozenProduct(rows, matrices, ENDS, places).computed(), of_places, rtol=1e-13, atol=1e-13)
    assert len(ran) == 4
    assert torch.allclose(grouped_rows(rows, matrices, ENDS), expected, rtol=1e-14, atol=1e-13)
    grouped_rows(rows.bfloat16(), matrices.bfloat16(), ENDS)
    assert len(ran) == 4
    assert not FrozenProduct(rows, matrices, ENDS).suits_kernel()


def test_what_has_no_plain_values_in_fp32_is_torch_s(monkeypatch):
    """Fake tensors, subclasses, views that are negated on reading, a CPU that does not fuse a product and a sum."""
    let_run(monkeypatch, {"grouped"}, language="numba")
    from fedguild.model.kernels import cpu_tiles

    rows, matrices = normal(9, 8, dtype=torch.float32), normal(6, 8, 16, dtype=torch.float32)
    assert products._suits_cpu_kernel(rows, matrices)

    class Own(torch.Tensor):
        pass

    with FakeTensorMode():
        fake = torch.empty(9, 8)
    for other in (fake, rows.as_subclass(Own), torch._neg_view(rows), rows.double(), rows.to("meta")):
        assert not products._suits_cpu_kernel(other, matrices)
    for other in (matrices.as_subclass(Own), torch._neg_view(matrices), torch._efficientzerotensor(6, 8, 16)):
        assert not products._suits_cpu_kernel(rows, other)
    negated = grouped_rows(torch._neg_view(rows), matrices, ENDS)
    assert torch.allclose(negated, -grouped_rows(rows, matrices, ENDS), atol=1e-5)
    monkeypatch.setattr(cpu_tiles, "IS_FUSED", False)
    assert not products._suits_cpu_kernel(rows, matrices)
