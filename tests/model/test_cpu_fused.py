"""Norms, rotary embeddings and gates in Numba against plain formulas in fp64, and in the modules that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from fedguild.model.backbone import make_backbone
from fedguild.model.kernels import VARIABLE, cpu_fused, fused
from tests.backbones import tiny_model
from tests.model.test_fused import EXPECTED

CPU = torch.device("cpu")
EPSILON = 1e-5


def normal(*shape: int, seed: int = 0, factor: float = 1.0) -> Tensor:
    return factor * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def norm(hidden: Tensor, weight: Tensor) -> Tensor:
    return weight * hidden / (hidden.pow(2).mean(-1, keepdim=True) + EPSILON).sqrt()


def rotated(values: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[B, h, T, d]: the pair (k, k + d/2) is turned."""
    half = values.shape[-1] // 2
    first, second, cos, sin = values[..., :half], values[..., half:], cos[:, None], sin[:, None]
    return torch.cat(
        [
            first * cos[..., :half] - second * sin[..., :half],
            second * cos[..., half:] + first * sin[..., half:],
        ],
        dim=-1,
    )


def gated(left: Tensor, right: Tensor) -> Tensor:
    return left / (1 + (-left).exp()) * right


def compare(ours, oracle, *given: Tensor) -> None:
    """Results and gradients, to the rounding of fp32; the gradient of the result dense, with gaps, and one for all."""
    leaves = [one.clone(memory_format=torch.preserve_format).requires_grad_() for one in given]
    exact = [one.detach().double().requires_grad_() for one in given]
    found, expected = ours(*leaves), oracle(*exact)
    near(found, expected)
    dense = normal(*expected.shape, seed=9)
    gaps = normal(*expected.shape[:-1], 2 * expected.shape[-1], seed=9)[..., ::2]
    apart = normal(expected.shape[-1], *expected.shape[:-1], seed=9).movedim(0, -1)
    for d_out in (dense, gaps, apart, torch.tensor(0.7).expand(expected.shape)):
        gradients = torch.autograd.grad(found, leaves, d_out, retain_graph=True)
        exactly = torch.autograd.grad(expected, exact, d_out.double(), retain_graph=True)
        for one, other in zip(gradients, exactly, strict=True):
            near(one, other)


def near(found: Tensor, expected: Tensor) -> None:
    assert found.shape == expected.shape
    assert found.dtype is torch.float32
    found, expected = found.detach().double(), expected.detach()
    assert float((found - expected).abs().max()) <= 1e-6 * float(expected.abs().max())


@pytest.mark.parametrize("shape", [(1, 16), (5, 3), (3, 7, 33), (700, 64)], ids=str)
def test_norm(shape, number_of_threads):
    weight = normal(shape[-1], seed=1)
    compare(lambda x: cpu_fused.numba().norm(x, weight, EPSILON), lambda x: norm(x, weight.double()), normal(*shape))


def test_norm_of_rows_that_lie_apart():
    weight = normal(8, seed=1)
    wide = normal(4, 6, 20)[:, ::2, 3:11]
    compare(lambda x: cpu_fused.numba().norm(x, weight, EPSILON), lambda x: norm(x, weight.double()), wide)


def test_a_norm_whose_weight_is_trained_gets_its_gradient():
    compare(lambda x, w: cpu_fused.numba().norm(x, w, EPSILON), norm, normal(5, 4, 24), normal(24, seed=1))


