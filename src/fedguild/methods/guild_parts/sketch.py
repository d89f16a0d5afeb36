"""Part e, the mean of the products from linear sums: two sketches of a client's change, and the factors of their mean.

J. A. Tropp, A. Yurtsever, M. Udell, V. Cevher, "Practical Sketching Algorithms for Low-Rank Matrix Approximation", SIAM
J. Matrix Anal. Appl. 38(4), 2017, Algorithms 1, 4 and 7: D = B_i A_i - B A [out, in] is observed as Y = D Omega
[out, s1] and Z = Psi D [s2, in], and is Q (Psi Q)^+ Z with Q an orthonormal basis of Y's columns, exactly if D's rank
is at most s1. Both are linear in D, so that the mean of the clients' sketches is the sketch of their mean. A module
with fewer outputs than inputs is sketched transposed, so that the narrower sketch lies along its longer side.

The sketches of a module have as many numbers as its LoRA. They travel in LoRA's shapes, added to the A and B that the
client received: a client's change of what it received is its sketches, which can be clipped, noised and summed as such.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedguild.payload import ADAPTER, Payload
from fedguild.seeding import torch_rng
from fedguild.server.low_rank import Factors, by_module, decompose, named, stack

SEED = "sketch_seed"
"""The scalar of the state and of downloads from which, with the round, Omega and Psi are drawn."""
OVERSAMPLING = 1.5
"""s2 / s1, where both fit the module; see docs/methods/guild-parts.md for what else was tried."""
NEGLIGIBLE = 1e-6
"""A singular value below this part of the largest is what the rounding of fp32 leaves of 0."""


def sizes(outputs: int, inputs: int, rank: int, oversampling: float = OVERSAMPLING) -> tuple[int, int]:
    """Returns s1 and s2 of a module: together at most as many numbers as LoRA of a rank has."""
    longer, shorter, numbers = max(outputs, inputs), min(outputs, inputs), rank * (outputs + inputs)
    first = min(max(1, int(numbers / (longer + oversampling * shorter))), shorter)
    return first, min((numbers - first * longer) // shorter, longer)


@dataclass(frozen=True)
class Probes:
    """Omega and Psi of a module in a round, the same for all clients and for all experts of the module.

    Attributes:
        omega: [shorter side, s1], orthonormal columns.
        psi: [s2, longer side], orthonormal rows.
    """

    omega: Tensor
    psi: Tensor

    @classmethod
    def drawn(cls, outputs: int, inputs: int, first: int, second: int, rng: torch.Generator) -> Probes:
        """Returns those for s1 = `first` and s2 = `second`: Gaussian, then made orthonormal, in fp64."""
        shapes = (min(outputs, inputs), first), (max(outputs, inputs), second)
        omega, psi = (torch.linalg.qr(torch.randn(shape, generator=rng, dtype=torch.float64)).Q for shape in shapes)
        return cls(omega, psi.mT)

    @classmethod
    def of_round(cls, told: Payload, round: int, module: str, lora: Factors) -> Probes:
        """Returns those of a module's LoRA in a round.

        Args:
            told: The round's state, or a download of it: it has the seed.
            round: The round.
            module: The module's name.
            lora: A and B.
        """
        outputs, inputs = lora.up.shape[-2], lora.down.shape[-1]
        rng = torch_rng(int(told.scalars[SEED]), "probes", round, module)
        return cls.drawn(outputs, inputs, *sizes(outputs, inputs, lora.rank), rng)

    def sketch(self, change: Factors) -> Tensor:
        """Returns Y and Z of a product as [.., s1 longer + s2 shorter] numbers; a product of zeros gives zeros."""
        tall = _tall(change)
        omega, psi = self.omega.to(tall.down), self.psi.to(tall.down)
        y, z = tall.up @ (tall.down @ omega), (psi @ tall.up) @ tall.down
        return torch.cat([y.flatten(-2), z.flatten(-2)], -1)

    def recovered(self, numbers: Tensor, *, transposed: bool) -> Factors:
        """Returns Q and (Psi Q)^+ Z, of rank s1, from `sketch`; what follows its numbers counts for nothing.

        Args:
            numbers: [.., at least s1 longer + s2 shorter].
            transposed: Whether the module has fewer outputs than inputs.
        """
        (shorter, first), (second, longer) = self.omega.shape, self.psi.shape
        y, z, _ = numbers.tensor_split([first * longer, first * longer + second * shorter], -1)
        basis = torch.linalg.qr(y.unflatten(-1, (longer, first))).Q
        down = torch.linalg.lstsq(self.psi @ basis, z.unflatten(-1, (second, shorter))).solution
        return Factors(basis.mT, down.mT) if transposed else Factors(down, basis)


def sketched(
    download: Payload, before: Mapping[str, Tensor], after: Mapping[str, Tensor], round: int
) -> dict[str, Tensor]:
    """Returns a client's upload: its sketches on the A and B that it received, bit for bit these where nothing changed.

    Args:
        download: What the client received, with B A.
        before: The same product in the factors in which the client trained.
        after: The trained factors.
        round: The round.
    """
    old, new, sent = by_module(before), by_module(after), {}
    for module, pair in by_module(download.part(ADAPTER)).items():
        a, b = new[module].down, new[module].up
        moved = Factors(torch.cat([a, a - old[module].down], -2), torch.cat([b - old[module].up, old[module].up], -1))
        change = Probes.of_round(download, round, module, pair).sketch(moved)  # (B_i - B) A_i + B (A_i - A)
        change = pad(change, (0, _flat(pair).shape[-1] - change.shape[-1]))
        sent[module] = _laid_out(_flat(pair).to(change) + change, pair)
    return named(sent)


def changes(sent: Mapping[str, Tensor], received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sketches of an upload, in LoRA's shapes, in fp64."""
    return {name: value.double() - received[name].double() for name, value in sent.items()}


