"""Many low-rank changes of a backbone folded into one dense change, D = sum_v B_v A_v in fp32.

The server folds, and so does every site that has the factors; the dense change is sent only to sites that lack them.
All must get the same bits, since a digest of them is compared. Matrix products differ in the last bit between machines
and numbers of threads. So D is summed rank by rank, one rounded product and one rounded sum per element, in the order
of versions and ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import torch
from torch import Tensor

CHANGE = "change"
"""The leaf of a dense change's name, `{module}.change` [.., out, in]; of the factors they are `lora_A` and `lora_B`."""
PIECE = 1 << 17
"""Elements of D that are summed at a time, which fit a core's cache."""


def dense_sizes(versions: Iterable[Mapping[str, Tensor]]) -> dict[str, int]:
    """Returns module -> elements of its dense change.

    Args:
        versions: `{module}.lora_A` [.., R, in] and `.lora_B` [.., out, R], or `{module}.change`, of each version.
    """
    sizes: dict[str, int] = {}
    for version in versions:
        for name, tensor in version.items():
            module, _, leaf = name.rpartition(".")
            if leaf == CHANGE:
                sizes[module] = tensor.numel()
            elif leaf == "lora_A":
                up = version[f"{module}.lora_B"]
                sizes[module] = prod(up.shape[:-1]) * tensor.shape[-1]
    return sizes


@torch.no_grad()
def folded(versions: Iterable[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Returns `{module}.change` [.., out, in] fp32 of all versions together; the same bits on every machine.

    Args:
        versions: As `dense_sizes` takes them, the oldest first; a dense change holds all versions before it.
    """
    total: dict[str, Tensor] = {}
    for version in versions:
        for name, tensor in sorted(version.items()):
            module, _, leaf = name.rpartition(".")
            key = f"{module}.{CHANGE}"
            if leaf == CHANGE:
                total[key] = tensor.to(torch.float32, copy=True)
            elif leaf == "lora_A":
                up = version[f"{module}.lora_B"]
                if key not in total:
                    total[key] = torch.zeros(*up.shape[:-1], tensor.shape[-1], device=up.device)
                _add_product(total[key], up.float(), tensor.float())
    return dict(sorted(total.items()))


def _add_product(total: Tensor, up: Tensor, down: Tensor) -> None:
    """Adds up [.., out, R] @ down [.., R, in] to total [.., out, in], rank by rank."""
    if total.is_meta or not total.numel():
        return
    out, inner = total.shape[-2:]
    matrices = total.view(-1, out, inner)
    ups, downs = up.reshape(len(matrices), out, -1), down.reshape(len(matrices), -1, inner)
    rows = min(out, max(1, PIECE // inner))
    several = max(1, PIECE // (out * inner))
    for first in range(0, len(matrices), several):
        some = slice(first, first + several)
        for top in range(0, out, rows):
            piece = matrices[some, top : top + rows]
            for rank in range(ups.shape[-1]):
                piece += ups[some, top : top + rows, rank, None] * downs[some, rank, None]
