"""Batches: examples as the tensors of one forward pass over several clients.

A batch is *slot-major*: the rows of slot 0 come first, then those of slot 1, and so on. Slots may have different
numbers of rows, or none.

An encoder-decoder model reads the prompt, closed by the end token, in its encoder, and predicts the response in its
decoder, which starts from a special token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

Ids = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Encoded:
    """An example as token ids; the loss covers `input_ids[prompt_length:]`, without `skipped`.

    Attributes:
        skipped: Ranges after the prompt that are not learned: later turns of the user, and what follows the last turn.
        rejected: Of a preference pair, the prompt with the response that was not preferred; else None.
    """

    input_ids: tuple[int, ...]
    prompt_length: int
    skipped: tuple[tuple[int, int], ...] = ()
    rejected: Encoded | None = None

    @property
    def rows(self) -> tuple[Encoded, ...]:
        """The rows that a batch has of it: itself, and the rejected one after it."""
        return (self,) if self.rejected is None else (self, self.rejected)

    @property
    def targets(self) -> Ids:
        """Positions of the tokens to predict; a text without a prompt is predicted from its second token on."""
        learned = np.ones(len(self.input_ids), dtype=np.bool_)
        learned[: max(self.prompt_length, 1)] = False
        for start, end in self.skipped:
            learned[start:end] = False
        return np.flatnonzero(learned)

    @property
    def response(self) -> tuple[int, ...]:
        """The first response: what follows the prompt, up to what is not learned."""
        return self.input_ids[self.prompt_length : self.skipped[0][0] if self.skipped else None]

    @property
    def response_tokens(self) -> int:
        return len(self.input_ids) - self.prompt_length - sum(end - start for start, end in self.skipped)


@dataclass(frozen=True, slots=True)
class Cut:
    """Training texts that are longer than `max_tokens`.

    Attributes:
        texts: Number of all texts.
        prompts: Number of those that lose the beginning of their prompt.
        responses: Number of those that lose the end of their response.
    """

    texts: int
    prompts: int
    responses: int
    max_tokens: int

    def sentences(self) -> list[str]:
        limit = f"data.max_length is {self.max_tokens}"
        lost = (
            (self.prompts, "lose the beginning of their prompt"),
            (self.responses, "lose the end of their response"),
        )
        return [f"{count} of {self.texts} training texts {what} ({limit})." for count, what in lost if count]


@dataclass(frozen=True, slots=True)
class Seq2Seq:
    """Special tokens of an encoder-decoder model's inputs.

    Attributes:
        start: Token id that its decoder starts from.
        end: Token id that closes the encoder's text; None for none.
    """

    start: int
    end: int | None

    def closed(self, prompt: Sequence[int]) -> list[int]:
        """Returns the encoder's token ids of a prompt, with the end token."""
        return [*prompt] if self.end is None else [*prompt, self.end]


