from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from fedguild.data.batches import SlotBatch


class ByteTokenizer:
    """A token per byte, a beginning-of-sequence token in front."""

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258

    def encode(self, text: str, add_special_tokens: bool, verbose: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in tokens if token < 256 or not skip_special_tokens).decode()


class TableModel:
    """A model that knows a loss per (slot, target token) and a reply per (slot, prompt)."""

    device = torch.device("cpu")
    seq2seq = None
    masked_span = None

    def __init__(self, losses: Tensor, replies: Sequence[dict[str, str]]) -> None:
        self.slots = len(losses)
        self.losses = losses
        self.replies = replies
        self.batch_sizes: list[int] = []

    def token_losses(self, batch: SlotBatch) -> Tensor:
        self.batch_sizes.append(batch.input_ids.numel())
        slot_of_row = torch.repeat_interleave(torch.arange(self.slots), torch.tensor(batch.rows_per_slot))
        return self.losses[slot_of_row[batch.predict_at // batch.input_ids.shape[1]], batch.targets]

    def generate(self, prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int) -> list[list[list[int]]]:
        tokenizer = ByteTokenizer()
        return [
            [
                list(replies[tokenizer.decode(prompt, skip_special_tokens=True)].encode())[:max_new_tokens]
                for prompt in slot_prompts
            ]
            for replies, slot_prompts in zip(self.replies, prompts, strict=True)
        ]


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture
def table_model() -> Callable[..., TableModel]:
    return TableModel
