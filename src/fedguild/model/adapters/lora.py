"""LoRA of several slots: s · B_c A_c x, where each row uses the factors of its own client.

Source: Hu et al., LoRA, 2021, Section 4.1. With a factor R between A and B it is s · B_c R_c A_c x.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.core.errors import ConfigError
from fedguild.model.adapters.part import AdapterHost, AdapterPart, OutputHook
from fedguild.model.adapters.storage import Layout, padded_rank
from fedguild.model.info import ModelInfo
from fedguild.model.moe.casts import Casts
from fedguild.model.on_device import kept_on_device, on_device
from fedguild.model.runtime import Pass
from fedguild.model.slot_low_rank import add_low_rank
from fedguild.model.slot_products import add_slot_rows_in_place, prefers_kernel, slot_rows
from fedguild.model.targets import leaf, targeted_shapes

DOWN, UP, MIDDLE = "lora_A", "lora_B", "lora_R"
RANK_AXES = {DOWN: (-2,), UP: (-1,), MIDDLE: (-2, -1)}
"""Leaf name of a factor -> its axes of length r."""


@dataclass(frozen=True)
class Lora(AdapterPart):
    """Trains `{module}.lora_A` [r, in] and `{module}.lora_B` [out, r] of every targeted layer.

    For experts the names are `{experts}.{gate,up,down}_proj.lora_A` [M, r, in] and `.lora_B` [M, out, r].

    Attributes:
        rank: r. A cohort's slots may differ in it.
        scale: Factor on the low-rank product, alpha / r in LoRA's notation.
        targets: Leaf names of linear layers (`q_proj`), the groups `attention` and `mlp` (dense
            MLPs and shared experts), `router`, and `experts` (every projection of every expert).
        dropout: Dropout rate on the input of the low-rank product of linear layers, in training.
        middle: Whether there is a factor `{module}.lora_R` [r, r] (for experts [M, r, r]) between A and B, which are
            then frozen.
        frozen: Leaf names (`lora_A`) of factors that are loaded but not trained.
        start_norm: Norm of A's rows when it is drawn, made orthogonal; None to leave them as they are drawn.
    """

    folds_into_weights = True

    rank: int
    scale: float
    targets: tuple[str, ...]
    dropout: float = 0.0
    middle: bool = False
    frozen: tuple[str, ...] = ()
    start_norm: float | None = None

    def __post_init__(self) -> None:
        listed: dict[str, object] = {"targets": self.targets, "frozen": self.frozen}
        for name, given in listed.items():
            if isinstance(given, str):
                raise ConfigError(f"{name} is the text {given!r}, where names are listed.", f"{name}: ({given!r},).")
        if self.rank < 1:
            raise ConfigError(f"A LoRA rank must be at least 1, but is {self.rank}.")
        if self.middle and not {DOWN, UP} <= set(self.frozen):
            raise ConfigError("With a factor between A and B, A and B must be frozen.", f"frozen: {DOWN}, {UP}.")
        if unknown := set(self.frozen) - {DOWN, UP, *([MIDDLE] if self.middle else [])}:
            raise ConfigError(f"The adapter has no {', '.join(sorted(unknown))} that could be frozen.")

    @property
    def cohort_key(self) -> object:
        """Targets, factors and the frozen ones among them; slots may differ in rank, scale and dropout."""
        return Lora, self.targets, self.middle, self.frozen

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns name -> shape of every factor.

        Raises:
            ConfigError: a target names no layer of this model.
        """
        shapes: dict[str, tuple[int, ...]] = {}
        for module, (*experts, outputs, inputs) in targeted_shapes(model, self.targets).items():
            shapes[f"{module}.{DOWN}"] = (*experts, self.rank, inputs)
            shapes[f"{module}.{UP}"] = (*experts, outputs, self.rank)
            if self.middle:
                shapes[f"{module}.{MIDDLE}"] = (*experts, self.rank, self.rank)
        return shapes

    def trains(self, name: str) -> bool:
        return leaf(name) not in self.frozen

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns random values for A and zeros for B and R, so that the product is zero."""
        if leaf(name) != DOWN:
            return torch.zeros(shape)
        drawn = kaiming_uniform(shape, rng)
        return drawn if self.start_norm is None else orthogonal_rows(drawn, self.start_norm)

    def layout(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Layout:
        """Returns [S, ..] for linear layers; [M, S, ..] with B transposed for experts.

        The (expert, slot) groups of experts are adjacent. Ranks are padded to rows of 16 bytes for grouped products.
        """
        sizes = list(shape)
        for axis in RANK_AXES[leaf(name)]:
            sizes[axis] = padded_rank(sizes[axis], dtype)
        in_experts = len(shape) == 3
        return Layout(tuple(sizes), axis=1 if in_experts else 0, swapped=in_experts and leaf(name) == UP)

    def attach(self, host: AdapterHost, parts: Sequence[Lora]) -> None:
        LoraHooks(host, parts).attach()


class LoraHooks:
    """Hooks that add the low-rank products of all slots to a backbone.

    Args:
        parts: Each slot's LoRA, in slot order.
    """

    def __init__(self, host: AdapterHost, parts: Sequence[Lora]) -> None:
        self._host = host
        self._modules = targeted_shapes(host.backbone.info, parts[0].targets)
        self._dropout = [part.dropout for part in parts]
        self._scale = on_device([part.scale for part in parts] * host.copies, host.device, host.dtype)
        self._ranks = [part.rank for part in parts] * host.copies
        self._casts = Casts()
        self._kinds = (DOWN, UP, MIDDLE) if parts[0].middle else (DOWN, UP)

    def attach(self) -> None:
        """Hooks the factors into linear layers, routers and experts."""
        host, inside_moe = self._host, set()
        for layer in host.backbone.moe:
            experts = [f"{layer.info.experts}.{projection}" for projection in layer.info.projections]
            inside_moe |= {layer.info.router, *experts}
            if layer.info.router in self._modules:
                layer.logit_terms.append(self._term(layer.info.router))
            if experts[-1] in self._modules:
                layer.expert_lora = tuple(self._factors(module) for module in experts)
                padded = layer.expert_lora[0][0].shape[-2]
                layer.expert_scale = self._scale_of_ranks(padded)
        for module in self._modules:
            if module not in inside_moe:
                linear = host.backbone.model.get_submodule(module)
                host.change_output(linear, self._linear_hook(module))

    def _scale_of_ranks(self, padded: int) -> Tensor:
        """Returns [S, r], LoRA's scale of each slot's ranks; 0 beyond the slot's own, in the padding of the storage."""
        ranks = kept_on_device(tuple(self._ranks), self._scale.device)
        own = torch.arange(padded, device=self._scale.device) < ranks[:, None]
        return torch.where(own, self._scale[:, None], 0.0)

    def _factors(self, module: str) -> tuple[Tensor, ...]:
        return tuple(self._host.running(f"{module}.{kind}") for kind in self._kinds)

    def _term(self, module: str) -> Callable[[Tensor], Tensor]:
        factors = ReadyFactors(self._scale, *self._factors(module))

        def term(hidden: Tensor) -> Tensor:
            current = self._host.backbone.runtime.current
            assert current is not None
            return through_factors(hidden, factors.of(hidden.dtype), current.rows_per_slot)

        return term

    def _linear_hook(self, module: str) -> OutputHook:
        ready = ReadyFactors(self._scale, *self._factors(module))
        down, up, *middle = self._factors(module)

        def hook(current: Pass, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
            hidden = self._host.dropout(args[0], module, current, self._dropout)
            rows = current.rows_per_slot
            if not in_place(output, hidden):
                return output + through_factors(hidden, ready.of(hidden.dtype), rows)
            if not middle:
                return add_low_rank(output, hidden, down, up, self._scale, rows, self._casts)
            *inner, last = ready.of(hidden.dtype)
            return add_slot_rows_in_place(output, through_factors(hidden, inner, rows), last, rows)

        return hook


def in_place(output: Tensor, hidden: Tensor) -> bool:
    return output.device.type != "cpu" and output.is_contiguous() and output.dtype is hidden.dtype


class ReadyFactors:
    """The factors of one layer as its products take them: A scaled, all in the dtype of the products.

    They are computed once and kept until a factor is written to: for all passes of a step, and for all passes of an
    evaluation, where generation has one per token.

    Args:
        scale: [S] LoRA's scale.
        down: A, [S, r, in].
        up: B, [S, out, r].
        middle: R, [S, r, r]; None if there is none.
    """

    def __init__(self, scale: Tensor, down: Tensor, up: Tensor, middle: Tensor | None = None) -> None:
        self._scale = scale
        self._down = down
        self._others = tuple(factor for factor in (middle, up) if factor is not None)
        self._casts = Casts()

    def of(self, dtype: torch.dtype) -> list[Tensor]:
        """Returns s A, R if there is one, and B, each [S, ..]."""
        down = self._casts.with_gradient(self._down, dtype, self._scale[:, None, None])
        return [down, *(self._casts.with_gradient(factor, dtype) for factor in self._others)]


def through_factors(hidden: Tensor, factors: Sequence[Tensor], rows: tuple[int, ...]) -> Tensor:
    """Returns s · B A x of every row, or s · B R A x, with the factors of the row's slot.

    Args:
        hidden: [..., in], slot-major: the rows of slot 0 first.
        factors: s A [S, r, in], R [S, r, r] if there is one, and B [S, out, r], in the dtype of the rows.
        rows: Rows of each slot, in any unit that divides `hidden`'s leading size.
    """
    shape = hidden.shape
    flat = hidden.reshape(-1, shape[-1])
    if prefers_kernel(flat, rows) or (flat.device.type != "cpu" and len(set(rows)) > 1):
        out = flat
        for factor in factors:
            out = slot_rows(out, factor, rows)
    elif len(rows) == 1:
        out = _through(flat, [factor[0] for factor in factors])
    elif len(set(rows)) == 1:
        out = _through(flat.view(len(rows), -1, shape[-1]), factors)
    else:
        unit = flat.shape[0] // sum(rows)
        parts = flat.split([count * unit for count in rows])
        out = torch.cat([_through(part, own) for part, *own in zip(parts, *factors, strict=True)])
    return out.reshape(*shape[:-1], factors[-1].shape[1])


def _through(rows: Tensor, factors: Sequence[Tensor]) -> Tensor:
    """Multiplies the rows [.., n, in] by each transposed factor [.., out, in] in turn."""
    for factor in factors:
        rows = rows @ factor.transpose(-1, -2)
    return rows


def kaiming_uniform(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Returns A's initial values: uniform in ±1/√in, which is peft's Kaiming initialisation with a = √5."""
    bound = 1 / math.sqrt(shape[-1])
    return (torch.rand(shape, generator=rng) * 2 - 1) * bound


def orthogonal_rows(down: Tensor, norm: float) -> Tensor:
    """Returns A with rows of equal norm, each orthogonal to those before (Gram-Schmidt).

    If a module has more ranks than inputs, its rows cannot be orthogonal and are only scaled to the norm.

    Args:
        down: A [.., r, in].
    """
    if down.shape[-2] > down.shape[-1]:
        rows: Tensor = down * (norm / down.norm(dim=-1, keepdim=True))
        return rows
    columns, upper = torch.linalg.qr(down.double().mT)
    rows = columns.mT * upper.diagonal(dim1=-2, dim2=-1).sign()[..., None] * norm
    return rows.to(down.dtype)
