"""The Universal Pseudo-Gradient: the gradient that a client's inactive experts get from the other clients' progress.

UB-SMoE, Section 5.2, Algorithm 3 and appendix G.3. Expert LoRA is named
`{experts}.{projection}.lora_{A,B}`, each [M, …] with the experts first.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor

from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.targets import layer_of

Scaling = Literal["none", "root", "linear", "inverse_root", "log"]
Inactivity = Literal["batch", "token", "none"]
Norm = Literal["published", "expert"]
Value = TypeVar("Value")


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
    return _scaled(gradient, {layer: (limit / norm).clamp(max=1.0) for layer, norm in expert_norms(gradient).items()})


def unit_per_expert(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns G~ with every expert's norm, over all its LoRA tensors in a layer, 1; an expert without G~ keeps 0.

    Args:
        gradient: Expert LoRA name -> [M, …].
    """
    norms = expert_norms(gradient)
    return _scaled(gradient, {layer: torch.where(norm > 0, 1 / norm, 0.0) for layer, norm in norms.items()})


def expert_norms(gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns path of a layer's experts -> [M] fp64, the norm of each expert's part of a gradient."""
    squares: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
    for name, value in gradient.items():
        squares[layer_of(name)] = squares[layer_of(name)] + value.double().square().flatten(1).sum(dim=1)
    return {layer: square.sqrt() for layer, square in squares.items()}


def _scaled(gradient: Mapping[str, Tensor], factors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns a gradient of experts times a factor for each expert, by the path of a layer's experts -> [M]."""
    return {
        name: value * factors[layer_of(name)].to(value.dtype).view(-1, *[1] * (value.dim() - 1))
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
    """rho_c G~ of all slots of a cohort, laid out like the trainables that it is added to, and what became of it.

    Args:
        trainables: Name -> trainable of all slots.
        experts: Path of each MoE layer's experts, in layer order.
        norm: `published`: G~ as it is; `expert`: of the norm of the expert's own gradient, its mean over the steps of
            the round in which it had tokens, or where it had none over the layer's experts that had. G~ has to be of
            norm 1 then.
    """

    def __init__(self, trainables: Mapping[str, SlotTensor], experts: Sequence[str], norm: Norm = "published") -> None:
        self._layers = [[t for name, t in trainables.items() if layer_of(name) == path] for path in experts]
        sizes = [tensor.stored.shape[:2] for layer in self._layers for tensor in layer[:1]]
        most, slots = max(size[0] for size in sizes), sizes[0][1]
        device = self._layers[0][0].stored.device
        self._norm = norm
        self._buffers: dict[str, Tensor] = {}
        self._present = torch.zeros(len(experts), slots, most, dtype=torch.bool, device=device)
        self._sizes = torch.zeros(len(experts), slots, most, dtype=torch.float64, device=device)
        self._own = torch.zeros(2, len(experts), slots, most, dtype=torch.float64, device=device)
        self._injected = torch.zeros(2, len(experts), slots, dtype=torch.float64, device=device)
        self._idle = torch.zeros(2, len(experts), slots, dtype=torch.float64, device=device)

    def set(self, slot: int, gradient: Mapping[str, Tensor], rho: float) -> None:
        """Sets what a slot's inactive experts get: rho_c G~; left alone where that is zero.

        Args:
            slot: Index of the slot.
            gradient: G~, expert LoRA name -> [M, …] at the slot's own rank.
            rho: rho_c.
        """
        norms = expert_norms(gradient)
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
            sizes = norms[layer_of(layer[0].name)] * rho
            self._sizes[index, slot, : len(sizes)] = sizes.to(self._sizes.device)

    @torch.no_grad()
    def inject(self, counts: Tensor, tokens: Tensor, inactivity: Inactivity) -> dict[str, Tensor]:
        """Adds rho_c G~ to the gradients in place of what inactive experts did not get (Eq. 16).

        Call it after the last backward pass of an optimizer step.

        Args:
            counts: [L, S, M] tokens of the step that activated each expert.
            tokens: [L, S] tokens of the step that each layer saw.
            inactivity: What counts as inactive.

        Returns:
            Name -> [M, S] bool, the experts that the optimizer should update: all but those
            without tokens and without G~, which AdamW would still decay and move by their
            momentum.
        """
        share = inactive_share(counts, tokens, inactivity)
        takes_part = tokens.sum(0) > 0  # not a slot that has finished
        self._measure(counts, takes_part)
        if self._norm == "expert":
            share = share * self._references()
        self._record(share * takes_part[None, :, None])
        for index, layer in enumerate(self._layers):
            for trainable in layer:
                buffer, grad = self._buffers.get(trainable.name), trainable.stored.grad
                if buffer is not None and grad is not None:
                    factor = share[index, :, : buffer.shape[0]].T.to(grad.dtype)
                    grad.addcmul_(buffer, factor[:, :, None, None])
        learns = (counts > 0) | self._present
        return {
            t.name: learns[index, :, : t.stored.shape[0]].T for index, layer in enumerate(self._layers) for t in layer
        }

    def figures(self, slot: int) -> tuple[Tensor, Tensor]:
        """Returns what became of a slot's experts in the round so far, each [L] in fp32 on the CPU.

        Returns:
            The share of expert-steps without a token; and the mean norm of what was injected over the mean norm of an
            expert's own gradient in a step with tokens, 0 where nothing was injected.
        """
        idle = self._idle[0, :, slot] / self._idle[1, :, slot].clamp(min=1)
        own = self._own[0, :, slot].sum(-1) / self._own[1, :, slot].sum(-1).clamp(min=1)
        injected = self._injected[0, :, slot] / self._injected[1, :, slot].clamp(min=1)
        ratio = torch.where(own > 0, injected / own, 0.0)
        return idle.float().cpu(), ratio.float().cpu()

    def _measure(self, counts: Tensor, takes_part: Tensor) -> None:
        """Adds the step's idle experts, and the norms of the gradients of those that had tokens."""
        for index, (layer, had) in enumerate(zip(self._layers, counts, strict=True)):
            experts = layer[0].stored.shape[0]
            norms = [torch.linalg.vector_norm(t.stored.grad, dim=(2, 3)) for t in layer if t.stored.grad is not None]
            active = had[:, :experts] > 0
            if norms:
                norm = torch.linalg.vector_norm(torch.stack(norms).double(), dim=0).T
                self._own[0, index, :, :experts] += torch.where(active, norm, 0.0)
                self._own[1, index, :, :experts] += active
            self._idle[0, index] += (~active).sum(-1) * takes_part
            self._idle[1, index] += experts * takes_part

    def _references(self) -> Tensor:
        """Returns [L, S, M], the norm of each expert's own gradient so far in the round."""
        sums, counts = self._own
        of_layer = sums.sum(-1, keepdim=True) / counts.sum(-1, keepdim=True).clamp(min=1)
        return torch.where(counts > 0, sums / counts.clamp(min=1), of_layer)

    def _record(self, factor: Tensor) -> None:
        """Adds the norms of what is injected, each expert's G~ times a factor [L, S, M]."""
        norms = self._sizes * factor
        self._injected[0] += norms.sum(-1)
        self._injected[1] += (norms > 0).sum(-1)


def experts_of(tensors: Mapping[str, Value]) -> dict[str, Value]:
    """Returns the LoRA of the experts: `….experts.up_proj.lora_A`, not that of attention or routers."""
    return {name: value for name, value in tensors.items() if ".experts." in name}
