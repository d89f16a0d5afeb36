"""The gradient of clients' losses with respect to frozen weights, in full or as two narrow products of it.

A frozen weight W has no gradient, but a change D of it, held at zero, has the one that W would have.
Where G = dL/dW is too large to hold or to send, LoRA gives G Ω [out, k] and Ψ G [l, in] in the same
pass: with A = [Ωᵀ; 0] and B = [0, Ψᵀ] the product B A is zero, the gradient of B is G Aᵀ = [G Ω, 0] and
that of A is Bᵀ G = [0; Ψ G]. Ω and Ψ have entries ±1, which every floating dtype holds exactly.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.model.adapters.full_experts import FullExperts
from fedguild.model.adapters.full_linears import FullLinears
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.part import AdapterPart
from fedguild.model.plan import AdapterPlan
from fedguild.seeding import torch_rng


def full_weight_plan(plan: AdapterPlan) -> AdapterPlan:
    """Returns a plan whose trainables are changes `{module}.delta` of all weights that a plan's LoRA adapts."""
    targets = plan.lora.targets
    linears = tuple(target for target in targets if target not in ("router", "experts"))
    parts: list[AdapterPart] = [FullLinears(linears)] if linears else []
    parts += [FullRouter()] if "router" in targets else []
    parts += [FullExperts()] if "experts" in targets else []
    return AdapterPlan(tuple(parts), plan.active_experts)


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
        seed: What Ω and Ψ are drawn from.
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
    """Returns Ψ G as `{module}.lora_A` [.., l, in] and G Ω as `{module}.lora_B` [.., out, k], from LoRA's gradients."""
    return {
        name: (gradient[..., size:, :] if name.endswith("lora_A") else gradient[..., :size]).contiguous()
        for name, gradient in gradients.items()
    }


def mean_gradients(cohort: Cohort, sample: float) -> list[dict[str, Tensor]]:
    """Returns each slot's gradients of everything it trains, the mean over some optimizer steps; nothing is updated.

    Args:
        cohort: The clients, their adapters loaded.
        sample: Part of a client's examples to look at, rounded up to whole optimizer steps of the round.

    Returns:
        For each slot name -> fp32 gradient on the CPU, at the slot's own shape.
    """
    per_step = cohort.settings.batch_size * cohort.settings.accumulation
    most = [max(1, math.ceil(sample * len(work.examples) / per_step)) for work in cohort.work]
    sums: dict[str, Tensor] = {}
    for step in cohort.steps(most):
        step.backward(step.forward())
        if step.is_update:
            for name, trainable in cohort.trainables.items():
                grad = trainable.stored.grad
                if grad is not None:
                    sums[name] = sums[name] + grad if name in sums else grad
    return [
        {
            name: (trainable.own(slot, of=sums[name]) / report.steps).float().cpu().contiguous()
            for name, trainable in cohort.trainables.items()
            if trainable.shapes[slot] is not None
        }
        for slot, report in enumerate(cohort.reports)
    ]


def _random_signs(rows: int, columns: int, rng: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (rows, columns), generator=rng).float() * 2 - 1
