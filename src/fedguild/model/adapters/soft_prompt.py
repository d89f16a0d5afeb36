"""Soft prompts: n trained vectors in front of every row, in place of the embeddings of n tokens.

B. Lester, R. Al-Rfou, N. Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning", EMNLP 2021.

The rows get n positions in front (`widened`), which a hook on the input embedding fills. Layers, routers and counts
treat these as ordinary tokens; nothing is predicted at these positions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedguild.core.errors import ConfigError
from fedguild.data.batches import SlotBatch
from fedguild.data.rendering import encode_prompt
from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.info import ModelInfo
from fedguild.model.runtime import Pass

PROMPT = "soft_prompt"
"""Name of the prompt [n, d], which the backbone reads directly."""


@dataclass(frozen=True)
class SoftPrompt(AdapterPart):
    """Trains `soft_prompt` [n, d].

    Attributes:
        tokens: n.
        text: The text whose token embeddings are the prompt's initial value, cut or repeated to n as in peft. They are
            read from the backbone when the part attaches, so any machine with the backbone has the initial prompt
            without a download. Empty if the prompt is loaded anyway; it is zero until then.
    """

    packs = False

    tokens: int
    text: str = ""

    @property
    def prefix_tokens(self) -> int:
        return self.tokens

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns `soft_prompt` -> (n, d); if it is not loaded, it keeps the text's embeddings from `attach`.

        Raises:
            ModelError: the model is an encoder-decoder model.
        """
        model.require_causal("A soft prompt")
        return {PROMPT: (self.tokens, model.hidden)}

    def attach(self, host: AdapterHost, parts: Sequence[SoftPrompt]) -> None:
        """Puts the prompt in front of every row, initialised from the text.

        Raises:
            ConfigError: the slots' prompts differ in length, or the text has no token.
        """
        trainable = host.loaded[PROMPT]
        for slot, part in enumerate(parts):
            if part.text:
                trainable.write(slot, _text_embeddings(host, part.text, part.tokens))
        prepend(host, [part.tokens for part in parts], lambda: trainable.stored)


def widened(batch: SlotBatch, count: int) -> SlotBatch:
    """Returns a batch with `count` additional positions in front of every row, all real and none a target.

    Position numbers start at the first of them. Every token attends to the new positions, and these attend to those
    before them. Their token ids are 0, which a hook on the embedding overrides.
    """
    rows, width = batch.input_ids.shape
    row = batch.predict_at.div(width, rounding_mode="floor")
    positions, segments = batch.position_ids, batch.segments
    if positions is not None:
        front = torch.arange(count, device=positions.device).expand(rows, count)
        positions = torch.cat([front, positions + count], dim=1)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (count, 0)),
        mask=pad(batch.mask, (count, 0), value=True),
        predict_at=batch.predict_at + count * (row + 1),
        position_ids=positions,
        segments=None if segments is None else pad(segments, (count, 0)),  # a part of the prompt
    )


def prepend(host: AdapterHost, tokens: Sequence[int], prompt: Callable[[], Tensor]) -> None:
    """Widens every batch, and fills the new positions' embeddings.

    Args:
        tokens: n, by slot.
        prompt: Returns the prompts, [S, n, d].

    Raises:
        ConfigError: the slots' prompts differ in length.
    """
    count = tokens[0]
    if any(other != count for other in tokens):
        raise ConfigError("The clients of a cohort must have soft prompts of the same number of tokens.")

    def fill(current: Pass, _: Any, output: Tensor) -> Tensor:
        if output.shape[1] <= count:  # one token at a time, during generation
            return output
        slot = current.slot_of_token(len(output), output.device)
        prompts = prompt().to(output.dtype).index_select(0, slot)
        return torch.cat([prompts, output[:, count:]], dim=1)

    host.widen = partial(widened, count=count)
    host.needs_rows = True
    host.change_output(host.backbone.model.get_input_embeddings(), fill)


def _text_embeddings(host: AdapterHost, text: str, count: int) -> Tensor:
    """Returns the embeddings [count, d] of a text's tokens, including special tokens at its start."""
    ids = encode_prompt(text, host.backbone.tokenizer)
    if not ids:
        raise ConfigError(f"The soft prompt's text {text!r} has no token.", "Give it a text to start from.")
    chosen = torch.tensor(list(islice(cycle(ids), count)), device=host.device)
    embeddings: Tensor = host.backbone.model.get_input_embeddings().weight.detach()[chosen]
    return embeddings
