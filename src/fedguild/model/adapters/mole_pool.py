"""Experts by their place in the pool: how a mixture's stacks travel when every client holds others.

A stack `{module}.experts.{leaf}` [n, ..] holds one expert in each row. On its own, the expert with
the id j of the pool is `{module}.experts.{j}.{leaf}` [..]. The leaves are `lora_A`, `lora_B`, and
whatever else belongs to an expert.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

STACK = ".experts"


def held_experts(names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Returns module -> the ids of its experts in ascending order, as the names of single experts tell."""
    found: dict[str, set[int]] = {}
    for name in names:
        stack, expert, _ = name.rsplit(".", 2)
        found.setdefault(stack.removesuffix(STACK), set()).add(int(expert))
    return {module: tuple(sorted(ids)) for module, ids in found.items()}


def single_experts(stacks: Mapping[str, Tensor], held: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """Returns the experts of stacks one by one, as views.

    Args:
        stacks: `{module}.experts.{leaf}` -> [n, ..].
        held: Module -> the ids of the first rows; rows beyond them are left out.
    """
    experts = {}
    for name, rows in stacks.items():
        stack, _, leaf = name.rpartition(".")
        ids = held[stack.removesuffix(STACK)]
        experts.update({f"{stack}.{expert}.{leaf}": row for expert, row in zip(ids, rows[: len(ids)], strict=True)})
    return experts


def stacked_experts(experts: Mapping[str, Tensor], rows: int) -> dict[str, Tensor]:
    """Returns stacks of `rows` rows: the experts in ascending order of their ids, then zeros.

    Args:
        experts: `{module}.experts.{id}.{leaf}` -> [..].
        rows: At least as many as a module has experts.
    """
    members: dict[str, dict[int, Tensor]] = {}
    for name, value in experts.items():
        stack, expert, leaf = name.rsplit(".", 2)
        members.setdefault(f"{stack}.{leaf}", {})[int(expert)] = value
    stacks = {name: torch.stack([own[expert] for expert in sorted(own)]) for name, own in members.items()}
    return {
        name: pad(stack, (*[0] * (2 * stack.dim() - 1), rows - len(stack))) if len(stack) < rows else stack
        for name, stack in stacks.items()
    }
