"""Sketches of a gradient as large as the model: two narrow products of it.

Source: J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical Sketching Algorithms for Low-Rank
Matrix Approximation", SIAM J. Matrix Anal. Appl., 2017, Algorithms 1, 4 and 7. G [out, in] is observed as
G Ω [out, k] and Ψ G [l, in]. Both are linear in G, so that the mean of several clients' sketches is the
sketch of their mean. If G's rank is at most k, nothing is lost.

LoRA gives both in one pass: with A = [Ωᵀ; 0] and B = [0, Ψᵀ] the product B A is zero, the gradient of B
is G Aᵀ = [G Ω, 0] and that of A is Bᵀ G = [0; Ψ G]. Ω and Ψ have entries ±1, which every floating dtype
holds exactly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.core.seeding import torch_rng
from fedguild.model.adapters.lora import DOWN, UP, Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.model.targets import targeted_shapes
from fedguild.server.low_rank import Factors


@contextmanager
def sketching(cohort: Cohort, size: int, seed: int) -> Iterator[Cohort]:
    """Puts clients, for the duration of a block, in slots of LoRA whose gradients hold the sketches of the weights'.

    Args:
        cohort: The clients, in slots of the plans whose LoRA names the adapted layers.
        size: k.
        seed: The seed of Ω and Ψ.

    Yields:
        The clients; `sketch_of` takes the sketches out of their gradients.
    """
    plans, model = cohort.model.plans, cohort.model.backbone.info
    factors = sketching_factors(targeted_shapes(model, plans[0].lora.targets), seed, size)
    with cohort.afresh([sketch_plan(plan, size) for plan in plans]) as again:
        for slot in range(len(cohort.work)):
            again.load(slot, factors)
        yield again


def sketch_shapes(model: ModelInfo, targets: tuple[str, ...], size: int) -> dict[str, tuple[int, ...]]:
    """Returns the names and shapes of `sketch_of`, those of G Ω first."""
    weights = targeted_shapes(model, targets)
    left = {f"{module}.{UP}": (*shape[:-1], size) for module, shape in weights.items()}
    right = {f"{module}.{DOWN}": (*shape[:-2], rows_of_psi(size), shape[-1]) for module, shape in weights.items()}
    return {**left, **right}


def rebuilt(gradients: Mapping[str, Tensor], seed: int) -> Iterator[tuple[str, Tensor]]:
    """Yields every module with its gradient [.., out, in], rebuilt where it is given by its sketches."""
    for name, value in gradients.items():
        module, leaf = name.rsplit(".", 1)
        if leaf == "delta":
            yield module, value
        elif leaf == UP:
            right = gradients[f"{module}.{DOWN}"]
            _, psi = probes(seed, module, value.shape[-2], right.shape[-1], value.shape[-1])
            factors = reconstructed(value, right, psi)
            yield module, factors.up @ factors.down


def reconstructed(left: Tensor, right: Tensor, psi: Tensor) -> Factors:
    """Returns the matrix that two sketches represent, as Q X with Q = orth(G Ω) and X = (Ψ Q)⁺ Ψ G.

    Rows and columns of zeros are restored as exact zeros, without rounding errors.

    Args:
        left: G Ω, [.., out, k].
        right: Ψ G, [.., l, in].
        psi: Ψ, [l, out], l ≥ k.
    """
    basis, _ = torch.linalg.qr(left)
    down = torch.linalg.lstsq(psi.to(basis) @ basis, right.to(basis)).solution
    return Factors(down * right.any(-2, keepdim=True), basis * left.any(-1, keepdim=True))


def sketch_plan(plan: AdapterPlan, size: int) -> AdapterPlan:
    """Returns a plan of LoRA whose gradients are the sketches of those of the adapted weights."""
    rank = size + rows_of_psi(size)
    return AdapterPlan((Lora(rank, 1.0, plan.lora.targets),), plan.active_experts)


def rows_of_psi(size: int) -> int:
    """Returns l for k = `size`: 2 k + 1 (Tropp et al., 2017, Section 4.5)."""
    return 2 * size + 1


def probes(seed: int, module: str, outputs: int, inputs: int, size: int) -> tuple[Tensor, Tensor]:
    """Returns Ω [in, k] and Ψ [l, out] of a module, the same for all of its experts."""
    rng = torch_rng(seed, "probes", module)
    return _random_signs(inputs, size, rng), _random_signs(rows_of_psi(size), outputs, rng)


def sketching_factors(weights: Mapping[str, tuple[int, ...]], seed: int, size: int) -> dict[str, Tensor]:
    """Returns the A and B whose gradients are sketches.

    Args:
        weights: Module -> shape of its weight, [out, in] or [M, out, in].
        seed: The seed of Ω and Ψ.
        size: k.
    """
    factors = {}
    for module, (*experts, outputs, inputs) in weights.items():
        omega, psi = probes(seed, module, outputs, inputs, size)
        down = torch.cat([omega.T, torch.zeros(len(psi), inputs)])
        up = torch.cat([torch.zeros(outputs, size), psi.T], dim=1)
        factors[f"{module}.lora_A"] = down.expand(*experts, *down.shape)
        factors[f"{module}.lora_B"] = up.expand(*experts, *up.shape)
    return factors


def sketch_of(gradients: Mapping[str, Tensor], size: int) -> dict[str, Tensor]:
    """Returns Ψ G as `{module}.lora_A` [.., l, in] and G Ω as `{module}.lora_B` [.., out, k], from LoRA's gradients.

    Gradients of whole weights, `{module}.delta`, stay as they are.
    """
    halves = {DOWN: lambda gradient: gradient[..., size:, :], UP: lambda gradient: gradient[..., :size]}
    return {
        name: halves[leaf](gradient).contiguous() if (leaf := name.rpartition(".")[2]) in halves else gradient
        for name, gradient in gradients.items()
    }


def _random_signs(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, columns), generator=rng).float() * 2 - 1
