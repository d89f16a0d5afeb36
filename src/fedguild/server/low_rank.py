"""Low-rank products as pairs of factors: weighted sums, singular values and norms without forming [out, in].

A client's update of a linear layer is `up @ down` of rank r. A weighted sum of such updates is again a pair of factors,
with the ranks concatenated; its singular value decomposition is that of a small matrix between two orthonormal bases
(QR of each factor). Every function accepts any leading dimensions, so one call handles all M experts of a layer.
Arithmetic is fp32, or fp64 if an input is fp64.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

DOWN, UP = "lora_A", "lora_B"


@dataclass(frozen=True)
class Factors:
    """The product `up @ down` of rank at most R.

    Attributes:
        down: [.., R, in], LoRA's A.
        up: [.., out, R], LoRA's B.
    """

    down: Tensor
    up: Tensor

    def __post_init__(self) -> None:
        down, up = self.down.shape, self.up.shape
        if min(len(down), len(up)) < 2 or down[:-2] != up[:-2] or down[-2] != up[-1]:
            raise ValueError(
                f"The factors {list(down)} and {list(up)} do not form a product [.., out, R] @ [.., R, in]."
            )

    @property
    def rank(self) -> int:
        """R, the rows of `down`."""
        return self.down.shape[-2]


@dataclass(frozen=True)
class Svd:
    """The singular value decomposition `u @ diag(s) @ vh`, k = min(R, in, out).

    Attributes:
        u: [.., out, k], orthonormal columns; the entry of each that is largest in magnitude is positive.
        s: [.., k], descending, not negative.
        vh: [.., k, in], orthonormal rows.
    """

    u: Tensor
    s: Tensor
    vh: Tensor


def stack(parts: Iterable[tuple[Factors, float]]) -> Factors:
    """Returns the factors of sum_c w_c up_c @ down_c, of rank sum_c R_c.

    FLoRA's stacking: the rows of all `down` and the columns of all `up` are concatenated, and a weight multiplies
    `down` only.

    Args:
        parts: (factors, w); only the ranks may differ.

    Raises:
        ValueError: there is no part, or two differ in width or leading dimensions.
    """
    downs: list[Tensor] = []
    ups: list[Tensor] = []
    for factors, weight in parts:
        down, up = accurate(factors)
        downs.append(down * weight)
        ups.append(up)
    if not downs:
        raise ValueError("There is no low-rank product to stack.")
    shapes = {(tuple(down.shape[:-2]), up.shape[-2], down.shape[-1]) for down, up in zip(downs, ups, strict=True)}
    if len(shapes) > 1:
        raise ValueError(f"Products of different (leading dimensions, out, in) cannot be added: {sorted(shapes)}.")
    return Factors(torch.cat(downs, -2), torch.cat(ups, -1))


def weighted_product(clients: Sequence[tuple[Mapping[str, Tensor], float]]) -> Iterator[tuple[str, Factors]]:
    """Yields every module with the factors of its full-rank aggregate sum_c w_c B_c A_c, one module at a time.

    Args:
        clients: (tensors, w) with `{module}.lora_A` and `{module}.lora_B` of the same modules; the
            weight holds the client's share and its LoRA scale.

    Raises:
        ValueError: there is no client, a module lacks a factor, or the clients' modules differ.
    """
    modules = [by_module(tensors) for tensors, _ in clients]
    weights = [weight for _, weight in clients]
    if not modules:
        raise ValueError("There are no clients whose products could be added.")
    if any(factors.keys() != modules[0].keys() for factors in modules):
        raise ValueError("The clients' products are of different modules.")
    for module in modules[0]:
        yield module, stack((factors[module], weight) for factors, weight in zip(modules, weights, strict=True))


def decompose(factors: Factors) -> Svd:
    """Returns the singular value decomposition of `up @ down` without forming it.

    up = Q_u T_u and downᵀ = Q_d T_d (QR), so up @ down = Q_u (T_u T_dᵀ) Q_dᵀ, and the matrix in the middle has at most
    R rows and columns. It is formed and decomposed in fp64, which costs little and makes fp32 products five times as
    accurate. Singular vectors of a zero singular value are orthonormal too.
    """
    down, up = accurate(factors)
    left, left_triangle = torch.linalg.qr(up)
    right, right_triangle = torch.linalg.qr(down.mT)
    middle = left_triangle.double() @ right_triangle.double().mT
    u, s, vh = (part.to(down.dtype) for part in torch.linalg.svd(middle, full_matrices=False))
    return _with_fixed_signs(left @ u, s, vh @ right.mT)


def truncate(svd: Svd, rank: int) -> Factors:
    """Returns the best approximation of rank min(rank, k): `up` = u diag(s), `down` = vh.

    The ranks are in the order of the singular values, so the first ranks of a truncation are the truncation to a lower
    rank.

    Raises:
        ValueError: the rank is below 1.
    """
    if rank < 1:
        raise ValueError(f"A product cannot be truncated to rank {rank}.")
    return Factors(svd.vh[..., :rank, :], svd.u[..., :, :rank] * svd.s[..., None, :rank])


def by_module(tensors: Mapping[str, Tensor]) -> dict[str, Factors]:
    """Returns module -> factors of every `{module}.lora_A` [.., R, in] and `{module}.lora_B` [.., out, R].

    Tensors of other names are left out.

    Raises:
        ValueError: a module has only one of the two, or their shapes do not match.
    """
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf in (DOWN, UP):
            modules.setdefault(module, {})[leaf] = tensor
    lone = sorted(module for module, pair in modules.items() if len(pair) == 1)
    if lone:
        raise ValueError(f"Only one of {DOWN} and {UP} is present for {', '.join(lone)}.")
    return {module: Factors(pair[DOWN], pair[UP]) for module, pair in modules.items()}


def named(factors: Mapping[str, Factors]) -> dict[str, Tensor]:
    """Returns `{module}.lora_A` and `{module}.lora_B` of every module, the inverse of `by_module`."""
    return {
        f"{module}.{leaf}": value
        for module, pair in factors.items()
        for leaf, value in ((DOWN, pair.down), (UP, pair.up))
    }


def accurate(factors: Factors) -> tuple[Tensor, Tensor]:
    """Returns `down` and `up` in fp32, or both in fp64 if one of them is."""
    dtype = torch.promote_types(torch.promote_types(factors.down.dtype, factors.up.dtype), torch.float32)
    return factors.down.detach().to(dtype), factors.up.detach().to(dtype)


def _with_fixed_signs(u: Tensor, s: Tensor, vh: Tensor) -> Svd:
    """Flips the sign of each pair of singular vectors so that the largest entry of `u` in magnitude is positive."""
    largest = u.gather(-2, u.abs().argmax(-2, keepdim=True))
    signs = torch.where(largest < 0, -1.0, 1.0).to(u.dtype)
    return Svd(u * signs, s, vh * signs.mT)