@pytest.mark.parametrize(("batch", "heads", "tokens", "width"), [(1, 4, 300, 64), (3, 2, 5, 8), (2, 1, 1, 2)], ids=str)
@pytest.mark.parametrize("projected", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_rotary(batch, heads, tokens, width, projected, shared, number_of_threads):
    """`projected`: a view of [B, T, h, d], as a projection gives it. `shared`: one cos and sin for all rows."""
    cos, sin = (normal(1 if shared else batch, tokens, width, seed=seed) for seed in (1, 2))
    key = normal(batch, 1, tokens, width, seed=4)
    shape = (batch, tokens, heads, width) if projected else (batch, heads, tokens, width)
    query = normal(*shape, seed=3)
    query = query.transpose(1, 2) if projected else query

    def ours(query: Tensor, key: Tensor) -> Tensor:
        return torch.cat(cpu_fused.numba().rotary(query, key, cos, sin), dim=1)

    def oracle(query: Tensor, key: Tensor) -> Tensor:
        return torch.cat([rotated(one, cos.double(), sin.double()) for one in (query, key)], dim=1)

    compare(ours, oracle, query, key)
    assert cpu_fused.numba().rotary(query, key, cos, sin)[0].stride() == query.stride()


@pytest.mark.parametrize("shape", [(1, 2), (3, 34), (900, 64)], ids=str)
def test_gate(shape, number_of_threads):
    compare(cpu_fused.numba().gate, lambda z: gated(*z.chunk(2, dim=1)), normal(*shape, factor=4))


def test_gate_of_rows_that_lie_apart():
    compare(cpu_fused.numba().gate, lambda z: gated(*z.chunk(2, dim=1)), normal(7, 30)[:, 2:18])


@pytest.mark.parametrize("shape", [(5,), (3, 17), (2, 9, 40), (800, 33)], ids=str)
def test_product(shape, number_of_threads):
    compare(cpu_fused.numba().product, gated, normal(*shape, factor=4), normal(*shape, seed=1))


def test_product_of_parts_of_a_wider_tensor():
    both = normal(6, 24)
    compare(cpu_fused.numba().product, gated, both[:, 1:9], both[:, 10:18])


def test_a_size_of_one_in_the_middle():
    """Its stride says nothing, and such a tensor counts as contiguous."""
    left = normal(1, 7, 16).transpose(0, 1)
    assert left.stride(1) != 16
    compare(cpu_fused.numba().product, gated, left, normal(7, 1, 16, seed=1))


def test_a_gradient_of_a_gradient_is_refused():
    """Instead of a wrong one."""
    leaf = normal(3, 8).requires_grad_()
    (first,) = torch.autograd.grad(cpu_fused.numba().gate(leaf).square().sum(), leaf, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        first.sum().backward()


def test_a_query_whose_key_is_not_used():
    cos, sin = normal(1, 5, 8, seed=1), normal(1, 5, 8, seed=2)
    key = normal(2, 1, 5, 8, seed=4)
    compare(
        lambda query: cpu_fused.numba().rotary(query, key, cos, sin)[0],
        lambda query: rotated(query, cos.double(), sin.double()),
        normal(2, 3, 5, 8),
    )


def test_gates_far_from_zero():
    """Where the exponential function leaves fp32, the gate is as good as open or closed."""
    ends = torch.tensor([[-torch.inf, -3e38, -1e30, -300.0, -88.0, -20.0, 0.0, 20.0, 88.0, 300.0, 1e30]])
    found = cpu_fused.numba().product(ends, torch.ones_like(ends))
    assert found[0, :4].abs().max() < 1e-36
    assert torch.allclose(found[0, 4:], gated(ends, torch.ones_like(ends))[0, 4:], rtol=1e-6, atol=1e-36)
    leaves = [ends.clone().requires_grad_(), torch.ones_like(ends, requires_grad=True)]
    for gradient in torch.autograd.grad(cpu_fused.numba().product(*leaves).sum(), leaves):
        assert gradient[0, :4].abs().max() < 1e-34
    each = torch.linspace(-87, 87, 100_001)[None]
    off = (cpu_fused.numba().product(each, 1 / each) * (1 + (-each.double()).exp()) - 1).abs()
    assert off[each != 0].max() < 1e-6


def test_what_is_not_a_number_stays_so():
    wide = torch.full((2, 80), torch.nan, requires_grad=True)
    gated = cpu_fused.numba().gate(wide)
    assert gated.isnan().all()
    assert torch.autograd.grad(gated.sum(), wide)[0].isnan().all()
    assert cpu_fused.numba().norm(torch.tensor([[torch.nan, 1.0]]), torch.ones(2), EPSILON).isnan().all()


def test_a_rows_bits_depend_on_nothing_else():
    """Neither on the other rows nor on the number of threads."""
    library, many, weight = cpu_fused.numba(), normal(700, 48), normal(48, seed=1)
    before = torch.get_num_threads()
    found = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for rows in (many, many[300:303]):
            leaf = rows.clone().requires_grad_()
            out = torch.cat([library.norm(leaf, weight, EPSILON), library.gate(leaf)], dim=1)
            (gradient,) = torch.autograd.grad(out.sum(), leaf)
            found.append([one if len(one) == 3 else one[300:303] for one in (out.detach(), gradient)])
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(map(torch.equal, other, found[0]))


@pytest.mark.parametrize("family", EXPECTED)
def test_the_modules_of_each_family(family, monkeypatch):
    """All that allow it, with the logits and gradients of the same weights in fp64, as near as transformers' own."""
    monkeypatch.setenv(VARIABLE, "norm,rotary,swiglu")
    model, plain, exact = (tiny_model(family, dtype=dtype) for dtype in (torch.float32, torch.float32, torch.float64))
    exact.load_state_dict(plain.state_dict())
    assert fused.fuse(model, CPU, torch.float32) == EXPECTED[family]
    embedded = plain.get_input_embeddings()(torch.arange(3, 12)[None]).detach()
    outputs = []
    for one in (model, plain, exact):
        inputs = embedded.to(one.dtype).requires_grad_()
        logits = one(inputs_embeds=inputs).logits
        outputs.append((logits.detach(), *torch.autograd.grad(logits.logsumexp(-1).sum(), inputs)))
    for found, own, expected in zip(*outputs, strict=True):
        size, error, own_error = (float(value.norm()) for value in (expected, found - expected, own - expected))
        assert error <= 6 * own_error + 1e-6 * size
        assert own_error < 1e-4 * size


def test_other_tensors_take_the_modules_own_way(monkeypatch):
    """A model that is made fp64 later, as oracles do, has the bits of transformers'."""
    monkeypatch.setenv(VARIABLE, "auto")
    model, ids = tiny_model("qwen2_moe"), torch.arange(3, 12)[None]
    assert fused.fuse(model, CPU, torch.float32)
    assert torch.equal(model.double()(ids).logits, tiny_model("qwen2_moe").double()(ids).logits)
    assert model.float().model.norm(torch.zeros(1, 0, model.config.hidden_size)).shape[1] == 0
    assert fused.fuse(tiny_model("qwen2_moe"), CPU, torch.bfloat16) == {}

    class Other(Tensor):
        pass

    takes = cpu_fused.numba().takes
    assert takes(torch.ones(1))
    assert takes(nn.Parameter(torch.ones(1)))
    others = (torch.ones(0), torch.ones(1).double(), torch.ones(1, device="meta"), torch.ones(1).as_subclass(Other))
    assert not any(map(takes, others))


def test_linear_layers_of_another_dtype(monkeypatch):
    """Under autocast they take fp32 and give bf16."""
    monkeypatch.setenv(VARIABLE, "auto")
    model, plain, ids = tiny_model("qwen2_moe"), tiny_model("qwen2_moe"), torch.arange(3, 12)[None]
    assert fused.fuse(model, CPU, torch.float32)
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        assert torch.allclose(model(ids).logits, plain(ids).logits, rtol=0.05, atol=0.05)


def test_shapes_that_do_not_fit_are_the_models_own(monkeypatch):
    """It broadcasts them, or says what is wrong."""
    monkeypatch.setenv(VARIABLE, "auto")
    model = tiny_model("llama")
    assert fused.fuse(model, CPU, torch.float32)
    turn = model.model.layers[0].self_attn.forward.__func__.__globals__[fused.ROTARY]
    query, key, one = normal(1, 2, 5, 8), normal(1, 1, 5, 8, seed=1), normal(1, 1, 8, seed=2)
    found = torch.cat(turn(query, key, one, one), dim=1)
    assert torch.allclose(found, rotated(torch.cat([query, key], dim=1), one, one), atol=1e-6)
    with pytest.raises(RuntimeError, match="must match"):
        model.model.norm(torch.ones(2, model.config.hidden_size // 2))


def test_a_rotary_embedding_of_a_part_of_the_width_is_the_models_own(monkeypatch):
    monkeypatch.setenv(VARIABLE, "rotary")
    model = tiny_model("llama")
    assert fused.fuse(model, CPU, torch.float32) == {"LlamaAttention": 2}
    turn = model.model.layers[0].self_attn.forward.__func__.__globals__[fused.ROTARY]
    with pytest.raises(RuntimeError, match="must match"):  # transformers' own cannot, and says so
        turn(torch.ones(1, 1, 2, 8), torch.ones(1, 1, 2, 8), torch.ones(1, 2, 4), torch.ones(1, 2, 4))


def test_a_backbone_on_a_cpu_is_fused(monkeypatch):
    monkeypatch.setenv(VARIABLE, "auto")
    model = tiny_model("olmoe")
    make_backbone(model, None, name="olmoe")
    assert all("_apply_gate" in vars(layer.mlp.experts) for layer in model.model.layers)
    assert all("forward" in vars(module) for module in model.modules() if fused.is_norm(module))
