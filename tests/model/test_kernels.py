"""Places where the kernels run; every path through them equals the path without."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedguild.core.errors import ConfigError
from fedguild.data.batches import Encoded, collate
from fedguild.methods.flex import grafted_expert
from fedguild.methods.flex.grafted_expert import GraftedExpert
from fedguild.model import chunked_loss, kernels
from fedguild.model.adapters import dropout, lora
from fedguild.model.adapters.lora import Lora, ReadyFactors, through_factors
from fedguild.model.chunked_loss import chunked_losses
from fedguild.model.moe import products
from fedguild.model.moe.casts import Casts
from fedguild.model.moe.dispatch import dispatch
from fedguild.model.moe.low_rank import LowRank
from fedguild.model.moe.middle import MiddleRank
from fedguild.model.plan import AdapterPlan
from fedguild.model.slot_low_rank import add_low_rank
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone
from tests.model.kernels import let_run
from tests.model.layers import CASES, build, by_loop, by_view, worst
from tests.model.test_experts import assert_equals_the_loop

MIXED = "mixed ranks, scales and active experts"
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.05}


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        (MIXED, torch.float64),
        pytest.param(MIXED, torch.bfloat16, marks=pytest.mark.long),
        pytest.param("a slot without rows", torch.float32, marks=pytest.mark.long),
        pytest.param("one expert for all", torch.float32, marks=pytest.mark.long),
    ],
)
def test_experts_by_the_kernel_equal_the_loop(name, dtype, monkeypatch):
    """The low-rank products; the frozen ones too in one of the cases."""
    let_run(monkeypatch, {"low-rank", "grouped"} if dtype is torch.float64 else {"low-rank"})
    assert_equals_the_loop(build(CASES[name], dtype), dtype, TOLERANCES[dtype], way="side by side")


@pytest.mark.long
def test_only_gradients_that_are_needed_are_computed(monkeypatch):
    let_run(monkeypatch, {"low-rank"})
    layer = build(CASES["one slot"], torch.float64)
    _, expected = by_loop(layer)
    places = [2, 4, 6]
    _, found = by_view(layer, torch.float64, way="side by side", trained=places)
    assert all(worst(gradient, expected[place]) < 1e-12 for place, gradient in zip(places, found, strict=True))


def test_a_middle_factor_by_the_kernel(monkeypatch):
    """Products and gradients as without it."""
    experts, slots, rank, inner, outer, tokens = 3, 2, 4, 6, 5, 11
    indices = torch.stack([torch.randperm(experts, generator=torch.Generator().manual_seed(n))[:2] for n in range(11)])
    slot = torch.arange(tokens) // 6
    plan = dispatch(indices, slot, None, experts, slots)
    scale = torch.tensor([[0.5] * rank, [2.0, 2.0, 2.0, 0.0]], dtype=torch.float64)
    shapes = [(rank, inner), (rank, outer), (rank, rank)] * 2
    trained = [normal(experts, slots, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    rows, dy, weight = normal(22, inner, seed=9), normal(22, 2 * outer, seed=10), normal(22, 1, seed=11)

    def run() -> list[Tensor]:
        total, d_rows = torch.zeros(22, 2 * outer, dtype=torch.float64), torch.zeros(22, inner, dtype=torch.float64)
        part = MiddleRank(LowRank.of(plan, scale))
        _, kept = part.add(total, rows, trained)
        _, gradients = part.back(d_rows, dy, rows, trained, kept, weight, [False, False, True] * 2)
        return [total, d_rows, *(one.flatten(0, -3) for one in gradients if one is not None)]

    expected = run()
    let_run(monkeypatch, {"low-rank"})
    for found, wanted in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("rows", [(4,), (3, 3, 3), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("names", [set(), {"grouped"}], ids=["torch", "kernel"])
def test_a_linear_layers_product_is_added_in_place(rows, names, monkeypatch):
    """The same output and gradients as by `through_factors`, in the storage of the layer's own output."""
    let_run(monkeypatch, names)
    slots, tokens = len(rows), 2 * sum(rows)
    scale = torch.arange(1, slots + 1, dtype=torch.float64)
    leaves = [normal(tokens, 6, seed=1), normal(slots, 3, 6, seed=2), normal(slots, 5, 3, seed=3)]
    weight, upstream = normal(5, 6, seed=4), normal(tokens, 5, seed=5)
    results = []
    for added in (False, True):
        hidden, down, up = (leaf.clone().requires_grad_() for leaf in leaves)
        output = hidden @ weight.t()
        storage = output.data_ptr()
        if added:
            out = add_low_rank(output, hidden, down, up, scale, rows, Casts())
            assert out.data_ptr() == storage
        else:
            out = output + through_factors(hidden, ReadyFactors(scale, down, up).of(hidden.dtype), rows)
        results.append([out, *torch.autograd.grad((out * upstream).sum(), (hidden, down, up))])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "part",
    [Lora(3, 0.5, ("attention",), middle=True, frozen=("lora_A", "lora_B")), GraftedExpert(3, 0.5, 0.4)],
    ids=str,
)
def test_products_in_a_model_are_added_in_place(part, monkeypatch):
    """What a GPU does with a middle factor and with a grafted expert, against the sums of a CPU."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    plans = [AdapterPlan((part,))] * 3
    rows = [random_rows(lengths, 1) for lengths in ([5], [3, 8], [4])]
    batch = collate([[Encoded(tuple(ids), 1) for ids in slot] for slot in rows], PAD)
    results = []
    for way in (False, True):
        for module in (lora, grafted_expert):
            monkeypatch.setattr(module, "in_place", lambda output, _, way=way: way and output.is_contiguous())
        with SlotModel(backbone, plans) as model:
            for slot, plan in enumerate(plans):
                tensors = random_adapter(backbone.info, plan, slot)
                chosen = {name: torch.tensor(float(slot)) for name in tensors if name.endswith("source")}
                model.load(slot, {**tensors, **chosen})
            losses = model.token_losses(batch)
            losses.sum().backward()
            grads = {name: trainable.stored.grad for name, trainable in model.trainables.items()}
            results.append({"losses": losses.detach(), **grads})
    assert results[0].keys() == results[1].keys()
    for name, expected in results[0].items():
        torch.testing.assert_close(results[1][name], expected, rtol=1e-10, atol=1e-12)


def test_products_that_torch_has_no_kernel_for(monkeypatch):
    """Any dtype, any width, any number of groups; on a GPU with torch's kernel, bf16 stays with that."""
    rows, matrices = normal(9, 7, seed=1), normal(4, 7, 5, seed=2)
    ends = torch.tensor([2, 2, 8, 9], dtype=torch.int32)
    expected = products.grouped_rows(rows, matrices, ends), products.grouped_outer(rows, rows, ends)
    let_run(monkeypatch, {"grouped"})
    assert products._suits_kernel(rows, 4, 7, 5)
    torch.testing.assert_close(products.grouped_rows(rows, matrices, ends), expected[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(products.grouped_outer(rows, rows, ends), expected[1], rtol=1e-12, atol=1e-12)
    whole = normal(9, 10, seed=3)
    before = whole.clone()
    products.add_grouped_rows(whole.chunk(2, dim=1)[1], rows, matrices, ends)
    torch.testing.assert_close(whole[:, 5:], before[:, 5:] + expected[0], rtol=1e-12, atol=1e-12)
    assert torch.equal(whole[:, :5], before[:, :5])


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.float16, 1e-3), (torch.bfloat16, 1e-2)],
    ids=str,
)
def test_the_cross_entropy_and_its_gradient(dtype, tolerance, smoothing, monkeypatch):
    """Against torch's in fp64; a vocabulary of several blocks, one of them not full."""
    let_run(monkeypatch, {"cross-entropy"})

    from fedguild.model.kernels import cross_entropy as kernel

    monkeypatch.setattr(kernel, "BLOCK", 16)
    logits, targets = 3 * normal(5, 37, dtype=dtype), torch.tensor([0, 36, 17, 3, 20])
    leaf = logits.double().requires_grad_()
    expected = cross_entropy(leaf, targets, reduction="none", label_smoothing=smoothing)
    expected.sum().backward()
    expected = expected.detach()
    plain = kernel.losses_and_gradients(logits, targets, smoothing, gradients=False)
    assert torch.equal(logits.double(), leaf.detach())
    losses = kernel.losses_and_gradients(logits, targets, smoothing, gradients=True)
    assert torch.equal(plain, losses)
    assert losses.dtype is torch.promote_types(dtype, torch.float32)
    # The logits' own rounding is part of the reference: only the sums differ.
    assert float((losses.double() - expected).abs().max()) < 1e-5
    assert float((logits.double() - leaf.grad).detach().abs().max()) < tolerance


