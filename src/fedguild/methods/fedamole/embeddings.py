"""Mean embeddings of a client's tokens and of its experts, whose products are relevance (FedAMoLE, Eq. 11, 13)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from torch import Tensor

from fedguild.methods.fedamole.kernel import Tokens
from fedguild.model.adapters.storage import SlotTensor


class Embeddings:
    """The mean embeddings of each slot's real tokens and of its experts, per module.

    Both are linear in h, so that the mean of h is collected and projected at the end.
    """

    def __init__(self) -> None:
        self._sums: dict[str, Tensor] = {}
        self._counts: dict[str, Tensor] = {}
        self._tokens: dict[int, dict[str, Tensor]] = defaultdict(dict)
        self._experts: dict[int, dict[str, Tensor]] = defaultdict(dict)

    def token(self, slot: int) -> dict[str, Tensor]:
        """Returns module -> [r], the mean of W^t h over the slot's real tokens, or of W_r h [E] of a vanilla router.

        Zeros for a slot without tokens.
        """
        return self._tokens[slot]

    def experts(self, slot: int) -> dict[str, Tensor]:
        """Returns module -> [held, r], the mean of A_j h over the slot's real tokens, in the order of its rows.

        Without LoRA's scale and without dropout; zeros for a slot without tokens.
        """
        return self._experts[slot]

    def add(self, module: str, hidden: Tensor, tokens: Tokens) -> None:
        """Adds a pass's hidden states [N, in] of a module."""
        sums = tokens.members @ hidden.detach().to(tokens.members.dtype)
        self._sums[module] = sums + self._sums.get(module, 0)
        self._counts[module] = tokens.members.sum(1) + self._counts.get(module, 0)

    def project(self, module: str, router: SlotTensor, down: SlotTensor, held: Sequence[Sequence[int]]) -> None:
        """Computes a module's embeddings from the added passes; does nothing without any.

        Args:
            module: Its path.
            router: W^t [r, in], or W_r [E, in], of every slot.
            down: The experts' A [b, r, in] of every slot.
            held: Each slot's experts.
        """
        if module not in self._sums:
            return
        means = self._sums[module] / self._counts[module].clamp(min=1)[:, None]
        for slot, ids in enumerate(held):
            self._tokens[slot][module] = (router.own(slot) @ means[slot]).cpu()
            self._experts[slot][module] = (down.own(slot)[: len(ids)] @ means[slot]).cpu()
