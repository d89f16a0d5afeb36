"""Fused norms, rotary embeddings and gates of a frozen model on a GPU, from Liger-Kernel.

Source: Hsu et al., Liger Kernel, 2024 (arXiv:2410.10989). Its functions take the place of what a module computes, one
module object at a time: no class of transformers is changed, so that another model in the process stays as it is, and
there is no list of families, as Liger's own patches have, which lacks OLMoE. What a module computes is found by its
form, and a replacement is taken only if it agrees with the module itself on a few random values on the model's device:

- a norm with `weight` and `variance_epsilon` whose class is some `…RMSNorm`;
- an attention whose `forward` calls its file's `apply_rotary_pos_emb` (DeepSeek's interleaved one does not);
- the gate of stacked experts, and a dense MLP of three linear layers, with SiLU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn

from fedguild.model import kernels

ROTARY = "apply_rotary_pos_emb"
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-4}
"""Dtypes that are fused -> largest difference from the module's own result, relative to the largest value."""


@dataclass(frozen=True)
class Library:
    """The functions that take a module's place, all differentiable.

    Attributes:
        norm: (x [..., H], weight [H], epsilon) -> [..., H].
        rotary: (query [B, h, T, d], key, cos [B, T, d], sin) -> both rotated, possibly in place.
        gate: z [n, 2·I] -> silu of the first half times the second, [n, I].
        product: (a, b) -> silu(a) · b.
    """

    norm: Callable[[Tensor, Tensor, float], Tensor]
    rotary: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
    gate: Callable[[Tensor], Tensor]
    product: Callable[[Tensor, Tensor], Tensor]


def liger() -> Library:
    """Returns Liger-Kernel's functions, on the device of their tensors."""
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


def fuse(model: nn.Module, device: torch.device, dtype: torch.dtype) -> dict[str, int]:
    """Lets the modules of a frozen model on a GPU compute by fused kernels where they allow it.

    Args:
        model: The model, without gradients.
        device: Its device.
        dtype: The dtype of its activations.

    Returns:
        Class of module -> the number of them that are fused; empty on a CPU.
    """
    wanted = {name for name in ("norm", "rotary", "swiglu") if kernels.runs(name, device)}
    if not wanted or dtype not in TOLERANCE:
        return {}
    return Fusion(liger(), device, dtype).fuse(model, wanted)


class Fusion:
    """Replaces what modules compute.

    Args:
        library: The functions that take their place.
        device: The model's device.
        dtype: The dtype of its activations.
    """

    def __init__(self, library: Library, device: torch.device, dtype: torch.dtype) -> None:
        self.library = library
        self.device = device
        self.dtype = dtype
        self._rotary: dict[type, Callable[..., Any] | None] = {}

    def fuse(self, model: nn.Module, wanted: set[str]) -> dict[str, int]:
        """Replaces what is `wanted` of `norm`, `rotary` and `swiglu`; returns class of module -> number."""
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
        own, norm = module.forward, self.library.norm

        def forward(hidden_states: Tensor) -> Tensor:
            if not hidden_states.numel():
                return own(hidden_states)  # type: ignore[no-any-return]
            return norm(hidden_states, module.weight, module.variance_epsilon)

        return self._take(module, "forward", forward, self._random(3, module.weight.shape[0]))

    def _fuse_gate(self, module: Any) -> bool:
        own, gate = module._apply_gate, self.library.gate

        def forward(gate_up_out: Tensor) -> Tensor:
            return gate(gate_up_out) if gate_up_out.numel() else own(gate_up_out)

        return self._take(module, "_apply_gate", forward, self._random(3, 2 * module.down_proj.shape[-1]))

    def _fuse_mlp(self, module: Any) -> bool:
        own, product = module.forward, self.library.product

        def forward(hidden: Tensor) -> Tensor:
            if not hidden.numel():
                return own(hidden)  # type: ignore[no-any-return]
            return module.down_proj(product(module.gate_proj(hidden), module.up_proj(hidden)))  # type: ignore[no-any-return]

        return self._take(module, "forward", forward, self._random(3, module.gate_proj.in_features))

    @torch.no_grad()
    def _take(self, module: Any, name: str, replacement: Callable[[Tensor], Tensor], probe: Tensor) -> bool:
        """Sets a module's method, on this object alone, if both agree on a probe."""
        if not self._agree(replacement(probe), getattr(module, name)(probe)):
            return False
        setattr(module, name, replacement)
        return True

    @torch.no_grad()
    def _with_rotary(self, kind: type) -> Callable[..., Any] | None:
        """Returns a class's `forward` with the fused rotary embedding; None if it has none, or another."""
        if kind in self._rotary:
            return self._rotary[kind]
        self._rotary[kind] = None
        forward = kind.forward  # type: ignore[attr-defined]
        names = forward.__globals__ if isinstance(forward, FunctionType) else {}
        if isinstance(forward, FunctionType) and ROTARY in forward.__code__.co_names and ROTARY in names:
            own = names[ROTARY]

            def rotary(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
                if unsqueeze_dim != 1 or not q.numel():
                    return own(q, k, cos, sin, unsqueeze_dim=unsqueeze_dim)  # type: ignore[no-any-return]
                return self.library.rotary(q, k, cos, sin)

            query, key = self._random(1, 5, 4, 16).transpose(1, 2), self._random(1, 5, 2, 16).transpose(1, 2)
            angle = self._random(1, 5, 8).repeat(1, 1, 2)
            expected = own(query, key, angle.cos(), angle.sin())
            found = rotary(query.clone(), key.clone(), angle.cos(), angle.sin())
            if all(self._agree(*pair) for pair in zip(found, expected, strict=True)):
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

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        same = found.shape == expected.shape and found.dtype is expected.dtype
        largest = expected.abs().max().clamp(min=1.0)
        return same and bool((found - expected).abs().max() <= TOLERANCE[self.dtype] * largest)

    def _random(self, *shape: int) -> Tensor:
        values = torch.randn(shape, generator=torch.Generator().manual_seed(0))
        return values.to(self.device, self.dtype)


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
    """Whether a module's `act_fn` is SiLU."""
    return type(getattr(module, "act_fn", None)).__name__ in ("SiLU", "SiLUActivation")
