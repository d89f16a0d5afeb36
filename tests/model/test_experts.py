"""The fused experts against a loop that forms W + s·BA, values and gradients, at awkward sizes."""

from __future__ import annotations

import pytest
import torch

from fedguild.model.kernels import cpu_groups
from fedguild.model.moe import dispatch as dispatch_module
from fedguild.model.moe import low_rank
from fedguild.model.moe.dense import prefers_dense
from fedguild.model.moe.low_rank import prefers_blocks, prefers_groups, prefers_side_by_side
from fedguild.model.moe.token_side import prefers_token_side
from tests.model.kernels import let_run
from tests.model.layers import CASES, Case, Layer, Way, build, by_loop, by_view, worst


@pytest.fixture(params=[0, 8, 32], ids=["groups", "blocks of 8", "blocks of 32"])
def layout(request, monkeypatch):
    """Forces one of torch's ways of the low-rank products."""
    let_run(monkeypatch, ())
    monkeypatch.setattr(dispatch_module, "BLOCK_HEIGHTS", (request.param,) if request.param else ())
    monkeypatch.setattr(dispatch_module, "FILLER_LIMIT", 1000.0)


ONE_SLOT = {
    "one slot": CASES["one slot"],
    "rank one": Case((5,), (1,), (1,), (2.0,)),
    "without LoRA": Case((5,), lora=False),
    "every expert": Case((7,), (3,), (6,), (0.5,)),
    "one expert": Case((7,), (3,), (1,), experts=1, used=1),
    "experts without tokens": Case((6,), (4,), (2,), (2.0,), used=3),
    "padding": Case((8,), (4,), (3,), (2.0,), padding=(0, 5, 7)),
    "all padding but one token": Case((4,), (4,), (2,), padding=(0, 1, 3)),
}
WITH_LORA = {name: case for name, case in CASES.items() if case.lora}


def assert_equals_the_loop(layer: Layer, dtype: torch.dtype, tolerance: float, *, way: Way) -> None:
    case = layer.case
    expected, expected_grads = by_loop(layer)
    found, found_grads = by_view(layer, dtype, way=way)
    assert found.dtype is dtype
    assert worst(found, expected) < tolerance
    padded = torch.zeros(len(found), dtype=torch.bool)
    padded[list(case.padding)] = True
    assert not found[padded].any()
    beyond = layer.indices == case.experts
    for found_grad, expected_grad in zip(found_grads, expected_grads, strict=True):
        if found_grad.shape == beyond.shape:
            found_grad, expected_grad = found_grad.masked_fill(beyond, 0), expected_grad.masked_fill(beyond, 0)
        assert worst(found_grad, expected_grad) < tolerance


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_experts_equal_the_loop(case, dtype, tolerance):
    assert_equals_the_loop(build(case, dtype), dtype, tolerance, way="pairs")


@pytest.mark.usefixtures("layout")
@pytest.mark.parametrize("case", WITH_LORA.values(), ids=WITH_LORA.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_wide_products_for_the_tokens_equal_the_loop(case, dtype, tolerance):
    assert_equals_the_loop(build(case, dtype), dtype, tolerance, way="tokens")


@pytest.mark.parametrize("way", ["pairs", "tokens"])
@pytest.mark.parametrize("case", WITH_LORA.values(), ids=WITH_LORA.keys())
def test_the_kernels_of_a_cpu_equal_the_loop(case, way, monkeypatch):
    let_run(monkeypatch, {"low-rank", "grouped"}, language="numba")
    ran = []
    rows = cpu_groups.Groups.rows
    monkeypatch.setattr(cpu_groups.Groups, "rows", lambda *args: ran.append(1) or rows(*args))
    assert_equals_the_loop(build(case, torch.float32), torch.float32, 1e-5, way=way)
    assert ran


@pytest.mark.parametrize("case", ONE_SLOT.values(), ids=ONE_SLOT.keys())
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)], ids=str)
def test_every_expert_on_every_token_equals_the_loop(case, dtype, tolerance):
    assert_equals_the_loop(build(case, dtype), dtype, tolerance, way="dense")


def test_an_expert_that_nobody_was_routed_to_gets_exactly_no_gradient():
    layer = build(ONE_SLOT["experts without tokens"], torch.float32)
    _, grads = by_view(layer, torch.float32, way="dense")
    for factor in grads[2:]:
        assert factor[0, :3].any()
        assert not factor[0, 3:].any()


