from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import OlmoeConfig, OlmoeForCausalLM

from fedguild.data.batches import SlotBatch
from fedguild.model.inputs import prefix_shared


class ByteTokenizer:
    """A token per byte, a beginning-of-sequence token in front."""

    bos_token_id, eos_token_id, pad_token_id = 256, 257, 258

    def encode(self, text: str, add_special_tokens: bool, verbose: bool = True) -> list[int]:
        return [self.bos_token_id] * add_special_tokens + list(text.encode())

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool) -> str:
        return bytes(token for token in tokens if token < 256 or not skip_special_tokens).decode()


class OlmoeSlots:
    """Two slots on random OLMoE weights; slot 1 adds a fixed offset to the logits, as an adapter would change them."""

    slots = 2
    device = torch.device("cpu")
    seq2seq = None

    def __init__(self) -> None:
        torch.manual_seed(0)
        config = OlmoeConfig(
            vocab_size=260,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            num_experts=8,
            num_experts_per_tok=2,
            initializer_range=0.3,
            attn_implementation="sdpa",
            bos_token_id=256,
            eos_token_id=257,
            pad_token_id=258,
        )
        self.network = OlmoeForCausalLM(config).eval()
        self.offset = torch.stack([torch.zeros(260), torch.randn(260)])
        self.forwards = 0

    def token_losses(self, batch: SlotBatch) -> Tensor:
        self.forwards += 1
        mask = batch.mask if batch.segments is None else prefix_shared(batch.segments)
        logits = self.network(batch.input_ids, attention_mask=mask, position_ids=batch.position_ids).logits
        slot_of_row = torch.repeat_interleave(torch.arange(self.slots), torch.tensor(batch.rows_per_slot))
        logits = (logits + self.offset[slot_of_row][:, None]).flatten(0, 1)[batch.predict_at]
        return torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")

    def loss_alone(self, slot: int, prompt: Sequence[int], response: Sequence[int]) -> float:
        """The response's summed loss in a plain causal forward of one text, position by position."""
        logits = self.network(torch.tensor([[*prompt, *response]])).logits[0] + self.offset[slot]
        likelihood = logits.log_softmax(-1)
        return -sum(likelihood[len(prompt) - 1 + step, token].item() for step, token in enumerate(response))


class TableModel:
    """A model that knows a loss per (slot, target token) and a reply per (slot, prompt)."""

    device = torch.device("cpu")
    seq2seq = None

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


@pytest.fixture(scope="module")
def olmoe() -> OlmoeSlots:
    return OlmoeSlots()


@pytest.fixture
def table_model() -> Callable[..., TableModel]:
    return TableModel
