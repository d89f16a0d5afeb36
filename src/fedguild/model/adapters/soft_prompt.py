"""Soft prompts: n trained vectors in front of every row, in place of the embeddings of n tokens.

B. Lester, R. Al-Rfou, N. Constant, "The Power of Scale for Parameter-Efficient Prompt Tuning",
EMNLP 2021 (`SoftPrompt`); X. Liu et al., "P-Tuning", ACL 2022 (`EncodedPrompt`, with the MLP of
peft's PromptEncoder).

The rows get n positions in front (`widened`), which a hook on the input embedding fills. Layers, routers and counts
treat these as ordinary tokens; nothing is predicted at these positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import cycle, islice, pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import pad, relu

from fedguild.data.batches import SlotBatch, encode_prompt
from fedguild.errors import ConfigError
from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.info import ModelInfo

PROMPT = "soft_prompt"
"""Name of the prompt [n, d], which the backbone reads directly."""
EMBEDDING = "prompt_encoder.embedding"
"""Name of the encoder's input, [n, d]."""
LAYERS = 3


@dataclass(frozen=True)
class SoftPrompt(AdapterPart):
    """Trains `soft_prompt` [n, d].

    Attributes:
        tokens: n.
        text: The text whose token embeddings are the prompt's initial value, cut or repeated to n as in peft. They are
            read from the backbone when the part attaches, so any machine with the backbone has the initial prompt,
            without a download. Empty if the prompt is loaded anyway; it is zero until then.
    """

    packs = False

    tokens: int
    text: str = ""

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
        _prepend(host, parts, lambda: trainable.stored)


@dataclass(frozen=True)
class EncodedPrompt(AdapterPart):
    """Trains an embedding [n, d] and the MLP that maps it to the prompt: d -> w -> w -> d with ReLU.

    The trainables are `prompt_encoder.embedding` and, for layer k = 0, 1, 2,
    `prompt_encoder.layers.k.weight` [out, in] and `.bias` [out].

    Attributes:
        tokens: n.
        width: w, the MLP's inner width.
        hidden: d, the model's hidden size.
    """

    packs = False

    tokens: int
    width: int
    hidden: int

    def shapes(self, model: ModelInfo) -> dict[str, tuple[int, ...]]:
        """Returns the shapes of the embedding and of the MLP's weights and biases.

        Raises:
            ConfigError: the model has another hidden size.
            ModelError: it is an encoder-decoder model.
        """
        model.require_causal("A soft prompt")
        if model.hidden != self.hidden:
            raise ConfigError(
                f"The prompt encoder is made for hidden size {self.hidden}; {model.name} has {model.hidden}."
            )
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.tokens, self.hidden)}
        for layer, (inputs, outputs) in enumerate(self._sizes()):
            shapes[_weight(layer)], shapes[_bias(layer)] = (outputs, inputs), (outputs,)
        return shapes

    def initial(self, name: str, shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
        """Returns torch's initialisation: a normal embedding, weights and biases uniform in ±1/√in."""
        if name == EMBEDDING:
            return torch.randn(shape, generator=rng)
        inputs, _ = self._sizes()[int(name.split(".")[2])]
        return (torch.rand(shape, generator=rng) * 2 - 1) / math.sqrt(inputs)

    def attach(self, host: AdapterHost, parts: Sequence[EncodedPrompt]) -> None:
        """Puts the encoded prompt in front of every row and encodes it anew in every pass.

        Raises:
            ConfigError: the slots' prompts differ in length or width.
        """
        if len({part.width for part in parts}) > 1:
            raise ConfigError("The clients of a cohort must share the width of the prompt encoder.")
        names = self.shapes(host.backbone.info)
        _prepend(host, parts, lambda: _encoded({name: host.loaded[name].stored for name in names}))

    def _sizes(self) -> list[tuple[int, int]]:
        """Returns each layer's (inputs, outputs)."""
        return list(pairwise([self.hidden, self.width, self.width, self.hidden]))


def encoded_prompt(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the prompt [n, d] encoded by the trainables of one slot's `EncodedPrompt`."""
    return _encoded({name: tensor[None] for name, tensor in tensors.items()})[0]


def widened(batch: SlotBatch, count: int) -> SlotBatch:
    """Returns a batch with `count` additional positions in front of every row, all real and none a target.

    Position numbers start at the first of them. Every token attends to the new positions, and these attend to those
    before them. Their token ids are 0, which a hook on the embedding overrides.
    """
    rows, width = batch.input_ids.shape
    row = batch.predict_at.div(width, rounding_mode="floor")
    positions, attention = batch.position_ids, batch.attention
    if positions is not None:
        front = torch.arange(count, device=positions.device).expand(rows, count)
        positions = torch.cat([front, positions + count], dim=1)
    if attention is not None:
        among = torch.ones(count, count + width, dtype=torch.bool, device=attention.device).tril()
        attention = torch.cat([among.expand(rows, 1, -1, -1), pad(attention, (count, 0), value=True)], dim=2)
    return replace(
        batch,
        input_ids=pad(batch.input_ids, (count, 0)),
        mask=pad(batch.mask, (count, 0), value=True),
        predict_at=batch.predict_at + count * (row + 1),
        position_ids=positions,
        attention=attention,
    )


def _prepend(
    host: AdapterHost, parts: Sequence[SoftPrompt] | Sequence[EncodedPrompt], prompt: Callable[[], Tensor]
) -> None:
    """Widens every batch, and fills the new positions' embeddings with `prompt()` [S, n, d]."""
    count = parts[0].tokens
    if any(part.tokens != count for part in parts):
        raise ConfigError("The clients of a cohort must have soft prompts of the same number of tokens.")

    def fill(_: nn.Module, args: Any, output: Tensor) -> Tensor:
        if output.shape[1] <= count:  # one token at a time, during generation
            return output
        current = host.backbone.runtime.current
        assert current is not None
        rows = torch.tensor(current.rows_per_slot, device=output.device)
        prompts = prompt().to(output.dtype).repeat_interleave(rows, dim=0)
        return torch.cat([prompts, output[:, count:]], dim=1)

    host.widen = partial(widened, count=count)
    host.needs_rows = True
    host.on_close(host.backbone.model.get_input_embeddings().register_forward_hook(fill).remove)


def _text_embeddings(host: AdapterHost, text: str, count: int) -> Tensor:
    """Returns the embeddings [count, d] of a text's tokens, its special tokens in front included."""
    ids = encode_prompt(text, host.backbone.tokenizer)
    if not ids:
        raise ConfigError(f"The soft prompt's text {text!r} has no token.", "Give it a text to start from.")
    chosen = torch.tensor(list(islice(cycle(ids), count)), device=host.device)
    embeddings: Tensor = host.backbone.model.get_input_embeddings().weight.detach()[chosen]
    return embeddings


def _encoded(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the prompts [S, n, d] of the slots' embeddings, weights and biases, slots first."""
    hidden = tensors[EMBEDDING]
    for layer in range(LAYERS):
        hidden = torch.baddbmm(tensors[_bias(layer)][:, None], hidden, tensors[_weight(layer)].transpose(1, 2))
        hidden = relu(hidden) if layer < LAYERS - 1 else hidden
    return hidden


def _weight(layer: int) -> str:
    return f"prompt_encoder.layers.{layer}.weight"


def _bias(layer: int) -> str:
    return f"prompt_encoder.layers.{layer}.bias"
