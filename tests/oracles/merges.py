"""Changed backbones, weight by weight and expert by expert, in fp64: W = W_0 + sum over versions of B A."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from tests.oracles.low_rank import dense_product


def change_of(merges: Mapping[str, Tensor], module: str) -> Tensor | None:
    """The sum of a module's changes [.., out, in]; None where there is none."""
    total = None
    for name in merges:
        version, _, rest = name.partition("/")
        if rest == f"{module}.lora_A":
            change = dense_product(merges[name], merges[f"{version}/{module}.lora_B"])
            total = change if total is None else total + change
    return total


def changed_weights(weights: Mapping[str, Tensor], merges: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Every weight by its name in transformers, with its changes added; gate above up in `gate_up_proj`."""
    changed = {name: weight.double() for name, weight in weights.items()}
    for name, weight in changed.items():
        path, _, leaf = name.rpartition(".")
        if leaf == "gate_up_proj":
            half = weight.shape[1] // 2
            for start, projection in ((0, "gate_proj"), (half, "up_proj")):
                change = change_of(merges, f"{path}.{projection}")
                for expert in range(len(weight)):
                    if change is not None:
                        weight[expert, start : start + half] += change[expert]
        else:
            module = path if leaf == "weight" else name
            change = change_of(merges, module)
            if change is not None:
                weight += change
    return changed