@pytest.mark.filterwarnings("ignore:invalid value")
def test_losses_in_chunks_by_the_kernel(monkeypatch):
    weight, hidden, targets = normal(11, 5, seed=1), normal(7, 5, seed=2), torch.arange(7)
    weights, results = normal(7, seed=3), []
    for names in (set(), {"cross-entropy"}):
        let_run(monkeypatch, names)
        leaf = hidden.clone().requires_grad_()
        losses = chunked_losses(leaf, targets, lambda part: part @ weight.t(), 0.1, 3)
        (losses * weights).sum().backward()
        results.append((losses.detach(), leaf.grad))
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_a_models_training_step_by_all_kernels(monkeypatch):
    """bf16, mixed ranks and active experts, rows of unequal length, losses in chunks: the same to rounding."""
    small = {"num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
    backbone = tiny_backbone("olmoe", dtype=torch.bfloat16, initializer_range=0.05, **small)
    monkeypatch.setattr(chunked_loss, "LOGITS_BYTES", 4 * 5 * backbone.info.vocabulary)
    plans = [AdapterPlan((Lora(rank, 0.8, ("attention", "experts")),), 2 - slot) for slot, rank in enumerate((8, 3))]
    batch = collate([[Encoded(tuple(ids), 1) for ids in random_rows(own, 1)] for own in ([5, 3], [4])], PAD)
    results = []
    for names in (set(), {"low-rank", "cross-entropy"}):
        let_run(monkeypatch, names)
        with SlotModel(backbone, plans) as model:
            for slot, plan in enumerate(plans):
                model.load(slot, random_adapter(backbone.info, plan, slot, size=0.05))
            losses = model.token_losses(batch)
            losses.sum().backward()
            gradients = torch.cat([tensor.stored.grad.flatten() for tensor in model.trainables.values()])
            results.append((losses.detach(), gradients))
    (losses, gradients), (by_kernel, kernel_gradients) = results
    assert not torch.equal(gradients, kernel_gradients)
    torch.testing.assert_close(by_kernel, losses, rtol=0.02, atol=0.02)
    assert float((kernel_gradients - gradients).norm() / gradients.norm()) < 0.05


@pytest.mark.parametrize(("tokens", "features"), [(3, 37), (1, 1), (2, 64), (0, 4)])
def test_dropouts_mask_has_the_same_bits(tokens, features, monkeypatch):
    """Features that fill several blocks, odd numbers of them, and rates of 0 and nearly 1."""
    let_run(monkeypatch, set())
    keys = torch.randint(-(2**63), 2**63 - 1, (tokens,), generator=torch.Generator().manual_seed(1))
    least = torch.tensor([-(2**31), 2**30, -1])[:tokens].to(torch.int32)
    expected = dropout.kept(keys, least, features)
    let_run(monkeypatch, {"dropout"})

    from fedguild.model.kernels import dropout as kernel

    monkeypatch.setattr(kernel, "BLOCK", 8)
    assert torch.equal(dropout.kept(keys, least, features), expected)


@pytest.fixture
def install(monkeypatch):
    """Installs packages, and no others, as far as `kernels` sees."""
    kernels.chosen.cache_clear()

    def only(*names):
        monkeypatch.setattr(kernels, "find_spec", lambda name: name if name in names else None)

    yield only
    kernels.chosen.cache_clear()


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("auto", {"low-rank", "grouped", "optimizer", "norm", "rotary", "swiglu"}),
        ("", set(kernels.CPU_KERNELS)),
        ("none", set()),
        ("optimizer, dropout", {"optimizer"}),
        ("cross-entropy, dropout", set()),
        (",".join(kernels.KERNELS), set(kernels.CPU_KERNELS)),
    ],
)
def test_a_cpu_runs_those_in_numba(setting, expected, install, monkeypatch):
    """What only a GPU runs may be named, with nothing of it installed."""
    install()
    monkeypatch.setenv(kernels.VARIABLE, setting)
    assert {name for name in kernels.KERNELS if kernels.runs(name, torch.device("cpu"))} == expected
    assert {name for name in kernels.KERNELS if kernels.runs(name, torch.device("meta"))} == set()