@pytest.mark.parametrize("way", ["pairs", "dense", "tokens"])
@pytest.mark.parametrize("trained", ["tokens", "lora_A", "lora_B"])
def test_what_is_trained_alone_gets_the_gradient_that_it_gets_with_all(way, trained):
    layer = build(ONE_SLOT["padding"], torch.float64)
    places = {"tokens": [0], "lora_A": [2, 4, 6], "lora_B": [3, 5, 7]}[trained]
    _, expected = by_loop(layer)
    _, found = by_view(layer, torch.float64, way=way, trained=places)
    for place, gradient in zip(places, found, strict=True):
        torch.testing.assert_close(gradient, expected[place], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("tokens", "top_k", "size", "slots", "dtype", "expected"),
    [
        (128, 8, 256 * 128, 1, torch.float32, True),
        (128, 8, 256 * 128, 1, torch.float64, True),
        (128, 8, 256 * 128, 1, torch.bfloat16, False),
        (128, 8, 256 * 128, 2, torch.float32, False),
        (128, 7, 256 * 128, 1, torch.float32, False),
        (160, 8, 256 * 128, 1, torch.float32, False),
        (16, 8, 2048 * 1024, 1, torch.float32, False),
    ],
)
def test_every_expert_runs_for_one_slot_few_tokens_and_half_of_the_experts(
    tokens, top_k, size, slots, dtype, expected, monkeypatch
):
    let_run(monkeypatch, ())
    assert prefers_dense(torch.zeros(tokens, 1, dtype=dtype), top_k, 16, size, slots) is expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_where_our_kernel_computes_the_products_of_groups_every_layer_is_dispatched_by_pairs(dtype, monkeypatch):
    let_run(monkeypatch, {"grouped"}, language="numba")
    layer = build(Case((6, 4), (4, 4), (6, 6), (1.0, 1.0)), dtype)
    plan = dispatch_module.dispatch(layer.indices, layer.slot, layer.keep, 6, 2)
    assert prefers_dense(torch.zeros(128, 1, dtype=dtype), 8, 16, 256 * 128, 1) is (dtype is torch.float64)
    assert prefers_token_side(layer.tokens.to(dtype), plan) is (dtype is torch.float64)


@pytest.mark.parametrize(
    ("top_k", "padding", "dtype", "expected"),
    [
        (3, (), torch.float32, True),
        (3, (), torch.float64, True),
        (3, (), torch.bfloat16, False),
        (2, (), torch.float32, False),
        (3, (4,), torch.float32, False),
    ],
)
def test_wide_products_are_for_the_tokens_where_half_of_all_pairs_are_routed(
    top_k, padding, dtype, expected, monkeypatch
):
    let_run(monkeypatch, ())
    layer = build(Case((6, 4), (4, 4), (top_k, top_k), (1.0, 1.0), padding=padding), dtype)
    plan = dispatch_module.dispatch(layer.indices, layer.slot, layer.keep, 6, 2)
    assert prefers_token_side(layer.tokens.to(dtype), plan) is expected


@pytest.mark.parametrize(
    ("threads", "dtype", "expected"),
    [(2, torch.float32, True), (2, torch.float64, True), (2, torch.bfloat16, False), (1, torch.float32, False)],
)
def test_blocks_are_for_full_precision_on_several_threads(threads, dtype, expected, monkeypatch):
    let_run(monkeypatch, ())
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert prefers_blocks(torch.zeros(1, 1, dtype=dtype)) is expected


def test_the_kernels_of_a_cpu_need_no_blocks(monkeypatch):
    let_run(monkeypatch, {"low-rank"}, language="numba")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    single, double = (torch.zeros(1, 1, dtype=dtype) for dtype in (torch.float32, torch.float64))
    assert [prefers_groups(rows) for rows in (single, double)] == [True, False]
    assert [prefers_blocks(rows) for rows in (single, double)] == [False, True]


@pytest.mark.parametrize("case", WITH_LORA.values(), ids=WITH_LORA.keys())
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 0.05)], ids=str
)
def test_the_slots_factors_side_by_side_equal_the_loop(case, dtype, tolerance, monkeypatch):
    monkeypatch.setattr(low_rank, "prefers_side_by_side", lambda *_: True)
    assert_equals_the_loop(build(case, dtype), dtype, tolerance, way="side by side")


def test_the_slots_factors_lie_side_by_side_above_a_kernels_number_of_groups():
    meta, cpu = torch.device("meta"), torch.device("cpu")
    assert [prefers_side_by_side(meta, groups) for groups in (64, 1023, 1024)] == [False, False, True]
    assert not prefers_side_by_side(cpu, 1024)


@pytest.mark.parametrize("names", [(), ("low-rank", "grouped")], ids=["torch", "kernels"])
def test_a_layer_without_a_real_token_has_no_output_and_no_gradient(names, monkeypatch):
    let_run(monkeypatch, names, language="numba")
    layer = build(Case((4, 5), (4, 4), (2, 2), (1.0, 1.0), padding=tuple(range(9))), torch.float32)
    found, gradients = by_view(layer, torch.float32, way="pairs")
    assert not found.any()
    assert not any(gradient.any() for gradient in gradients)
