"""Scores of the embedded checkpoint, without the later stages that evaluate real runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from transformers import OlmoeForCausalLM

from fedguild.data.batches import collate
from fedguild.data.example import Example
from fedguild.data.rendering import encode
from tools.tiny.tokenizer import MAX_TOKENS


@torch.inference_mode()
def exact_match(model: OlmoeForCausalLM, tokenizer: Any, examples: Sequence[Example], active_experts: int) -> float:
    """Returns the share of examples whose response greedy decoding reproduces, end token included.

    Greedy decoding reproduces a response exactly where every one of its tokens is the most
    likely one after the true tokens before it, so one forward pass decides.
    """
    batch = collate([[encode(example, tokenizer, MAX_TOKENS)] for example in examples], tokenizer.pad_token_id)
    with using_experts(model, active_experts):
        logits = model(input_ids=batch.input_ids, attention_mask=batch.mask.long()).logits
    wrong = logits.flatten(0, 1)[batch.predict_at].argmax(-1) != batch.targets
    wrong_tokens = torch.zeros(len(examples)).index_add_(0, batch.group, wrong.float())
    return float((wrong_tokens == 0).float().mean())


@contextlib.contextmanager
def using_experts(model: OlmoeForCausalLM, count: int) -> Iterator[None]:
    """Runs the model with `count` active experts per token, and restores its own number."""
    routers = [layer.mlp.gate for layer in model.model.layers]
    before = [router.top_k for router in routers]
    try:
        for router in routers:
            router.top_k = count
        yield
    finally:
        for router, top_k in zip(routers, before, strict=True):
            router.top_k = top_k