@pytest.mark.parametrize(
    ("setting", "installed", "expected"),
    [
        ("auto", {"triton", "liger_kernel"}, set(kernels.KERNELS)),
        ("auto", {"triton"}, {"low-rank", "grouped", "cross-entropy", "dropout", "optimizer"}),
        ("auto", set(), set()),
        ("none", {"triton", "liger_kernel"}, set()),
        ("low-rank, norm", {"triton", "liger_kernel"}, {"low-rank", "norm"}),
    ],
)
def test_a_gpu_runs_what_is_installed_and_not_switched_off(setting, installed, expected, install, monkeypatch):
    install(*installed)
    monkeypatch.setenv(kernels.VARIABLE, setting)
    new = torch.device("cuda", 0)
    monkeypatch.setattr(kernels, "is_new_enough", lambda device: device == new)
    assert not any(kernels.runs(name, torch.device("cuda", 1)) for name in kernels.KERNELS)
    assert {name for name in kernels.KERNELS if kernels.runs(name, new)} == expected


@pytest.mark.parametrize(
    ("setting", "kind", "message", "hint"),
    [
        ("lowrank", "cuda", "unknown kernel 'lowrank'", "Known"),
        ("lowrank", "cpu", "unknown kernel 'lowrank'", "Known"),
        ("norm", "cuda", "liger-kernel is not installed", "gpu"),
        ("low-rank", "cuda", "triton is not installed", "gpu"),
    ],
)
def test_what_cannot_run_is_refused(setting, kind, message, hint, install):
    install()
    with pytest.raises(ConfigError, match=message) as caught:
        kernels.chosen(setting, kind)
    assert hint in caught.value.hint
