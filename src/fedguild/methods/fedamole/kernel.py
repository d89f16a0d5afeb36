"""The product of a mixture of LoRA experts: all of a client's experts at once, never in a loop.

The A of the shared expert, of the n experts and the router are one matrix, so are the B; between
the two products, a token's low ranks are multiplied by the weights of its active experts
(FedAMoLE, Eq. 4 to 9). Symbols: N tokens, S slots, n rows, r rank, g = n + 1 experts with the shared
one (n without it).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedguild.model.runtime import Pass
from fedguild.model.slot_products import add_slot_rows, slot_rows


@dataclass(frozen=True)
class Gating:
    """How the tokens of a module choose among the experts that their slots hold.

    Attributes:
        rows: n, the most experts that any slot holds.
        top_k: Active experts per token, k.
        scale: LoRA's scale.
        score_scale: Factor on <W^t h, A_j h>; None for a router with a row for each expert of the pool.
        renormalise: Whether the weights of the active experts are made to sum to one.
        held: [S] number of experts that each slot holds.
        blocked: [S, n] bool, True beyond them; None where all slots hold n.
        ids: [S, n] each row's expert in the pool; 0 beyond those held.
    """

    rows: int
    top_k: int
    scale: float
    score_scale: float | None
    renormalise: bool
    held: Tensor
    blocked: Tensor | None
    ids: Tensor


@dataclass(frozen=True)
class Tokens:
    """The tokens of one pass: their slots, and which are real.

    Attributes:
        rows_per_slot: Rows of each slot.
        slot: [N] slot of each token.
        members: [S, N] 1 for the slot's real tokens, 0 elsewhere.
        count: [S] real tokens of each slot, at least 1.
    """

    rows_per_slot: tuple[int, ...]
    slot: Tensor
    members: Tensor
    count: Tensor

    @classmethod
    def of(cls, current: Pass, tokens: int, device: torch.device, dtype: torch.dtype) -> Tokens:
        """Returns a pass's tokens."""
        slot = current.slot_of_token(tokens, device)
        slots = torch.arange(len(current.rows_per_slot), device=device)
        members, keep = slot == slots[:, None], current.keep(tokens)
        members = (members if keep is None else members & keep).to(dtype)
        return cls(current.rows_per_slot, slot, members, members.sum(1).clamp(min=1))