def zeros(received: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the sketches of a client that changed nothing."""
    return {name: torch.zeros_like(value) for name, value in received.items()}


def refactored(state: Payload, mean: Mapping[str, Tensor], round: int) -> dict[str, Tensor]:
    """Returns the next A and B: the leading ranks of B A + the mean change, found from the mean of the sketches.

    The rows of A are orthogonal, and of the norm that they had on the average; the columns of B are orthogonal. Where
    the sketches of a module, or of an expert, are all 0, its A and B stay as they are.

    Args:
        state: The state that the clients received, A and B in fp32.
        mean: The mean of the clients' `changes`.
        round: The round.
    """
    means, found = by_module(mean), {}
    for module, pair in by_module(state.part(ADAPTER)).items():
        before = Factors(pair.down.double(), pair.up.double())
        change = _flat(means[module]).double()
        transposed = pair.up.shape[-2] < pair.down.shape[-1]
        recovered = Probes.of_round(state, round, module, pair).recovered(change, transposed=transposed)
        after = _in_form(stack([(before, 1.0), (recovered, 1.0)]), before)
        changed = change.ne(0).any(-1)[..., None, None]
        pairs = ((after.down, pair.down), (after.up, pair.up))
        found[module] = Factors(*(torch.where(changed, new.to(old.dtype), old) for new, old in pairs))
    return named(found)


def _in_form(product: Factors, before: Factors) -> Factors:
    """Returns the leading ranks of a product in factors of the shapes and the norm that they had before.

    Ranks that the product has not go on with what orthogonal rows are left of A, and B = 0, so that rounding does not
    choose them; more rows than inputs are 0.
    """
    rank, inputs = before.down.shape[-2:]
    most = min(rank, inputs)
    svd = decompose(product)
    values, rows = svd.s[..., :rank], svd.vh[..., :rank, :]
    is_rank = values > NEGLIGIBLE * values[..., :1]
    known = torch.cat([rows, before.down], -2)
    last = torch.cat([torch.where(is_rank, 0, 2), torch.ones(before.down.shape[:-1], dtype=torch.int64)], -1)
    known = known.gather(-2, last.argsort(dim=-1, stable=True)[..., None].expand_as(known))
    basis = torch.linalg.qr(known.mT).Q[..., :most]
    norm = (before.down.square().sum((-2, -1), keepdim=True) / most).sqrt()
    norm = torch.where(norm > 0, norm, 1.0)
    up = svd.u[..., :rank] * (values * is_rank)[..., None, :] @ (rows @ basis)
    return Factors(pad(norm * basis.mT, (0, 0, 0, rank - most)), pad(up / norm, (0, rank - most)))


def _tall(factors: Factors) -> Factors:
    """Returns a product with at least as many outputs as inputs: the transposed one of a module with fewer."""
    outputs, inputs = factors.up.shape[-2], factors.down.shape[-1]
    return factors if outputs >= inputs else Factors(factors.up.mT, factors.down.mT)


def _flat(factors: Factors) -> Tensor:
    """Returns [.., r (in + out)], the numbers of A and then those of B."""
    return torch.cat([factors.down.flatten(-2), factors.up.flatten(-2)], -1)


def _laid_out(numbers: Tensor, shapes: Factors) -> Factors:
    """Returns the inverse of `_flat`."""
    down, up = numbers.tensor_split([shapes.down.shape[-2] * shapes.down.shape[-1]], -1)
    return Factors(down.reshape(shapes.down.shape), up.reshape(shapes.up.shape))
