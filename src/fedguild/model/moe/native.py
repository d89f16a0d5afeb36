"""Check of a family against the model itself, when it is loaded: the rule with the router, the view with the experts.

The first layer of each kind is tried. A copy of its router, in fp32 and with random weights and biases, routes random
hidden states, and the family's rule must choose the same experts with the same weights. The layer's own experts compute
a few of these tokens before the family changes them and again through the view. No generator of the run is used, and
the model's router is not run.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedguild.core.errors import ModelError
from fedguild.model.moe.dense import shares
from fedguild.model.moe.family import Family, moe_blocks, unlike
from fedguild.model.moe.routing import route, within_capacity
from fedguild.model.moe.view import MoeLayer

TOKENS, TOKENS_OF_EXPERTS = 32, 4
TOLERANCE = {torch.float16: 2e-2, torch.bfloat16: 6e-2}
"""Largest difference of the experts' outputs, as a share of their largest value; `FINE` in other dtypes."""
FINE = 1e-3


@dataclass(frozen=True)
class NativeLayer:
    """What a layer of transformers computes on random hidden states.

    Attributes:
        path: The layer's block.
        routed: A copy of the block with a random router.
        hidden: [N, H] what that router got.
        router_output: What that router returned.
        inputs: The arguments of the experts for a few tokens.
        output: What the experts returned for them.
    """

    path: str
    routed: Any
    hidden: Tensor
    router_output: Any
    inputs: tuple[Tensor, ...]
    output: Tensor

    @classmethod
    @torch.no_grad()
    def of(cls, path: str, block: Any, router: str, hidden: int) -> NativeLayer:
        """Runs a block before its family changes it.

        Args:
            router: The router's name in the block.
            hidden: H.
        """
        rng = torch.Generator().manual_seed(0)
        routed, seen = _with_random_router(block, router, rng)
        passes: list[tuple[tuple[Tensor, ...], Any]] = []
        getattr(routed, router).register_forward_hook(lambda _, args, output: passes.append((args, output)))
        for tokens in (TOKENS, TOKENS_OF_EXPERTS):
            routed(torch.randn(1, tokens, hidden, generator=rng, dtype=torch.float32))
        weight = next(block.experts.parameters())
        inputs = tuple(
            value.to(weight.device, weight.dtype if value.is_floating_point() else None) for value in seen.inputs
        )
        plain = type(block.experts).forward  # grouped products have not every dtype
        output = getattr(plain, "__wrapped__", plain)(block.experts, *inputs)
        (given, *_), routes = passes[0]
        return cls(path, routed, given.flatten(0, -2), routes, inputs, output)


def native_layers(model: Any, family: Family) -> list[NativeLayer]:
    """Returns the first layer of each kind; none if the weights are on `meta`.

    Raises:
        ModelError: a layer is not built as the family's layers are.
    """
    hidden, seen, layers = int(model.config.get_text_config().hidden_size), set(), []
    for path, block in moe_blocks(model):
        kind = type(block), type(getattr(block, family.router, None))
        if kind in seen or any(parameter.is_meta for parameter in block.parameters()):
            continue
        seen.add(kind)
        try:
            layers.append(NativeLayer.of(path, block, family.router, hidden))
        except Exception as error:
            raise unlike(model, path, block, error) from error
    return layers


def check(model: Any, family: Family, layers: Sequence[MoeLayer], natives: Sequence[NativeLayer]) -> None:
    """Compares a family with the model's own layers.

    Args:
        layers: The model's layers, attached to the view.

    Raises:
        ModelError: they differ.
    """
    name = str(model.config.model_type)
    for native in natives:
        layer = next(layer for layer in layers if layer.info.name == native.path)
        try:
            _check_router(family, name, layer, native)
        except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
            raise unlike(model, native.path, native.routed, error) from error
        _check_experts(name, layer, native)


def _check_router(family: Family, name: str, layer: MoeLayer, native: NativeLayer) -> None:
    router, experts = getattr(native.routed, family.router), layer.info.num_experts
    logits, *own = family.decoded(native.router_output)
    rule = family.rule(router)
    ours = route(logits, rule, layer.info.top_k, None, family.selection_bias(native.routed))
    if layer.capacity is not None:
        ours = within_capacity(*ours, layer.capacity, experts, rows=1)
    expected, found = (shares(weights.double(), indices, None, experts) for weights, indices in (own, ours))
    weight = native.routed.get_parameter(layer.info.router.removeprefix(f"{native.path}.") + ".weight")
    rest = logits.double() - native.hidden.double() @ weight.double().T
    if (rest - rest[0]).abs().max() > FINE * logits.abs().max():
        raise ModelError(
            f"The logits of {type(router).__name__} of {native.path} are no linear function of its input with the "
            f"weight that the family '{name}' names, {layer.info.router}.weight: LoRA would not be what it says.",
            "Correct the family's `router`, `projection` or `decoded`.",
        )
    differs = (expected - found).abs().amax(dim=1)
    if differs.isfinite().all() and differs.max() <= FINE * expected.abs().max():
        return
    token = int(differs.nan_to_num(torch.inf).argmax())
    raise ModelError(
        f"The family '{name}' does not route as {type(router).__name__} of {native.path} does. On random hidden states "
        f"the model takes {_shown(expected[token])}, and the family's rule {rule} takes {_shown(found[token])}.",
        "Correct the family's rule, or update the package that it comes from.",
    )


@torch.no_grad()
def _check_experts(name: str, layer: MoeLayer, native: NativeLayer) -> None:
    expected, found = native.output.float(), layer.experts(*native.inputs).float()
    largest = float(expected.abs().max())
    differs = float((expected - found).abs().max()) if expected.shape == found.shape else float("nan")
    if differs <= TOLERANCE.get(native.output.dtype, FINE) * largest or not expected.isfinite().all():
        return
    raise ModelError(
        f"The family '{name}' does not compute the experts as {type(layer.experts).__name__} of {native.path} does: "
        f"on random hidden states the outputs differ by {differs:.2g}, the model's being up to {largest:.2g}.",
        "Correct the family's `frozen` or `prepare`, or update the package that it comes from.",
    )


def _shown(shares: Tensor) -> str:
    return ", ".join(f"expert {index} with {float(shares[index]):.3f}" for index in shares.nonzero().flatten().tolist())


class _Seen(nn.Module):
    """Returns a copy of its first argument and keeps all of them."""

    def forward(self, *args: Tensor, **_: Any) -> Tensor:
        self.inputs = args
        return args[0].clone()


def _with_random_router(block: Any, router: str, rng: torch.Generator) -> tuple[Any, _Seen]:
    """Returns a copy of a block in fp32 on the CPU, and what is in place of its experts.

    All modules but the router return their input. The router's weights and biases are random, and so are the block's.
    """
    seen = _Seen()
    copied = {id(child): _Seen() for name, child in block.named_children() if name not in (router, "experts")}
    twin: Any = copy.deepcopy(block, {**copied, id(block.experts): seen}).to("cpu", torch.float32)
    for tensor in (*twin.parameters(), *twin.buffers()):
        if tensor.is_floating_point():
            values = torch.randn(tensor.shape, generator=rng, dtype=torch.float32)
            tensor.copy_(values / tensor.shape[-1] ** 0.5 if tensor.dim() > 1 else 0.3 * values)
    return twin, seen