@dataclass(frozen=True, slots=True)
class SlotBatch:
    """The rows of several slots, and the tokens to predict in them.

    In a batch for an encoder-decoder model, `input_ids` and `mask` are the encoder's, and T ≠ U, so
    that the number of tokens that a layer receives tells the encoder from the decoder.

    Attributes:
        input_ids: [R, T] token ids, padded on the right.
        mask: [R, T] bool, True where there is a token.
        rows_per_slot: Rows of each slot, in slot order; they sum to R.
        predict_at: [P] positions in the flattened [R·T] (the decoder's [R·U]) whose output predicts a target.
        targets: [P] token ids to predict there.
        group: [P] the group that each target is summed into (the slot, in training).
        position_ids: [R, T] where tokens are not numbered from 0 along the row.
        segments: [R, T], in rows of several candidates, 0 in the prompt that they share, 1… in the candidates, -1 in
            padding: a token attends to the prompt and its own segment up to itself. None where attention is causal.
        decoder_ids: [R, U] the decoder's token ids, padded on the right; None for a decoder-only model.
        decoder_mask: [R, U] bool, True where the decoder has a token.
    """

    input_ids: Tensor
    mask: Tensor
    rows_per_slot: tuple[int, ...]
    predict_at: Tensor
    targets: Tensor
    group: Tensor
    position_ids: Tensor | None = None
    segments: Tensor | None = None
    decoder_ids: Tensor | None = None
    decoder_mask: Tensor | None = None

    def to(self, device: torch.device) -> SlotBatch:
        """Moves the model's inputs to a device; targets and groups, which the model does not read, stay."""

        def move(tensor: Tensor) -> Tensor:
            return tensor.to(device, non_blocking=True)

        def move_if(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else move(tensor)

        if self.input_ids.device == device:
            return self
        return SlotBatch(
            input_ids=move(self.input_ids),
            mask=move(self.mask),
            rows_per_slot=self.rows_per_slot,
            predict_at=move(self.predict_at),
            targets=self.targets,
            group=self.group,
            position_ids=move_if(self.position_ids),
            segments=move_if(self.segments),
            decoder_ids=move_if(self.decoder_ids),
            decoder_mask=move_if(self.decoder_mask),
        )


def collate(rows: Sequence[Sequence[Encoded]], pad_id: int, seq2seq: Seq2Seq | None = None) -> SlotBatch:
    """Returns the training batch of several slots, `rows[s]` being the examples of slot s.

    A preference pair becomes two rows, the chosen one first. The group of a target is its slot, so that sums by group
    are sums by client.
    """
    rows = [[row for example in examples for row in example.rows] for examples in rows]
    flat = [(slot, row) for slot, slot_rows in enumerate(rows) for row in slot_rows]
    firsts = [max(row.prompt_length, 1) for _, row in flat]
    texts = [np.asarray(row.input_ids, dtype=np.int64) for _, row in flat]
    predicted = [row.targets for _, row in flat]
    targets = [ids[positions] for ids, positions in zip(texts, predicted, strict=True)]
    decoder_ids = decoder_mask = None
    if seq2seq is None:
        input_ids, mask = padded(texts, pad_id)
        starts, width = [1] * len(flat), input_ids.shape[1]
    else:
        answers = [ids[first:] for ids, first in zip(texts, firsts, strict=True)]
        decoder_ids, decoder_mask = padded([[seq2seq.start, *ids[:-1]] for ids in answers], pad_id)
        starts, width = firsts, decoder_ids.shape[1]
        prompts = [seq2seq.closed(ids[:first].tolist()) for ids, first in zip(texts, firsts, strict=True)]
        input_ids, mask = padded(prompts, pad_id, not_width=width)
    predict_at = [
        index * width + positions - start
        for index, (start, positions) in enumerate(zip(starts, predicted, strict=True))
    ]
    return SlotBatch(
        input_ids=input_ids,
        mask=mask,
        rows_per_slot=tuple(len(slot_rows) for slot_rows in rows),
        predict_at=_joined(predict_at),
        targets=_joined(targets),
        group=_joined([np.full(len(ids), slot) for (slot, _), ids in zip(flat, targets, strict=True)]),
        decoder_ids=decoder_ids,
        decoder_mask=decoder_mask,
    )


def padded(rows: Sequence[Sequence[int] | Ids], pad_id: int, not_width: int = 0) -> tuple[Tensor, Tensor]:
    """Returns token ids [R, T], padded on the right, and their mask [R, T]; T is not `not_width`."""
    width = max(map(len, rows), default=1)
    width += width == not_width
    ids = np.full((len(rows), width), pad_id, dtype=np.int64)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = row
    mask = np.arange(width)[None, :] < np.asarray([len(row) for row in rows], dtype=np.int64)[:, None]
    return torch.from_numpy(ids), torch.from_numpy(mask)


def epoch_order(examples: int, batch_size: int, rng: np.random.Generator) -> list[list[int]]:
    """Returns one shuffled epoch as lists of example indices; the last may be shorter."""
    order = rng.permutation(examples)
    edges = [*range(0, examples, batch_size), examples]
    return [order[start:end].tolist() for start, end in pairwise(edges)]


def _joined(parts: list[Ids]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64))
