"""Greedy generation for many prompts of several slots, in batches bounded by tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from fedguild.core.errors import ConfigError
from fedguild.data.example import Example
from fedguild.data.rendering import ends_of, prompt_ids
from fedguild.measuring.scores.batching import Item, each, token_batches


class GenerativeModel(Protocol):
    """A model of several slots that continues prompts."""

    def generate(self, prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int) -> list[list[list[int]]]:
        """Returns the greedy continuation of `prompts[slot][row]`, without the prompt, cut at its end."""
        ...


def generate_texts(
    model: GenerativeModel,
    examples: Sequence[Sequence[Example]],
    tokenizer: Any,
    *,
    max_tokens: int,
    max_new_tokens: int,
    batch_tokens: int,
) -> list[list[str]]:
    """Returns the generated response of every example, by slot.

    A prompt longer than `max_tokens - max_new_tokens` loses its beginning, as in training.

    Raises:
        ConfigError: something is to be generated, but `max_new_tokens` leaves no room for a prompt.
    """
    room = max_tokens - max_new_tokens
    if room < 1 and any(examples):
        raise ConfigError(
            f"max_new_tokens is {max_new_tokens}, which leaves no room for a prompt within max_tokens {max_tokens}.",
            "Lower max_new_tokens or raise max_tokens.",
        )
    prompts = [[prompt_ids(example, tokenizer)[-room:] for example in row] for row in examples]
    items = [
        Item(slot, index, len(prompt) + max_new_tokens)
        for slot, slot_prompts in enumerate(prompts)
        for index, prompt in enumerate(slot_prompts)
    ]
    texts = [[""] * len(slot_prompts) for slot_prompts in prompts]
    batches = token_batches(items, batch_tokens)
    with torch.no_grad():
        found = each(model, "generate", _chosen(batches, prompts, max_new_tokens))
        for batch, generated in zip(batches, found, strict=True):
            continuations = iter([tokens for slot_tokens in generated for tokens in slot_tokens])
            for item in batch:
                tokens = next(continuations)
                if examples[item.slot][item.index].messages:  # the turn's end may be another than the text's
                    ends = ends_of(tokenizer)
                    tokens = tokens[: next((at for at, token in enumerate(tokens) if token in ends), None)]
                texts[item.slot][item.index] = tokenizer.decode(tokens, skip_special_tokens=True).strip()
    return texts


def _chosen(
    batches: Sequence[Sequence[Item]], prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int
) -> Iterator[tuple[list[list[Sequence[int]]], int]]:
    for batch in batches:
        chosen: list[list[Sequence[int]]] = [[] for _ in prompts]
        for item in batch:
            chosen[item.slot].append(prompts[item.slot][item.index])
        yield chosen, max_new_tokens
