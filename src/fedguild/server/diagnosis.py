"""Figures of what averaging does to the clients' changes, which any method with shared adapters can report of a round.

They hold for tensors under `adapter/` that an upload has with the name and shape of the state's. A client without any
such tensor is left out, and so is, for all, a tensor that one of the other clients lacks or has in another shape.
p_i is a client's share of the round's examples, Delta_i its change of a tensor since the round's state, A_i and B_i its
factors of a low-rank product. A method that weighs clients otherwise is measured with p_i too, so that methods compare.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.info import ModelInfo
from fedguild.server.method import Observation
from fedguild.server.terms import Upload

SHRINKAGE = "shrinkage by averaging, sum p_i |Delta_i|^2 / |sum p_i Delta_i|^2"
INEXACTNESS = "inexactness of averaging A and B apart, |sum p_i B_i A_i - B A| / |sum p_i B_i A_i|"
IDLE = "idle experts, chosen less than a tenth as often as on average"
A, B = "lora_A", "lora_B"
FEW = 0.1
"""An expert is idle below this part of an even share of the activations."""


class Diagnosis:
    """Looks at the uploads of one round on their way to the method, and keeps them until the round has ended.

    Args:
        state: The method's state before the round.
        model: The backbone.
    """

    def __init__(self, state: Payload, model: ModelInfo) -> None:
        self._before, self._model = state.part(ADAPTER), model
        self._seen: dict[tuple[int, int], tuple[float, Mapping[str, Tensor]]] = {}

    def look_at(self, upload: Upload) -> None:
        """Keeps what there is to see of an upload."""
        adapter = upload.payload.part(ADAPTER)
        alike = {
            name: tensor
            for name, tensor in adapter.items()
            if name in self._before and tensor.shape == self._before[name].shape
        }
        if alike and upload.client.examples > 0:
            self._seen[upload.round, upload.client.index] = (float(upload.client.examples), alike)

    def forget(self, upload: Upload) -> None:
        """Leaves out an upload that is not aggregated after all."""
        self._seen.pop((upload.round, upload.client.index), None)

    @property
    def _uploads(self) -> list[tuple[float, Mapping[str, Tensor]]]:
        return list(self._seen.values())

    def observations(self, frequency: Mapping[int, Tensor] | None = None) -> list[Observation]:
        """Returns the figures of the round: of what the clients sent, and of the experts that they activated.

        Args:
            frequency: Client whose upload was aggregated -> [L, M] share of its tokens that activated each expert; None
                for a dense model.
        """
        found = []
        if len(self._uploads) > 1:
            found += [_by_group(SHRINKAGE, shrinkage(self._changes(), self._shares())), self._inexactness()]
        if frequency:
            found.append(_idle(list(frequency.values())))
        return [one for one in found if one is not None]

    def _shares(self) -> list[float]:
        total = sum(weight for weight, _ in self._uploads)
        return [weight / total for weight, _ in self._uploads]

    def _changes(self) -> dict[str, dict[str, list[Tensor]]]:
        """Returns group -> tensor -> every client's change."""
        names = [name for name in self._before if all(name in adapter for _, adapter in self._uploads)]
        groups: dict[str, dict[str, list[Tensor]]] = defaultdict(dict)
        for name in names:
            changes = [adapter[name].double() - self._before[name].double() for _, adapter in self._uploads]
            groups[self._group(name)][name] = changes
        return groups

    def _inexactness(self) -> Observation | None:
        squares: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for name in self._before:
            other = name.removesuffix(A) + B
            if not name.endswith(A) or not all({name, other} <= adapter.keys() for _, adapter in self._uploads):
                continue
            factors = [(adapter[other].double(), adapter[name].double()) for _, adapter in self._uploads]
            missed, exact = products_apart(factors, self._shares())
            of_group = squares[self._group(name).rpartition(" ")[0]]
            of_group[0] += missed
            of_group[1] += exact
        ratios = {group: math.sqrt(missed / exact) for group, (missed, exact) in squares.items() if exact > 0}
        return _by_group(INEXACTNESS, ratios)

    def _group(self, name: str) -> str:
        """Returns what a tensor belongs to: experts, routers, or another kind of layer, and its factor."""
        factor = name.rpartition(".")[2].removeprefix("lora_")
        layer = name.rpartition(".")[0]
        for moe in self._model.moe:
            if layer == moe.router:
                return f"routers {factor}"
            if layer.startswith(f"{moe.experts}."):
                return f"experts {factor}"
        linear = next((one for one in self._model.linears if one.name == layer), None)
        return f"{'others' if linear is None else linear.group} {factor}"


def shrinkage(groups: Mapping[str, Mapping[str, Sequence[Tensor]]], shares: Sequence[float]) -> dict[str, float]:
    """Returns group -> sum p_i |Delta_i|^2 / |sum p_i Delta_i|^2: 1 for equal changes, n for n orthogonal ones.

    A group whose mean change is 0 is left out.

    Args:
        groups: Group -> tensor -> [n] the clients' changes.
        shares: [n] p_i, which sum to 1.
    """
    ratios = {}
    for group, tensors in groups.items():
        single = sum(
            share * float(change.square().sum())
            for changes in tensors.values()
            for share, change in zip(shares, changes, strict=True)
        )
        together = sum(float(_mean(changes, shares).square().sum()) for changes in tensors.values())
        if together > 0:
            ratios[group] = single / together
    return ratios


def products_apart(factors: Sequence[tuple[Tensor, Tensor]], shares: Sequence[float]) -> tuple[float, float]:
    """Returns |sum p_i B_i A_i - B A|^2 and |sum p_i B_i A_i|^2, with B = sum p_i B_i and A = sum p_i A_i.

    The products are never formed: <B_i A_i, B_j A_j> is the sum of (B_i^T B_j) * (A_i A_j^T), both r x r.

    Args:
        factors: [n] (B_i [..., out, r], A_i [..., r, in]), fp64.
        shares: [n] p_i, which sum to 1.
    """
    every = [*factors, (_mean([b for b, _ in factors], shares), _mean([a for _, a in factors], shares))]
    signed = [*shares, -1.0]
    inner = torch.tensor([[_inner(one, other) for other in every] for one in every], dtype=torch.float64)
    weights, exact = torch.tensor(signed, dtype=torch.float64), torch.tensor([*shares, 0.0], dtype=torch.float64)
    return max(float(weights @ inner @ weights), 0.0), float(exact @ inner @ exact)


def _mean(tensors: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    return sum((share * tensor for share, tensor in zip(shares, tensors, strict=True)), torch.zeros_like(tensors[0]))


def _inner(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> float:
    (b, a), (c, d) = one, other
    return float(((b.mT @ c) * (a @ d.mT)).sum())


def _by_group(name: str, ratios: Mapping[str, float]) -> Observation | None:
    rows = sorted(ratios)
    return Observation(name, torch.tensor([ratios[row] for row in rows]), rows) if rows else None


def _idle(frequencies: Sequence[Tensor]) -> Observation:
    """Returns by layer the share of idle experts: of all clients together, and the mean of theirs alone."""
    stacked = torch.stack([frequency.double() for frequency in frequencies])  # [clients, L, M]

    def idle(frequency: Tensor) -> Tensor:
        return (frequency < FEW * frequency.mean(-1, keepdim=True)).double().mean(-1)

    values = torch.stack([idle(stacked.mean(0)), idle(stacked).mean(0)], dim=1)
    layers = [f"layer {index}" for index in range(values.shape[0])]
    return Observation(IDLE, values, layers, ("of all clients", "of one client, mean"))
