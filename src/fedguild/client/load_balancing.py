"""Load-balancing losses of each client's router, which spread its tokens over the experts and keep its logits small.

Sources: the load-balancing loss of Fedus et al., "Switch Transformers", JMLR 2022, Eq. 4-6, for more than one active
expert as in Zoph et al., "ST-MoE", 2022, and ST-MoE's router z-loss, Eq. 5. Both are computed for one layer and one
client over its real tokens, independently of the other clients in a pass.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.client.router_means import probabilities, token_means
from fedguild.model.moe.view import Routing


def balance_loss(logits: Tensor, indices: Tensor, slot: Tensor, keep: Tensor | None, slots: int) -> Tensor:
    """Returns [S], M sum_i f_i P_i of each slot in one layer; 0 for a slot without tokens.

    f_i is expert i's share of the slot's active (token, expert) pairs, which has no gradient. P_i is the mean of its
    probability, the softmax over all experts. The minimum is 1, at f = P = 1 / M, for any number of active experts.
    Some implementations use counts instead of shares, a sum over a token's K experts that is K times as large.

    Args:
        logits: [N, M] the router's logits, adapters included.
        indices: [N, k] active experts; M where nothing is active.
        slot: [N] slot of each token.
        keep: [N] bool, False for padding; None if every token is real.
        slots: S.
    """
    p = probabilities(logits)
    experts = p.shape[1]
    active = p.new_zeros(len(p), experts + 1).scatter_(1, indices, 1.0)[:, :experts]
    used = token_means(active, slot, keep, slots)
    share = used / used.sum(dim=1, keepdim=True).clamp(min=torch.finfo(used.dtype).tiny)
    return experts * (share * token_means(p, slot, keep, slots)).sum(dim=1)


def z_loss(logits: Tensor, slot: Tensor, keep: Tensor | None, slots: int) -> Tensor:
    """Returns [S], the mean of (log sum_i exp s_i)^2 over each slot's tokens in one layer; see `balance_loss`."""
    exact = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return token_means(exact.logsumexp(dim=-1).square(), slot, keep, slots)


class LoadBalancing:
    """Both losses of every client of a cohort, collected while the model runs.

    The observer only stores logits and indices; the losses are computed outside the layers, so gradient checkpointing
    does not recompute them.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._seen: list[tuple[Tensor, Tensor, Tensor, Tensor | None]] = []

    def observe(self, routing: Routing) -> None:
        self._seen.append((routing.logits, routing.indices, routing.slot, routing.keep))

    def losses(self) -> tuple[Tensor, Tensor]:
        """Returns the balance loss and the z-loss of the pass just seen, [S] each, means over its layers."""
        seen, self._seen = self._seen, []
        balance = [balance_loss(*layer, self.slots) for layer in seen]
        z = [z_loss(logits, slot, keep, self.slots) for logits, _, slot, keep in seen]
        return torch.stack(balance).mean(dim=0), torch.stack(z).mean(dim=0)