def mixture_product(
    output: Tensor,
    hidden: Tensor,
    dropped: Tensor,
    stored: Mapping[str, Tensor],
    gating: Gating,
    tokens: Tokens,
    kept: Stacked | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Adds s·B^s A^s h + Σ_{j in top-k} p_j·s·B_j A_j h to a linear layer's output (Eq. 9).

    Args:
        output: [N, out] W h.
        hidden: [N, in] h, which the router sees.
        dropped: [N, in] h with dropout, which the experts see; `hidden` itself where there is none.
        stored: `shared.lora_A` [S, r, in] and `shared.lora_B` [S, out, r] (or neither),
            `experts.lora_A` [S, b, r, in], `experts.lora_B` [S, b, out, r], `router` [S, r or E, in].
        gating: How the experts are chosen.
        tokens: The pass's tokens.
        kept: The module's matrices of the passes before.

    Returns:
        The sum [N, out]; p [N, n], every expert's probability, 0 beyond those held; and whether it is
        active [N, n], 1 or 0.
    """
    down, up = (kept or Stacked()).of(stored, gating, hidden.dtype)
    rank = stored["experts.lora_A"].shape[2]
    experts, counts = up.shape[2], tokens.rows_per_slot
    first_scored = experts if gating.score_scale is None else experts - gating.rows * rank
    if dropped is hidden:
        low = slot_rows(hidden, down, counts)
        values, scored = low[:, :experts], low[:, first_scored:]
    else:
        values = slot_rows(dropped, down[:, :experts], counts)
        scored = slot_rows(hidden, down[:, first_scored:], counts)
    blocked = None if gating.blocked is None else gating.blocked.index_select(0, tokens.slot)
    gated, p, active = _Gate.apply(values, scored, blocked, rank, gating)  # type: ignore[no-untyped-call]
    return add_slot_rows(output, gated, up, counts), p, active


def balance_loss(p: Tensor, active: Tensor, gating: Gating, tokens: Tokens) -> Tensor:
    """Returns [S], |E| Σ_j f_j p̄_j of each slot's real tokens (Eq. 20).

    Args:
        p: [N, n] every expert's probability.
        active: [N, n] whether it is among the token's top-k, 1 or 0.
        gating: How the experts were chosen.
        tokens: The pass's tokens.
    """
    counts = tokens.members @ active
    products = (tokens.members @ p * counts).sum(1)
    return products * gating.held / (gating.top_k * tokens.count.square())


class Stacked:
    """A module's A and router as one matrix [S, g·r + q, in], and its B as one, [S, out, g·r]; the shared expert first.

    q is r, or n where the router is vanilla: then only the rows of the experts that are held take part. Both are put
    together in the dtype of the products once, and kept until a tensor is written to or the gating changes.
    """

    def __init__(self) -> None:
        self._kept: tuple[Gating, object, tuple[Tensor, Tensor]] | None = None

    def of(self, stored: Mapping[str, Tensor], gating: Gating, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns both, for autograd.

        Args:
            stored: As `mixture_product` takes them.
            gating: How the experts are chosen.
            dtype: The dtype of the products.
        """
        parts = [stored[name] for name in _ORDER if name in stored]
        made = self._made(parts, gating, dtype)
        if not torch.is_grad_enabled():
            return made
        both: tuple[Tensor, Tensor] = _Stack.apply(gating, *made, *parts)  # type: ignore[no-untyped-call]
        return both

    def _made(self, parts: list[Tensor], gating: Gating, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if any(part.is_inference() for part in parts):  # nobody counts their changes
            return _stacked(parts, gating, dtype)
        state = dtype, *(part._version for part in parts)
        if self._kept is None or self._kept[0] is not gating or self._kept[1] != state:
            with torch.inference_mode(False):  # what an evaluation makes, a training may use
                self._kept = gating, state, _stacked(parts, gating, dtype)
        return self._kept[2]


_ORDER = ("router", "experts.lora_A", "experts.lora_B", "shared.lora_A", "shared.lora_B")


@torch.no_grad()
def _stacked(parts: list[Tensor], gating: Gating, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    router, experts_down, experts_up, *shared = (part.to(dtype) for part in parts)
    experts_down, experts_up = experts_down[:, : gating.rows], experts_up[:, : gating.rows]
    if gating.score_scale is None:
        router = router.gather(1, gating.ids[:, :, None].expand(-1, -1, router.shape[2]))
    down, up = [experts_down.flatten(1, 2), router], experts_up.transpose(1, 2)
    if shared:
        down = [shared[0], *down]
        up = torch.cat([shared[1][:, :, None], up], 2)
    return torch.cat(down, 1), up.flatten(2)


class _Stack(torch.autograd.Function):
    """Returns what `Stacked` keeps; its gradient is shared out among the tensors, whose `parts` are in `_ORDER`."""

    @staticmethod
    def forward(ctx: Any, gating: Gating, down: Tensor, up: Tensor, *parts: Tensor) -> tuple[Tensor, Tensor]:
        ctx.gating, ctx.shapes, ctx.dtype = gating, [part.shape for part in parts], parts[0].dtype
        return down.detach(), up.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gating, (of_router, of_down, of_up, *of_shared) = ctx.gating, ctx.shapes
        down, up = (grad.to(ctx.dtype) for grad in grads)
        rank, shared = of_down[2], []
        up = up.unflatten(2, (-1, rank))
        if of_shared:
            shared = [down[:, :rank], up[:, :, 0]]
            down, up = down[:, rank:], up[:, :, 1:]
        experts, router = down.split([gating.rows * rank, down.shape[1] - gating.rows * rank], dim=1)
        if gating.score_scale is None:
            index = gating.ids[:, :, None].expand(-1, -1, of_router[2])
            router = router.new_zeros(of_router).scatter_add_(1, index, router)
        whole = [_filled(experts.unflatten(1, (-1, rank)), of_down), _filled(up.transpose(1, 2), of_up)]
        return None, None, None, router, *whole, *shared


def _filled(grad: Tensor, shape: torch.Size) -> Tensor:
    """Returns the gradient [S, n, …] of the first n rows as that of all of them, [S, b, …]."""
    if grad.shape[1] == shape[1]:
        return grad
    whole = grad.new_zeros(shape)
    whole[:, : grad.shape[1]] = grad
    return whole


class _Gate(torch.autograd.Function):
    """From the low ranks to the weighted low ranks: scores, softmax, top-k and weights (Eq. 6, 7 and 9).

    Inputs: values [N, g·r], A_j h of the experts, the shared one first; scored [N, n·r + r], A_j h as the
    router sees it and W^t h, or the scores [N, n] themselves where it is vanilla; blocked [N, n] or None.
    Outputs: [N, g·r]; p [N, n]; and what is active [N, n].
    """

    @staticmethod
    def forward(
        ctx: Any, values: Tensor, scored: Tensor, blocked: Tensor | None, rank: int, gating: Gating
    ) -> tuple[Tensor, Tensor, Tensor]:
        kind = torch.float64 if values.dtype is torch.float64 else torch.float32
        scores = scored.to(kind)
        if gating.score_scale is not None:
            embeddings, token = _embeddings(scores, rank)
            scores = torch.einsum("njr,nr->nj", embeddings, token).mul_(gating.score_scale)
        if blocked is not None:
            scores = scores.masked_fill(blocked, -torch.inf)
        p = scores.softmax(-1)
        active = torch.zeros_like(p).scatter_(1, p.topk(gating.top_k, sorted=False).indices, 1.0)
        gates = _gates(p, active, values.shape[1] // rank, gating).to(values.dtype)
        ctx.save_for_backward(values, scored, p, active, gates)
        ctx.mark_non_differentiable(active)
        ctx.rank, ctx.gating = rank, gating
        return (values.unflatten(1, (-1, rank)) * gates).flatten(1), p, active

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        values, scored, p, active, gates = ctx.saved_tensors
        rank, gating = ctx.rank, ctx.gating
        grad_gated = grads[0].unflatten(1, (-1, rank))
        grad_values = (grad_gated * gates).flatten(1)
        grad_gates = (grad_gated * values.unflatten(1, (-1, rank))).sum(-1)[:, -gating.rows :].to(p.dtype)
        grad_p = grads[1] + _through_weights(gating.scale * grad_gates, p, active, gating)
        grad_scores = p * (grad_p - (grad_p * p).sum(-1, keepdim=True))
        if gating.score_scale is None:
            return grad_values, grad_scores.to(scored.dtype), None, None, None
        embeddings, token = _embeddings(scored.to(p.dtype), rank)
        grad_scores.mul_(gating.score_scale)
        grad_embeddings = (grad_scores[:, :, None] * token[:, None]).flatten(1)
        grad_token = torch.einsum("nj,njr->nr", grad_scores, embeddings)
        return grad_values, torch.cat([grad_embeddings, grad_token], 1).to(scored.dtype), None, None, None


def _embeddings(scored: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Returns h^e_j = A_j h [N, n, r] and h^t = W^t h [N, r] (Eq. 4 and 5)."""
    return scored[:, :-rank].unflatten(1, (-1, rank)), scored[:, -rank:]


def _gates(p: Tensor, active: Tensor, experts: int, gating: Gating) -> Tensor:
    """Returns [N, g, 1], the factor on each expert's low ranks; the shared expert's is LoRA's scale alone."""
    weights = p * active
    if gating.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    gates = p.new_full((p.shape[0], experts, 1), gating.scale)
    gates[:, -gating.rows :, 0].mul_(weights)
    return gates


def _through_weights(grad: Tensor, p: Tensor, active: Tensor, gating: Gating) -> Tensor:
    """Returns the gradient [N, n] of p, given that of the active experts' weights."""
    if not gating.renormalise:
        return grad * active
    weights = p * active
    total = weights.sum(-1, keepdim=True)
    mean = (grad * weights).sum(-1, keepdim=True) / total
    return (grad - mean) * active / total
