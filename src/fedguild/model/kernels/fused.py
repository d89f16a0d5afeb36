"""Fused norms, rotary embeddings and gates of a frozen model: Liger-Kernel's on a GPU, Numba kernels on a CPU.

Source: Hsu et al., Liger Kernel, 2024 (arXiv:2410.10989); `cpu_fused`. The functions replace a module's computation,
one module object at a time. No class of transformers is changed, so another model in the process stays as it is, and no
list of families is needed; Liger's own patches have one, which lacks OLMoE. A module's computation is recognised by its
form. A replacement is taken only if it agrees with the module itself on a few random values on the model's device,
forward and backward. They are tried on a stand-in of the module with small weights on that device, because the module's
own may be on `meta`, on the host or in 4 bit. If that fails, the module is left unchanged and the reason is logged.

- a norm with `weight` and `variance_epsilon` whose class is some `…RMSNorm`;
- an attention whose `forward` calls its file's `apply_rotary_pos_emb` (DeepSeek's interleaved one does not);
- the gate of stacked experts, and a dense MLP of three linear layers, with SiLU.
"""

from __future__ import annotations

import inspect
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fedguild.core.errors import first_line, in_one_line
from fedguild.model import kernels
from fedguild.model.kernels.library import Library

FUSED = ("norm", "rotary", "swiglu")
"""The kernels of this module, of `kernels.KERNELS`."""
ROTARY = "apply_rotary_pos_emb"
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Dtypes that are fused -> largest difference from the module's own result, relative to the largest value."""
PROBES = (1.0, 30.0, 1e-3)
"""Factors of the random values: large ones, with products within fp16, show a gate that clamps, small ones epsilon."""
PROBE_WIDTH = 16
"""Width of the hidden states with which a dense MLP is tried."""
DIFFERS = "its result differs from the module's own"
_log = logging.getLogger("fedguild")


