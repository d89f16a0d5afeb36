"""Likelihood of candidate responses, all candidates of an example in one row after one prompt.

A row is `[prompt | candidate 0 | candidate 1 | …]`. A candidate attends to the prompt and to itself, and its positions
start where the prompt ends. So it gets the likelihood that it would get alone, while the prompt runs once.

A row holds one candidate where that would not hold: in an encoder-decoder model, which reads the prompt in its encoder,
in models with recurrent or convolutional layers, which no mask keeps apart, and where a row is longer than a sliding
window (`ModelInfo.masked_span`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedguild.core.errors import DataError
from fedguild.data.batches import Encoded, Seq2Seq, SlotBatch, collate
from fedguild.data.example import Example
from fedguild.data.rendering import encode_last
from fedguild.measuring.scores.batching import Item, each, token_batches


class LikelihoodModel(Protocol):
    """A model of several slots that gives the likelihood of tokens."""

    @property
    def slots(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def seq2seq(self) -> Seq2Seq | None:
        """Special tokens of an encoder-decoder model; None for other models."""
        ...

    @property
    def masked_span(self) -> int | None:
        """The longest row whose candidates a mask keeps apart; None for any, 0 for none."""
        ...

    def token_losses(self, batch: SlotBatch) -> Tensor:
        """Returns [P], the negative log-likelihood in nats of each of the batch's targets."""
        ...


