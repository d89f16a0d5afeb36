"""Aggregation as pure arithmetic: a running weighted mean, and ranks that differ by client.

The mean holds one tensor per name, whatever the number of clients. Weights may differ by
client, by expert (FLAME Eq. 7) and by rank row, because they broadcast.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedguild.core.errors import UploadError

Weight = float | Tensor


class WeightedMean:
    """The running mean sum_c(w_c x_c) / sum_c(w_c) of each named tensor x over clients c.

    After each client the mean moves by w_c / sum(w) of its distance to x_c, which equals the
    quotient of the two sums but neither overflows nor underflows with the weights, and returns a
    single client's tensors, or those that all clients agree on, bit by bit. Where a weight is zero, x may be anything,
    NaN too.
    """

    def __init__(self) -> None:
        self._means: dict[str, Tensor] = {}
        self._totals: dict[str, Tensor] = {}

    def add(self, tensors: Mapping[str, Tensor], weight: Weight | Mapping[str, Weight]) -> None:
        """Adds one client's tensors, whose names may differ from those of other clients.

        Args:
            tensors: Name -> x of any floating dtype.
            weight: w >= 0 for all names or by name: a number, or a tensor whose dimensions are
                the leading ones of x (of the same size, or 1). [M] weighs each expert of an
                [M, r, in].

        Raises:
            UploadError: a weight is negative, NaN or infinite.
            ValueError: a weight does not fit its tensor, or a tensor differs in shape from earlier clients'.
        """
        for name, tensor in tensors.items():
            self._add(name, tensor, weight[name] if isinstance(weight, Mapping) else weight)

    def result(self, fallback: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the mean of every name in `fallback`, or its fallback where the total weight is zero.

        Args:
            fallback: Name -> tensor for every name added; its values are kept where the total weight is zero, element
                by element of the weights' shape.

        Raises:
            ValueError: a name was added that `fallback` lacks or has in another shape.
        """
        unknown = sorted(self._means.keys() - fallback.keys())
        if unknown:
            raise ValueError(f"No fallback for the added tensors {', '.join(unknown)}.")
        return {name: self.of(name, kept.float()) for name, kept in fallback.items()}

    @property
    def names(self) -> Iterable[str]:
        """The names added so far."""
        return self._means.keys()

    def has(self, name: str) -> bool:
        """Whether the total weight is positive anywhere in a tensor."""
        return name in self._totals and bool((self._totals[name] > 0).any())

    def zeros(self, name: str) -> Tensor:
        """Returns zeros in the shape of a tensor that was added."""
        return torch.zeros_like(self._means[name])

    def of(self, name: str, fallback: Tensor) -> Tensor:
        """Returns the mean of one name, and its fallback where the total weight is zero.

        Raises:
            ValueError: it was added in another shape.
        """
        if name not in self._means:
            return fallback.clone()
        _require_shape(name, fallback, self._means[name])
        return torch.where(self._totals[name] > 0, self._means[name], fallback)

    def _add(self, name: str, tensor: Tensor, weight: Weight) -> None:
        broadcast, smallest = _over_leading(name, tensor, weight)
        value = tensor.detach().float()
        mean = self._means.get(name)
        if mean is None:
            mean = self._means[name] = torch.zeros_like(value)
        _require_shape(name, mean, value)
        before = self._totals.get(name)
        total = self._totals[name] = broadcast.clone() if before is None else before + broadcast
        if smallest > 0:
            share = broadcast / total
        else:
            value = torch.where(broadcast > 0, value, mean)  # 0 * NaN is NaN, and 0 * infinity too
            share = torch.where(total > 0, broadcast / total, 0.0)
        mean.lerp_(value, share.float())


def rank_axis(name: str) -> int | None:
    """Returns the axis along which a tensor holds its rank: lora_A [.., r, in], lora_B [.., out, r].

    None for a tensor that has no rank, for example an output scale.
    """
    return {"lora_A": -2, "lora_B": -1}.get(name.rsplit(".", 1)[-1])


def truncate_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns views of the first `rank` rows of every lora_A and columns of every lora_B.

    Tensors without a rank pass unchanged (HetLoRA's download).

    Raises:
        ValueError: a tensor's rank is already lower.
    """
    truncated = {}
    for name, tensor in tensors.items():
        axis = rank_axis(name)
        if axis is not None and tensor.shape[axis] < rank:
            raise ValueError(f"'{name}' has the rank {tensor.shape[axis]}; it cannot be truncated to {rank}.")
        truncated[name] = tensor if axis is None else tensor.narrow(axis, 0, rank)
    return truncated


def pad_rank(tensors: Mapping[str, Tensor], rank: int) -> dict[str, Tensor]:
    """Returns a client's tensors zero-padded to `rank`.

    Args:
        tensors: Name -> lora_A [.., r_c, in], lora_B [.., out, r_c], or a tensor without a rank.
        rank: The highest rank r of all clients.

    Returns:
        Name -> [.., r, in], [.., out, r], or the tensor itself.

    Raises:
        ValueError: a tensor's rank is already higher.
    """
    padded = {}
    for name, tensor in tensors.items():
        axis = rank_axis(name)
        if axis is None:
            padded[name] = tensor
            continue
        own_rank = tensor.shape[axis]
        if own_rank > rank:
            raise ValueError(f"'{name}' has the rank {own_rank}; it cannot be padded to {rank}.")
        padded[name] = pad(tensor, (0, 0) * (-axis - 1) + (0, rank - own_rank))
    return padded


def activation_weights(frequency: Mapping[str, Tensor], examples: float, temperature: float) -> dict[str, Tensor]:
    """Returns a client's weight gamma for each expert, (a / S)^t |D| (FLAME Eq. 6), with 0^0 = 1.

    Args:
        frequency: Path of a layer's experts -> [M] a / S, how often the client activated each, in [0, 1].
        examples: |D|, the client's number of training examples.
        temperature: t; 0 weighs by size alone.

    Returns:
        Path of a layer's experts -> [M] gamma, in fp64.
    """
    return {experts: share.double().clamp(0, 1).pow(temperature) * examples for experts, share in frequency.items()}


def _over_leading(name: str, tensor: Tensor, weight: Weight) -> tuple[Tensor, float]:
    """Returns the weight in fp64, with as many dimensions as the tensor to broadcast over, and its smallest value."""
    values = torch.as_tensor(weight, dtype=torch.float64, device=tensor.device).detach()
    smallest, largest = (float(value) for value in values.aminmax()) if values.numel() else (1.0, 1.0)
    if not (smallest >= 0 and largest < math.inf):
        raise UploadError(f"A weight of '{name}' is negative, NaN or infinite.")
    sizes = tensor.shape[: values.dim()]
    if values.dim() > tensor.dim() or any(w not in (1, x) for w, x in zip(values.shape, sizes, strict=True)):
        raise ValueError(
            f"Weights {list(values.shape)} do not fit the leading dimensions of '{name}' {list(tensor.shape)}."
        )
    return values.reshape([*values.shape, *[1] * (tensor.dim() - values.dim())]), smallest


def _require_shape(name: str, known: Tensor, found: Tensor) -> None:
    if known.shape != found.shape:
        raise ValueError(f"'{name}' has the shape {list(found.shape)}, but had {list(known.shape)} before.")
