"""Training in a singular basis: other factors of the product that a client received, with orthogonal rows of A.

B A = (B R^-1) (R A) for every invertible R, but an optimizer that moves each number by itself takes another step for
each. Here the rows of R A are orthogonal and of one norm, and the columns of B R^-1 are orthogonal, too: apart from the
norm they are the factors of the singular value decomposition, to which the server of FedSVD (S. Lee et al., arXiv
2505.12805, 2025, Section 3) sets its state. A client finds R by itself and goes back after its training, so that what
it sends can be averaged, kept and mixed as any other LoRA.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedguild.client.cohort import Cohort
from fedguild.core.payload import ADAPTER
from fedguild.model.adapters.lora import Lora
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, initial_adapter
from fedguild.server.low_rank import Factors, by_module, named

DEPENDENT = 1e-5
"""Rows of A depend on each other where what one adds to those before is less than this part of the largest."""
TIE = 1e-8
"""By how much, of its largest entry, the Gram matrix's diagonal is raised at the first rank, less at each later one.
Where several singular values are 0, any rotation among their ranks would do, and rounding would choose one."""


@dataclass(frozen=True)
class Basis:
    """A change of basis between the ranks of a module's LoRA.

    Attributes:
        there: R [.., r, r].
        back: R^-1 [.., r, r].
    """

    there: Tensor
    back: Tensor

    @property
    def inverse(self) -> Basis:
        """The way back."""
        return Basis(self.back, self.there)


def basis_of(factors: Factors, norm: float) -> Basis:
    """Returns R with R A (R A)^T = norm^2 I, and with (B R^-1)^T B R^-1 diagonal and descending.

    With A A^T = L L^T (Cholesky) the rows of L^-1 A are orthonormal. V has the eigenvectors of (B L)^T B L in its
    columns, so that the rows of V^T L^-1 A are the right singular vectors of B A: R = norm V^T L^-1, in fp64 and on the
    CPU. If the rows of A depend on each other (`DEPENDENT`), or a number is not finite, R is the identity.

    Args:
        factors: A [.., r, in] and B [.., out, r].
        norm: The norm of the rows of R A.
    """
    down, up = (part.detach().cpu().double() for part in (factors.down, factors.up))
    lower, failed = torch.linalg.cholesky_ex(down @ down.mT)
    scaled = up @ lower
    pivots = lower.diagonal(dim1=-2, dim2=-1)
    usable = (failed == 0) & (pivots.amin(-1) > DEPENDENT * pivots.amax(-1)) & scaled.isfinite().flatten(-2).all(-1)
    one = torch.eye(factors.rank, dtype=down.dtype).expand_as(lower)
    lower, scaled = (torch.where(usable[..., None, None], part, other) for part, other in ((lower, one), (scaled, 0.0)))
    gram = scaled.mT @ scaled
    order = torch.arange(factors.rank, 0, -1, dtype=gram.dtype) / factors.rank
    gram = gram + torch.diag_embed(TIE * gram.diagonal(dim1=-2, dim2=-1).amax(-1, keepdim=True) * order)
    vectors = torch.linalg.eigh(gram).eigenvectors.flip(-1)
    there = norm * torch.linalg.solve_triangular(lower.mT, vectors, upper=True).mT
    back = lower @ vectors / norm
    return Basis(*(torch.where(usable[..., None, None], part, one) for part in (there, back)))


def bases_of(theta: Mapping[str, Tensor], norm: float) -> dict[str, Basis]:
    """Returns the basis of every module with LoRA."""
    return {module: basis_of(pair, norm) for module, pair in by_module(theta).items()}


def in_basis(tensors: Mapping[str, Tensor], bases: Mapping[str, Basis]) -> dict[str, Tensor]:
    """Returns the tensors with R A and B R^-1 in place of A and B, of the same dtypes and on the same devices."""
    pairs = {}
    for module, pair in (by_module(tensors) if bases else {}).items():
        there, back = (part.to(pair.down) for part in (bases[module].there, bases[module].back))
        pairs[module] = Factors(there @ pair.down, pair.up @ back)
    return {**tensors, **named(pairs)}


def out_of_basis(tensors: Mapping[str, Tensor], bases: Mapping[str, Basis]) -> dict[str, Tensor]:
    """Returns the tensors with R^-1 A and B R in place of A and B, the inverse of `in_basis`."""
    return in_basis(tensors, {module: basis.inverse for module, basis in bases.items()})


def started(model: ModelInfo, lora: Lora, norm: float | None, rng: torch.Generator) -> dict[str, Tensor]:
    """Returns LoRA as training begins: B = 0, and rows of A that are orthogonal and of one norm.

    Args:
        model: The model.
        lora: The LoRA.
        norm: The norm of the rows of A; None to leave A as LoRA draws it.
        rng: Where A comes from.
    """
    theta = initial_adapter(model, AdapterPlan((lora,)), rng)
    return theta if norm is None else in_basis(theta, bases_of(theta, norm))


def change_basis(cohort: Cohort, norm: float | None) -> list[dict[str, Basis]]:
    """Sets every slot to other factors of the LoRA that its client received; returns the ways there.

    Args:
        cohort: The clients.
        norm: The norm of the rows of R A; None to change nothing.
    """
    if norm is None:
        return [{} for _ in cohort.work]
    bases: list[dict[str, Basis]] = []
    first = cohort.work[0].download.part(ADAPTER)
    for slot, work in enumerate(cohort.work):
        received = work.download.part(ADAPTER)
        alike = slot and all(torch.equal(received[name], value) for name, value in first.items())
        bases.append(bases[0] if alike else bases_of(received, norm))
        cohort.load(slot, in_basis(received, bases[slot]))
    return bases
