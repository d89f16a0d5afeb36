"""The product of a mixture of LoRA experts on one layer: against loops, and worked out by hand."""

from __future__ import annotations

import pytest
import torch

from fedguild.methods.fedamole.kernel import Gating, Tokens, mixture_product
from fedguild.model.runtime import Pass
from tests.oracles.mole import LoopedModule


@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("router", ["invariant", "vanilla"])
@pytest.mark.parametrize("shared", [True, False], ids=["shared", "no shared"])
@pytest.mark.parametrize("rows", [(2, 3, 0), (4, 4), (5,)], ids=str)
def test_one_layer_against_loops(rows, shared, router, dropout):
    """Values and gradients, also of W h and h; the router does not see the dropout."""
    inputs, outputs, rank, pool, capacity, held = 5, 6, 3, 7, 4, [[6, 0, 2], [1, 5], [3, 4, 0, 1]]
    rng = torch.Generator().manual_seed(1)

    def leaf(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng, dtype=torch.float64).requires_grad_()

    slots, count = len(rows), sum(rows)
    stored = {
        "experts.lora_A": leaf(slots, capacity, rank, inputs),
        "experts.lora_B": leaf(slots, capacity, outputs, rank),
        "router": leaf(slots, rank if router == "invariant" else pool, inputs),
    }
    if shared:
        stored |= {"shared.lora_A": leaf(slots, rank, inputs), "shared.lora_B": leaf(slots, outputs, rank)}
    output, hidden = leaf(count, outputs), leaf(count, inputs)
    dropped = leaf(count, inputs) if dropout else hidden
    sizes = torch.tensor([len(own) for own in held[:slots]])
    widest = int(sizes.max())
    gating = Gating(
        rows=widest,
        top_k=2,
        scale=0.7,
        score_scale=rank**-0.5 if router == "invariant" else None,
        renormalise=True,
        held=sizes,
        blocked=torch.arange(widest) >= sizes[:, None] if slots > 1 else None,
        ids=torch.tensor([own + [0] * (widest - len(own)) for own in held[:slots]]),
    )
    tokens = Tokens.of(Pass(rows, None, None, 1), count, torch.device("cpu"), torch.float64)
    found, p, _ = mixture_product(output, hidden, dropped, stored, gating, tokens)
    expected, probabilities = [], []
    for at, slot in enumerate(slot for slot, number in enumerate(rows) for _ in range(number)):
        own = {name: value[slot] for name, value in stored.items()}
        looped_module = LoopedModule(own, held[slot], 2, 0.7, rank**0.5, True, router == "vanilla")
        expected.append(output[at] + looped_module.token(hidden[at], dropped[at]))
        probabilities.append(torch.nn.functional.pad(looped_module.probabilities[0], (0, widest - len(held[slot]))))
    assert torch.allclose(found, torch.stack(expected), rtol=1e-12)
    assert torch.allclose(p, torch.stack(probabilities), rtol=1e-12)
    upstream, upstream_p = leaf(*found.shape).detach(), leaf(*p.shape).detach()
    leaves = {**stored, "output": output, "hidden": hidden, **({"dropped": dropped} if dropout else {})}
    ours = torch.autograd.grad((found * upstream).sum() + (p * upstream_p).sum(), list(leaves.values()))
    objective = (torch.stack(expected) * upstream).sum() + (torch.stack(probabilities) * upstream_p).sum()
    theirs = torch.autograd.grad(objective, list(leaves.values()))
    for name, mine, wanted in zip(leaves, ours, theirs, strict=True):
        assert torch.allclose(mine, wanted, rtol=1e-9, atol=1e-12), name
