"""Estimated memory of a backbone that is sharded over several GPUs, and the fewest GPUs that hold it.

Layers are split among the ranks; embeddings, the last norm and the head are replicated. Up to two layers are gathered
at a time (`fedguild.model.sharding`). Every rank trains other clients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from fedguild.engines.ray_actor import GATHERED_LAYERS
from fedguild.measuring.costs.memory import memory
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan

GPU_COUNTS = (1, 2, 4, 8, 16, 32, 64)
USABLE = 0.9
"""Share of a GPU's memory that is planned for; the rest is CUDA's, NCCL's and the allocator's."""


def layer_parameters(model: ModelInfo) -> list[int]:
    """Returns the parameters of every layer, without its norms, which are few and counted with the rest."""
    layers: dict[str, int] = defaultdict(int)
    for linear in model.linears:
        layers[_layer_of(linear.name)] += linear.inputs * linear.outputs
    for moe in model.moe:
        layers[_layer_of(moe.name)] += moe.num_experts * (moe.expert_parameters + moe.hidden)
    return list(layers.values())


def rank_bytes(
    model: ModelInfo,
    plan: AdapterPlan,
    tokens: int,
    ranks: int,
) -> int:
    """Returns an estimate of the peak memory of one rank's training step, in bf16, of one client with checkpointing.

    Args:
        plan: The client's plan.
        tokens: Tokens of a forward pass.
    """
    layers = layer_parameters(model)
    split, whole = sum(layers), model.parameters - sum(layers)
    held = whole + -(-split // ranks)
    if ranks > 1:
        held += GATHERED_LAYERS * max(layers)
    client = memory(model, plan, tokens, dtype=torch.bfloat16, checkpointing=True)
    return torch.bfloat16.itemsize * held + client.cohort_bytes


def fewest_gpus(model: ModelInfo, plan: AdapterPlan, tokens: int, gpu_bytes: int) -> int | None:
    """Returns the fewest GPUs, of `GPU_COUNTS`, that train one client each; None if even the most do not suffice."""
    fitting = (count for count in GPU_COUNTS if rank_bytes(model, plan, tokens, count) <= USABLE * gpu_bytes)
    return next(fitting, None)


def gpus_markdown(
    models: Sequence[ModelInfo], plans: Sequence[tuple[str, Sequence[AdapterPlan]]], tokens: int, sizes: Sequence[int]
) -> str:
    """Returns the fewest GPUs of each size for models and plans, in Markdown.

    Args:
        plans: A name and the plan for each model.
        sizes: The GPUs' memory in GiB.
    """
    head = ("model", "weights in bf16", "trained", "adapter", *(f"{size} GiB" for size in sizes))
    rows = [head, ("---", "---:", "---", "---:", *("---:" for _ in sizes))]
    for index, model in enumerate(models):
        for name, of_models in plans:
            plan = of_models[index]
            adapter = memory(model, plan, 1, dtype=torch.bfloat16).gradients_bytes
            counts = [fewest_gpus(model, plan, tokens, size * 2**30) for size in sizes]
            rows.append(
                (
                    model.name,
                    f"{2 * model.parameters / 2**30:,.0f} GiB",
                    name,
                    f"{adapter / 2**30:.2g} GiB" if adapter < 2**30 * 10 else f"{adapter / 2**30:.0f} GiB",
                    *(str(count) if count else "–" for count in counts),
                )
            )
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _layer_of(name: str) -> str:
    """Returns the path of the layer that a module belongs to: `model.layers.3` of `model.layers.3.mlp.gate`."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdecimal()), len(parts) - 1)
    return ".".join(parts[: at + 1])