@dataclass(frozen=True, slots=True)
class Candidates:
    """An example's prompt and its candidate responses as token ids."""

    prompt: tuple[int, ...]
    responses: tuple[tuple[int, ...], ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(map(len, self.responses))

    @property
    def singles(self) -> list[Candidates]:
        """Each candidate by itself, with a copy of the prompt."""
        return [Candidates(self.prompt, (response,)) for response in self.responses]


def encode_candidates(example: Example, tokenizer: Any, max_tokens: int) -> Candidates:
    """Returns the example's choices, or its response if it has none, encoded as in training.

    Each candidate ends with the end-of-sequence token. If a candidate does not fit into `max_tokens`, the prompt is
    shortened to fit the longest one, for all candidates.

    Raises:
        DataError: the prompt has no token, so that nothing predicts a candidate's first one.
    """
    encoded = [
        encode_last(_answered(example, candidate), tokenizer, max_tokens)
        for candidate in example.choices or (example.response,)
    ]
    if example.train_on == "everything" and not encoded[0].prompt_length:  # scored from its second token on
        encoded = [replace(row, prompt_length=1) for row in encoded]
    prompt = min((row.input_ids[: row.prompt_length] for row in encoded), key=len)
    if not prompt:
        raise DataError(
            f"An example of task '{example.task}' has no prompt token within {max_tokens} tokens, "
            "so its response has no likelihood.",
            "Give it a prompt, or raise the limit on tokens.",
        )
    return Candidates(prompt, tuple(row.response for row in encoded))


def _answered(example: Example, response: str) -> Example:
    """Returns an example with another response."""
    if not example.choices:
        return example
    *before, last = example.messages or (None,)
    messages = () if last is None else (*(one for one in before if one), replace(last, content=response))
    return replace(example, response=response, messages=messages)


def candidate_losses(
    model: LikelihoodModel, rows: Sequence[Sequence[Candidates]], batch_tokens: int, pad_id: int
) -> list[list[list[float]]]:
    """Returns the summed negative log-likelihood in nats, by slot, row and candidate.

    Args:
        rows: The rows of each slot; slots may have different numbers of rows, or none.
        batch_tokens: Bound on the tokens of one forward pass, padding included. Encoder and decoder rows are padded
            separately, and may each have about that many.
    """
    span, longest = model.masked_span, max((row.tokens for slot_rows in rows for row in slot_rows), default=0)
    if span is None or longest <= span:
        return _losses(model, rows, batch_tokens, pad_id)
    alone = [[single for row in slot_rows for single in row.singles] for slot_rows in rows]
    slot_losses = _losses(model, alone, batch_tokens, pad_id)
    return [
        [[loss for (loss,) in islice(losses, len(row.responses))] for row in slot_rows]
        for slot_rows, losses in zip(rows, map(iter, slot_losses), strict=True)
    ]


def _losses(
    model: LikelihoodModel, rows: Sequence[Sequence[Candidates]], batch_tokens: int, pad_id: int
) -> list[list[list[float]]]:
    items = [
        Item(slot, index, row.tokens) for slot, slot_rows in enumerate(rows) for index, row in enumerate(slot_rows)
    ]
    losses: list[list[list[float]]] = [[[] for _ in slot_rows] for slot_rows in rows]
    waiting: deque[tuple[list[Item], Tensor]] = deque()

    def batches() -> Iterator[tuple[SlotBatch]]:
        for items_of_batch in token_batches(items, batch_tokens):
            chosen: list[list[Candidates]] = [[] for _ in rows]
            for item in items_of_batch:
                chosen[item.slot].append(rows[item.slot][item.index])
            if model.seq2seq is None:
                batch = collate_candidates(chosen, pad_id)
            else:
                batch = collate_singles(chosen, pad_id, model.seq2seq)
            waiting.append((items_of_batch, batch.group))
            yield (batch,)

    with torch.no_grad():
        for found in each(model, "token_losses", batches()):
            items_of_batch, group = waiting.popleft()
            sums = iter(np.bincount(group.numpy(), weights=found.cpu().double().numpy()).tolist())
            for item in items_of_batch:
                losses[item.slot][item.index] = [next(sums) for _ in rows[item.slot][item.index].responses]
    return losses


def collate_singles(rows: Sequence[Sequence[Candidates]], pad_id: int, seq2seq: Seq2Seq) -> SlotBatch:
    """Returns the batch of several slots of an encoder-decoder model, a row for each candidate.

    The group of a target is its candidate; candidates are numbered across all rows.
    """
    texts = [
        [Encoded(row.prompt + response, len(row.prompt)) for row in slot_rows for response in row.responses]
        for slot_rows in rows
    ]
    lengths = torch.tensor([row.response_tokens for slot_rows in texts for row in slot_rows])
    return replace(collate(texts, pad_id, seq2seq), group=torch.arange(len(lengths)).repeat_interleave(lengths))


def collate_candidates(rows: Sequence[Sequence[Candidates]], pad_id: int) -> SlotBatch:
    """Returns the batch of several slots; the group of a target is its candidate, numbered across rows.

    Rows of one candidate each are plain causal rows and get neither `segments` nor `position_ids`.
    """
    flat = [row for slot_rows in rows for row in slot_rows]
    width = max(row.tokens for row in flat)
    input_ids = np.full((len(flat), width), pad_id, dtype=np.int64)
    positions = np.zeros((len(flat), width), dtype=np.int64)
    segments = np.full((len(flat), width), -1, dtype=np.int64)
    predict_at: list[int] = []
    targets: list[int] = []
    group: list[int] = []
    candidate = 0
    for index, row in enumerate(flat):
        prompt_length = len(row.prompt)
        input_ids[index, : row.tokens] = [*row.prompt, *(token for response in row.responses for token in response)]
        positions[index, :prompt_length] = np.arange(prompt_length)
        segments[index, :prompt_length] = 0
        starts = accumulate(map(len, row.responses), initial=prompt_length)
        for segment, (start, response) in enumerate(zip(starts, row.responses, strict=False), start=1):
            end = start + len(response)
            positions[index, start:end] = prompt_length + np.arange(len(response))
            segments[index, start:end] = segment
            predict_at += [index * width + at for at in (prompt_length - 1, *range(start, end - 1))]
            targets += response
            group += [candidate] * len(response)
            candidate += 1
    packed = candidate > len(flat)
    return SlotBatch(
        input_ids=torch.from_numpy(input_ids),
        mask=torch.from_numpy(segments >= 0),
        rows_per_slot=tuple(len(slot_rows) for slot_rows in rows),
        predict_at=torch.tensor(predict_at, dtype=torch.int64),
        targets=torch.tensor(targets, dtype=torch.int64),
        group=torch.tensor(group, dtype=torch.int64),
        position_ids=torch.from_numpy(positions) if packed else None,
        segments=torch.from_numpy(segments) if packed else None,
    )
