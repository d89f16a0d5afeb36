"""Scores of preference pairs: how often, and by how much, a model gained more on the chosen answer than on the other.

A model's gain on an answer is its log-likelihood above that of the reference, the backbone without an adapter; beta
times the gain is DPO's implicit reward (`fedguild.client.preference`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.measuring.scores.batching import Item, each, token_batches
from fedguild.measuring.scores.likelihood import LikelihoodModel

Losses = tuple[float, float]
"""Negative log-likelihood in nats of a pair's chosen and of its rejected answer."""
ACCURACY, MARGIN = "preference_accuracy", "reward_margin"
TIE = 1e-3
"""Nats of difference that rounding alone makes; such a pair counts as half right."""


def preference_scores(own: Losses, reference: Losses, beta: float) -> dict[str, float]:
    """Returns the accuracy of a pair, 1, 0 or 1/2, and its margin."""
    gained = (reference[0] - own[0]) - (reference[1] - own[1])
    return {ACCURACY: 0.5 if abs(gained) < TIE else float(gained > 0), MARGIN: beta * gained}


def pair_losses(
    model: LikelihoodModel, pairs: Sequence[Sequence[Encoded]], batch_tokens: int, pad_id: int
) -> list[list[Losses]]:
    """Returns the losses of every slot's pairs; arguments as of `candidate_losses`."""
    items = [
        Item(slot, index, 2 * max(len(row.input_ids) for row in pair.rows))
        for slot, own in enumerate(pairs)
        for index, pair in enumerate(own)
    ]
    losses: list[list[Losses]] = [[(0.0, 0.0)] * len(own) for own in pairs]
    waiting: deque[tuple[list[Item], list[int]]] = deque()

    def batches() -> Iterator[tuple[SlotBatch]]:
        for chosen in token_batches(items, batch_tokens):
            rows: list[list[Encoded]] = [[] for _ in pairs]
            for item in chosen:
                rows[item.slot].append(pairs[item.slot][item.index])
            waiting.append((chosen, [len(row.targets) for own in rows for pair in own for row in pair.rows]))
            yield (collate(rows, pad_id, model.seq2seq),)

    with torch.no_grad():
        for found in each(model, "token_losses", batches()):
            chosen, counts = waiting.popleft()
            row = np.repeat(np.arange(len(counts)), counts)
            sums = np.bincount(row, weights=found.cpu().double().numpy(), minlength=len(counts)).tolist()
            for item, pair in zip(chosen, zip(sums[::2], sums[1::2], strict=True), strict=True):
                losses[item.slot][item.index] = pair
    return losses