def liger() -> Library:
    from liger_kernel.ops import LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
    from liger_kernel.ops.swiglu import LigerFusedGateUpSiLUMulFunction

    def norm(hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        with torch.cuda.device_of(hidden):
            out: Tensor = LigerRMSNormFunction.apply(hidden, weight, epsilon, 0.0, "llama", False)
            return out

    def rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        with torch.cuda.device_of(query):
            out: tuple[Tensor, Tensor] = LigerRopeFunction.apply(query, key, cos, sin)
            return out

    def gate(both: Tensor) -> Tensor:
        with torch.cuda.device_of(both):
            out: Tensor = LigerFusedGateUpSiLUMulFunction.apply(both)
            return out

    def product(left: Tensor, right: Tensor) -> Tensor:
        with torch.cuda.device_of(left):
            out: Tensor = LigerSiLUMulFunction.apply(left, right)
            return out

    return Library(norm, rotary, gate, product)


def on_a_cpu() -> Library:
    from fedguild.model.kernels.cpu_fused import numba

    return numba()


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Lets the modules of a frozen model compute by fused kernels where they can.

    Args:
        model: The model, without gradients; its weights may be on any device.

    Returns:
        Class of module -> the number of them that are fused.
    """
    wanted = {name for name in FUSED if kernels.runs(name, device)}
    if not wanted or dtype not in TOLERANCE or (device.type == "cpu" and dtype is not torch.float32):
        return {}
    counts, faults = _fused(model, device, dtype, wanted)
    for name, reason in faults.items():
        _log.warning("%s computes without a fused kernel: %s", name, reason)
    return counts


def faults(device: torch.device, dtype: torch.dtype, wanted: set[str]) -> dict[str, str]:
    """Tries the kernels on a small random model.

    Args:
        wanted: Which of `FUSED`.

    Returns:
        Class of module -> why it is not fused, as a clause; empty if nothing fails.
    """
    from transformers import AutoModelForCausalLM, Qwen2MoeConfig  # they bring the modelling code

    config = Qwen2MoeConfig(
        vocab_size=8,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=2,
        num_experts_per_tok=1,
    )
    return _fused(AutoModelForCausalLM.from_config(config), device, dtype, wanted)[1]


def _fused(
    model: nn.Module, device: torch.device, dtype: torch.dtype, wanted: set[str]
) -> tuple[dict[str, int], dict[str, str]]:
    """Returns the number of fused modules by class, and why others are not."""
    try:
        library = on_a_cpu() if device.type == "cpu" else liger()
    except Exception as error:
        package = "Numba" if device.type == "cpu" else "Liger-Kernel"
        return {}, {"Every module": f"{package} cannot be imported ({first_line(error)[:200]})"}
    fusion = Fusion(library, device, dtype)
    return fusion.fuse(model, wanted), fusion.faults


class Fusion:
    """Replaces the computation of modules.

    Attributes:
        faults: Class of module -> why one was left unchanged although its form allows it.
    """

    def __init__(self, library: Library, device: torch.device, dtype: torch.dtype) -> None:
        self.library = library
        self.device = device
        self.dtype = dtype
        self.faults: dict[str, str] = {}
        self._rotary: dict[type, Callable[..., Any] | None] = {}

    def fuse(self, model: nn.Module, wanted: set[str]) -> dict[str, int]:
        """Replaces what is `wanted` of `FUSED`; returns class of module -> number."""
        counts: Counter[str] = Counter()
        for module in model.modules():
            done = False
            if "norm" in wanted and is_norm(module):
                done = self._fuse_norm(module)
            elif "rotary" in wanted and (forward := self._with_rotary(type(module))) is not None:
                module.forward = MethodType(forward, module)
                done = True
            elif "swiglu" in wanted and has_gate(module):
                done = self._fuse_gate(module)
            elif "swiglu" in wanted and is_mlp(module):
                done = self._fuse_mlp(module)
            counts[type(module).__name__] += done
        return {name: count for name, count in counts.items() if count}

    def _fuse_norm(self, module: Any) -> bool:
        norm, takes = self.library.norm, self.library.takes

        def replaced(module: Any) -> Callable[[Tensor], Tensor]:
            own = module.forward

            def forward(hidden_states: Tensor) -> Tensor:
                weight = module.weight
                if not (takes(hidden_states) and takes(weight) and hidden_states.shape[-1:] == weight.shape):
                    return own(hidden_states)  # type: ignore[no-any-return]
                return norm(hidden_states, weight, module.variance_epsilon)

            return forward

        width = module.weight.shape[0]
        twin = stand_in(module, parameters={"weight": nn.Parameter(self._random(width), requires_grad=False)})
        return self._take(module, twin, "forward", replaced, (3, width))

    def _fuse_gate(self, module: Any) -> bool:
        gate, takes = self.library.gate, self.library.takes

        def replaced(module: Any) -> Callable[[Tensor], Tensor]:
            own = module._apply_gate

            def forward(gate_up_out: Tensor) -> Tensor:
                return gate(gate_up_out) if takes(gate_up_out) else own(gate_up_out)

            return forward

        return self._take(module, stand_in(module), "_apply_gate", replaced, (3, 2 * module.down_proj.shape[-1]))

    def _fuse_mlp(self, module: Any) -> bool:
        product, takes = self.library.product, self.library.takes

        def replaced(module: Any) -> Callable[[Tensor], Tensor]:
            own = module.forward

            def forward(hidden: Tensor) -> Tensor:
                if not takes(hidden):
                    return own(hidden)  # type: ignore[no-any-return]
                left, right = module.gate_proj(hidden), module.up_proj(hidden)  # of another dtype under autocast
                both = takes(left) and takes(right) and left.shape == right.shape
                return module.down_proj(product(left, right) if both else module.act_fn(left) * right)  # type: ignore[no-any-return]

            return forward

        outer, inner = PROBE_WIDTH, module.gate_proj.out_features
        shapes = {"gate_proj": (outer, inner), "up_proj": (outer, inner), "down_proj": (inner, outer)}
        linears = {name: self._linear(*sizes, seed) for seed, (name, sizes) in enumerate(shapes.items(), 1)}
        return self._take(module, stand_in(module, modules=linears), "forward", replaced, (3, outer))

    def _take(
        self,
        module: Any,
        twin: Any,
        name: str,
        replaced: Callable[[Any], Callable[[Tensor], Tensor]],
        shape: tuple[int, ...],
    ) -> bool:
        """Replaces a module's method, on this object alone, if the stand-in's results agree with the replacement's."""
        kind = type(module)
        settings = ((key, value) for key, value in vars(module).items() if isinstance(value, bool | int | float | str))
        form = (kind, name, shape, *sorted(settings), self.device, self.dtype)
        if form not in self.library.tried:
            faults = (
                self._fault(lambda x: [getattr(twin, name)(x)], lambda x: [replaced(twin)(x)], [factor * values])
                for values in [self._random(*shape)]
                for factor in PROBES
            )
            self.library.tried[form] = next(filter(None, faults), "")
        if fault := self.library.tried[form]:
            self.faults[kind.__name__] = fault
            return False
        setattr(module, name, replaced(module))
        return True

    def _with_rotary(self, kind: type) -> Callable[..., Any] | None:
        """Returns a class's `forward` with the fused rotary embedding; None if it has none, or a different one."""
        if kind in self._rotary:
            return self._rotary[kind]
        self._rotary[kind] = None
        forward = inspect.unwrap(kind.forward)  # type: ignore[attr-defined]
        names = forward.__globals__ if isinstance(forward, FunctionType) else {}
        if isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names and ROTARY in names:
            own, takes = names[ROTARY], self.library.takes

            def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
                if unsqueeze_dim != 1 or not (all(map(takes, (q, k, cos, sin))) and _are_rotary(q, k, cos, sin)):
                    return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
                return self.library.rotary(q, k, cos, sin)

            probes = [self._random(1, 5, heads, 16).transpose(1, 2) for heads in (4, 2)]
            angle = self._random(1, 5, 8).repeat(1, 1, 2)
            fault = self._fault(
                lambda q, k: own(q, k, angle.cos(), angle.sin()),
                lambda q, k: rotary(q, k, angle.cos(), angle.sin()),
                probes,
            )
            if fault:
                self.faults[kind.__name__] = fault
            else:
                copy = FunctionType(
                    forward.__code__,
                    {**names, ROTARY: rotary},
                    forward.__name__,
                    forward.__defaults__,
                    forward.__closure__,
                )
                copy.__kwdefaults__ = forward.__kwdefaults__
                self._rotary[kind] = copy
        return self._rotary[kind]

    def _fault(
        self, own: Callable[..., Sequence[Tensor]], replacement: Callable[..., Sequence[Tensor]], probes: list[Tensor]
    ) -> str:
        """Returns why a replacement is refused; empty if results and gradients agree with the module's own."""
        try:
            expected, found = self._computed(own, probes), self._computed(replacement, probes)
        except Exception as error:  # a function may have another form, or fail to compile
            return in_one_line(error)[:200]
        return "" if all(self._agree(*pair) for pair in zip(found, expected, strict=True)) else DIFFERS

    @torch.enable_grad()
    def _computed(self, function: Callable[..., Sequence[Tensor]], probes: list[Tensor]) -> list[Tensor]:
        """Returns a function's outputs and gradients; copies each probe, because a kernel may overwrite its input."""
        leaves = [probe.detach().clone().requires_grad_() for probe in probes]
        outputs = function(*(leaf * 1 for leaf in leaves))
        kept = [out.detach().clone() for out in outputs]
        sign = [torch.linspace(-1, 1, out.numel()).reshape(out.shape).to(out.device, out.dtype) for out in kept]
        return [*kept, *torch.autograd.grad(outputs, leaves, sign)]

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        same = found.shape == expected.shape and found.dtype is expected.dtype
        largest = expected.abs().max().clamp(min=1.0)
        return same and bool((found - expected).abs().max() <= TOLERANCE[self.dtype] * largest)

    def _random(self, *shape: int, seed: int = 0) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
        return values.to(self.device, self.dtype)

    def _linear(self, inner: int, outer: int, seed: int) -> nn.Linear:
        linear = nn.Linear(inner, outer, bias=False, device="meta")
        linear.weight = nn.Parameter(self._random(outer, inner, seed=seed) / inner**0.5, requires_grad=False)
        return linear


def stand_in(
    module: nn.Module,
    parameters: Mapping[str, nn.Parameter] | None = None,
    modules: Mapping[str, nn.Module] | None = None,
) -> Any:
    """Returns a module of the same class and settings with other parameters and submodules, without its hooks."""
    twin: Any = object.__new__(type(module))
    nn.Module.__init__(twin)
    ours = set(vars(twin))
    vars(twin).update({name: value for name, value in vars(module).items() if name not in ours})
    twin._parameters, twin._modules = {**(parameters or {})}, {**module._modules, **(modules or {})}
    twin.training = module.training
    return twin


def _are_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether the shapes are [B, h, T, d], [B, h', T, d], and twice [B or 1, T, d]."""
    if not query.dim() == key.dim() == 4 or key.shape[0] != len(query) or key.shape[2:] != query.shape[2:]:
        return False
    _, tokens, width = cos.shape if cos.dim() == 3 else (0, 0, 0)
    return cos.shape == sin.shape and (tokens, width) == query.shape[2:] and len(cos) in (1, len(query))


def is_norm(module: Any) -> bool:
    """Whether a module is an RMS norm as transformers writes it."""
    weight = getattr(module, "weight", None)
    has_both = isinstance(weight, Tensor) and weight.dim() == 1 and hasattr(module, "variance_epsilon")
    return type(module).__name__.endswith("RMSNorm") and has_both


def has_gate(module: Any) -> bool:
    """Whether a module are stacked experts gated by SiLU."""
    stacked = isinstance(getattr(module, "down_proj", None), Tensor)
    return stacked and callable(getattr(module, "_apply_gate", None)) and is_silu(module)


def is_mlp(module: Any) -> bool:
    """Whether a module is a dense MLP gated by SiLU."""
    linears = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    return all(isinstance(linear, nn.Linear) for linear in linears) and is_silu(module)


def is_silu(module: Any) -> bool:
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
