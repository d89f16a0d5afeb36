"""Modules of a frozen model that compute by fused kernels, and nothing else that changes."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

from fedguild.model.backbone import make_backbone
from fedguild.model.kernels import fused
from fedguild.model.kernels.fused import Fusion, Library, fuse
from tests.backbones import tiny_model

CPU = torch.device("cpu")
EVERYTHING = {"norm", "rotary", "swiglu"}
EXPECTED = {
    "olmoe": {"OlmoeRMSNorm": 9, "OlmoeAttention": 2, "OlmoeExperts": 2},
    "mixtral": {"MixtralRMSNorm": 5, "MixtralAttention": 2, "MixtralExperts": 2},
    "qwen2_moe": {"Qwen2MoeRMSNorm": 5, "Qwen2MoeAttention": 2, "Qwen2MoeExperts": 2, "Qwen2MoeMLP": 2},
    "qwen3_moe": {"Qwen3MoeRMSNorm": 9, "Qwen3MoeAttention": 2, "Qwen3MoeExperts": 2},
    "deepseek_v2 greedy": {"DeepseekV2RMSNorm": 9, "DeepseekV2Experts": 1, "DeepseekV2MLP": 2},
    "deepseek_v3": {"DeepseekV3RMSNorm": 9, "DeepseekV3Attention": 2, "DeepseekV3Experts": 1, "DeepseekV3MLP": 2},
    "llama": {"LlamaRMSNorm": 5, "LlamaAttention": 2, "LlamaMLP": 2},
    "olmo": {"OlmoAttention": 2, "OlmoMLP": 2},
}


@dataclass
class Calls:
    """A library in plain torch that counts its calls."""

    norm: int = 0
    rotary: int = 0
    gate: int = 0
    product: int = 0

    def library(self) -> Library:
        def norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
            self.norm += 1
            exact = hidden.float()
            return weight * (exact * (exact.pow(2).mean(-1, keepdim=True) + epsilon).rsqrt()).to(hidden.dtype)

        def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
            self.rotary += 1
            cos, sin = cos[:, None], sin[:, None]
            halves = [one.chunk(2, dim=-1) for one in (query, key)]
            turned = [torch.cat((-second, first), dim=-1) for first, second in halves]
            return query * cos + turned[0] * sin, key * cos + turned[1] * sin

        def gate(both: Tensor) -> Tensor:
            self.gate += 1
            first, second = both.chunk(2, dim=-1)
            return silu(first) * second

        def product(left: Tensor, right: Tensor) -> Tensor:
            self.product += 1
            return silu(left) * right

        return Library(norm, rotary, gate, product)


@pytest.mark.parametrize("family", EXPECTED)
def test_the_modules_of_each_family_that_allow_it(family):
    """The same logits; another model of the same classes, and the classes, stay as they are."""
    model, other, calls, ids = tiny_model(family), tiny_model(family), Calls(), torch.arange(3, 12)[None]
    before = model(ids).logits
    assert Fusion(calls.library(), CPU, torch.float32).fuse(model, EVERYTHING) == EXPECTED[family]
    probes = replace(calls)
    assert torch.allclose(model(ids).logits, before, atol=1e-5)
    kinds = EXPECTED[family]
    assert calls.norm - probes.norm == sum(count for name, count in kinds.items() if name.endswith("RMSNorm"))
    interleaved = family == "deepseek_v3"
    assert calls.rotary - probes.rotary == (0 if interleaved else sum(kinds.get(n, 0) for n in kinds if "Atten" in n))
    assert calls.product - probes.product == sum(count for name, count in kinds.items() if name.endswith("MLP"))
    counted = replace(calls)
    assert torch.equal(other(ids).logits, before)
    assert calls == counted


def test_a_replacement_that_disagrees_is_not_taken():
    model, ids = tiny_model("qwen2_moe"), torch.arange(3, 12)[None]
    before, right = model(ids).logits, Calls().library()
    wrong = Library(
        lambda *given: 2 * right.norm(*given),
        lambda query, key, cos, sin: right.rotary(query, key, sin, cos),
        lambda both: right.gate(both.flip(-1)),
        lambda left, second: right.product(second, left),
    )
    fusion = Fusion(wrong, CPU, torch.float32)
    assert fusion.fuse(model, EVERYTHING) == {}
    kinds = ("Qwen2MoeAttention", "Qwen2MoeExperts", "Qwen2MoeMLP", "Qwen2MoeRMSNorm")
    assert fusion.faults == dict.fromkeys(kinds, fused.DIFFERS)
    assert torch.equal(model(ids).logits, before)


def test_a_replacement_with_another_gradient_is_not_taken():
    right = Calls().library()
    wrong = replace(right, gate=lambda both: right.gate(both.detach()) + 0 * both[..., : both.shape[-1] // 2])
    fusion = Fusion(wrong, CPU, torch.float32)
    assert "OlmoeExperts" not in fusion.fuse(tiny_model("olmoe"), EVERYTHING)
    assert fusion.faults == {"OlmoeExperts": fused.DIFFERS}


def test_a_gate_that_clamps_is_not_taken(monkeypatch):
    """Which shows with large values only."""
    model = tiny_model("olmoe")
    kind = type(model.model.layers[0].mlp.experts)

    def clamped(self, both):
        first, second = both.chunk(2, dim=-1)
        return silu(first).clamp(max=7) * second.clamp(-7, 7)

    monkeypatch.setattr(kind, "_apply_gate", clamped)
    fusion = Fusion(Calls().library(), CPU, torch.float32)
    assert "OlmoeExperts" not in fusion.fuse(model, EVERYTHING)
    assert fusion.faults == {"OlmoeExperts": fused.DIFFERS}


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What is logged, wherever other tests have sent it."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("fedguild")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


def failing(*given: object) -> None:
    raise RuntimeError("at 12:4: cannot compile\n  tl.dot(...)")


def test_a_library_that_fails_leaves_the_model_as_it_is(monkeypatch, told):
    """Another API, or a kernel that does not compile: the reasons are logged, and nothing else happens."""
    monkeypatch.setattr(fused.kernels, "runs", lambda name, device: True)
    model, ids = tiny_model("qwen2_moe"), torch.arange(3, 12)[None]
    before = model(ids).logits
    monkeypatch.setattr(fused, "on_a_cpu", lambda: Library(failing, failing, failing, failing))
    assert fuse(model, CPU, torch.float32) == {}
    assert torch.equal(model(ids).logits, before)
    assert "Qwen2MoeRMSNorm computes without a fused kernel: RuntimeError: at 12:4: cannot compile" in told
    assert len(told) == 4
    monkeypatch.setattr(fused, "on_a_cpu", failing)
    monkeypatch.setattr(fused, "liger", failing)
    for device, package in ((CPU, "Numba"), (torch.device("cuda"), "Liger-Kernel")):
        assert fuse(model, device, torch.float32) == {}
        assert f"{package} cannot be imported (at 12:4: cannot compile)" in told[-1]


@pytest.mark.parametrize("family", ["olmoe", "qwen2_moe"])
def test_weights_that_come_later(family):
    """A rank of a sharded backbone: fused while its weights are on `meta`, tried on the device of its passes."""
    model, ids = tiny_model(family), torch.arange(3, 12)[None]
    before, weights = model(ids).logits, model.state_dict()
    with torch.device("meta"):
        empty = tiny_model(family)
    assert Fusion(Calls().library(), CPU, torch.float32).fuse(empty, EVERYTHING) == EXPECTED[family]
    empty.load_state_dict(weights, assign=True)
    empty.model.rotary_emb = model.model.rotary_emb  # its frequencies are no weights
    assert torch.allclose(empty(ids).logits, before, atol=1e-5)


def test_doctor_tries_the_kernels(monkeypatch):
    monkeypatch.setattr(fused, "on_a_cpu", lambda: replace(Calls().library(), product=failing))
    assert fused.faults(CPU, torch.float32, EVERYTHING) == {"Qwen2MoeMLP": "RuntimeError: at 12:4: cannot compile"}
    assert fused.faults(CPU, torch.float32, {"norm"}) == {}


def test_only_what_is_wanted_is_replaced():
    calls = Calls()
    found = Fusion(calls.library(), CPU, torch.float32).fuse(tiny_model("olmoe"), {"norm"})
    assert found == {"OlmoeRMSNorm": 9}


def test_without_kernels_a_frozen_model_on_a_cpu_stays_as_it_is(monkeypatch):
    """The bits of its logits, whatever is installed."""
    monkeypatch.setenv(fused.kernels.VARIABLE, "none")
    for library in ("liger", "on_a_cpu"):
        monkeypatch.setattr(fused, library, lambda: pytest.fail("kernels were asked for"))
    model, ids = tiny_model("olmoe"), torch.arange(3, 12)[None]
    assert fuse(model, CPU, torch.float32) == {}
    changed = [name for name, module in model.named_modules() if {"forward", "_apply_gate"} & set(vars(module))]
    assert not changed
    make_backbone(model, None, name="olmoe")
    gates = [name for name, module in model.named_modules() if "_apply_gate" in vars(module)]
    assert not gates
    model(ids)


@pytest.mark.filterwarnings("ignore")
def test_liger_kernels_functions_in_the_interpreter():
    """Values and gradients against plain torch, of the two that the interpreter can run: its floats have no dtype."""
    pytest.importorskip("liger_kernel", reason="Liger-Kernel needs Triton")
    ours, theirs = Calls().library(), fused.liger()
    rng = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng).requires_grad_()

    angle = torch.randn(1, 5, 4, generator=rng).repeat(1, 1, 2)
    cases = {
        "gate": ([leaf(5, 12)], lambda library, x: [library.gate(x)]),
        "rotary": (
            [leaf(1, 5, 2, 8), leaf(1, 5, 1, 8)],
            lambda library, q, k: library.rotary(
                q.transpose(1, 2) * 1, k.transpose(1, 2) * 1, angle.cos(), angle.sin()
            ),
        ),
    }
    for name, (leaves, function) in cases.items():
        results = []
        for library in (ours, theirs):
            outputs = function(library, *leaves)
            gradients = torch.autograd.grad(sum((out * out.detach().cos()).sum() for out in outputs), leaves)
            results.append([*(out.detach() for out in outputs), *gradients])
        for expected, found in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text)


def test_the_large_probes_fit_fp16():
    """Where a product overflowed, the two would differ by what is not a number."""
    fusion = Fusion(Calls().library(), CPU, torch.float16)
    assert fusion.fuse(tiny_model("qwen2_moe", dtype=torch.float16), EVERYTHING) == EXPECTED["qwen2_moe"]
    assert not fusion.faults
