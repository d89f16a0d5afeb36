"""The Universal Pseudo-Gradient: the gradient that a client's inactive experts get from the other clients' progress.

UB-SMoE, Section 5.2, Algorithm 3 and appendix G.3. Expert LoRA is named
`{experts}.{projection}.lora_{A,B}`, each [M, …] with the experts first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from fedguild.model.adapters.storage import SlotTensor

Scaling = Literal["none", "root", "linear", "inverse_root", "log"]
Inactivity = Literal["batch", "token", "none"]


def pseudo_gradient(before: Mapping[str, Tensor], after: Mapping[str, Tensor], step_size: float) -> dict[str, Tensor]:
    """Returns G~ = (Theta^t - Theta^(t+1)) / (eta Gamma) of every name in `after` (Eq. 15).

    On the CPU and element by element, so that a client that holds both states gets the server's bits.

    Args:
        before: The global expert LoRA of round t.
        after: That of round t + 1.
        step_size: eta times Gamma; where it is 0 nothing moved, and G~ is 0.
    """
    if step_size == 0.0:
        return {name: torch.zeros_like(value, device="cpu") for name, value in after.items()}
    return {name: (before[name].cpu() - value.cpu()) / step_size for name, value in after.items()}


def scaling_factor(kind: Scaling, mean_active: float, active: int) -> float:
    """Returns rho_c (Eq. 16 is `root`; the others are Table 19's).

    Args:
        kind: How rho_c follows from K-bar / K_c.
        mean_active: K-bar, mean active experts of the federation.
        active: K_c, the client's.
    """
    ratio = mean_active / active
    return {
        "none": 1.0,
        "root": math.sqrt(ratio),
        "linear": ratio,
        "inverse_root": math.sqrt(1 / ratio),
        "log": math.log(ratio + 1),
    }[kind]


def clip_per_expert(gradient: Mapping[str, Tensor], limit: float | None) -> dict[str, Tensor]:
    """Returns G~ with every expert's norm, over all its LoRA tensors in a layer, at most `limit`.

    Args:
        gradient: Expert LoRA name -> [M, …].
        limit: The largest norm; None for no clipping.
    """
    if limit is None:
        return dict(gradient)
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for name, value in gradient.items():
        squares[_layer(name)] = squares[_layer(name)] + value.double().square().flatten(1).sum(dim=1)
    factors = {layer: (limit / square.sqrt()).clamp(max=1.0) for layer, square in squares.items()}
    return {
        name: value * factors[_layer(name)].to(value.dtype).view(-1, *[1] * (value.dim() - 1))
        for name, value in gradient.items()
    }


def inactive_share(counts: Tensor, tokens: Tensor, inactivity: Inactivity) -> Tensor:
    """Returns [L, S, M] how much of a step each expert counts as inactive, in [0, 1].

    Args:
        counts: [L, S, M] tokens of the optimizer step that activated each expert.
        tokens: [L, S] tokens of the step that the layer saw, those that its capacity dropped included.
        inactivity: `batch`: 1 where no token activated the expert, else 0 (Algorithm 3), and so in `none`,
            which has no G~; `token`: the share of tokens that did not, the mean of Eq. 16 over tokens.
    """
    if inactivity == "token":
        return 1.0 - counts / tokens.clamp(min=1)[..., None].double()
    return (counts == 0).double()


class ExpertGradients:
    """rho_c G~ of all slots of a cohort, laid out like the trainables that it is added to.

    Args:
        trainables: Name -> trainable of all slots.
        experts: Path of each MoE layer's experts, in layer order.
    """

    def __init__(self, trainables: Mapping[str, SlotTensor], experts: Sequence[str]) -> None:
        self._layers = [[t for name, t in trainables.items() if _layer(name) == path] for path in experts]
        sizes = [tensor.stored.shape[:2] for layer in self._layers for tensor in layer[:1]]
        most, slots = max(size[0] for size in sizes), sizes[0][1]
        self._buffers: dict[str, Tensor] = {}
        self._present = torch.zeros(
            len(experts), slots, most, dtype=torch.bool, device=self._layers[0][0].stored.device
        )

    def set(self, slot: int, gradient: Mapping[str, Tensor], rho: float) -> None:
        """Sets what a slot's inactive experts get: rho_c G~; left alone where that is zero.

        Args:
            slot: Index of the slot.
            gradient: G~, expert LoRA name -> [M, …] at the slot's own rank.
            rho: rho_c.
        """
        for index, layer in enumerate(self._layers):
            for trainable in layer:
                value = gradient[trainable.name]
                moved = value.flatten(1).any(dim=1).to(self._present.device)
                if not bool(moved.any()):
                    continue
                if trainable.name not in self._buffers:
                    self._buffers[trainable.name] = torch.zeros_like(trainable.stored, requires_grad=False)
                trainable.own(slot, of=self._buffers[trainable.name]).copy_(value * rho)
                self._present[index, slot, : len(moved)] |= moved

    @torch.no_grad()
    def inject(self, counts: Tensor, tokens: Tensor, inactivity: Inactivity) -> dict[str, Tensor] | None:
        """Adds rho_c G~ to the gradients in place of what inactive experts did not get (Eq. 16).

        Call it after the last backward pass of an optimizer step.

        Args:
            counts: [L, S, M] tokens of the step that activated each expert.
            tokens: [L, S] tokens of the step that each layer saw.
            inactivity: What counts as inactive.

        Returns:
            Name -> [M, S] bool, the experts that the optimizer should update: all but those
            without tokens and without G~, which AdamW would still decay and move by their
            momentum. None where that is all of them.
        """
        share = inactive_share(counts, tokens, inactivity)
        for index, layer in enumerate(self._layers):
            for trainable in layer:
                buffer, grad = self._buffers.get(trainable.name), trainable.stored.grad
                if buffer is not None and grad is not None:
                    factor = share[index, :, : buffer.shape[0]].T.to(grad.dtype)
                    grad.addcmul_(buffer, factor[:, :, None, None])
        learns = (counts > 0) | self._present
        if bool(learns.all()):
            return None
        return {
            t.name: learns[index, :, : t.stored.shape[0]].T for index, layer in enumerate(self._layers) for t in layer
        }


def experts_of(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the LoRA of the experts: `….experts.up_proj.lora_A`, not that of attention or routers."""
    return {name: value for name, value in tensors.items() if ".experts." in name}


def _layer(name: str) -> str:
    """Returns the path of the experts that a LoRA tensor belongs to: `….experts` of `….experts.up_proj.lora_A`."""
    return name.rsplit(".", 2)[0]
