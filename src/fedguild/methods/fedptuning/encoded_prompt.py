"""Prompt encoder: a soft prompt that an MLP computes of a trained embedding.

X. Liu et al., "P-Tuning: Prompt Tuning Can Be Comparable to Fine-tuning Across Scales and Tasks",
ACL 2022, with the MLP of peft's PromptEncoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.functional import relu

from fedguild.core.errors import ConfigError
from fedguild.model.adapters.part import AdapterHost, AdapterPart
from fedguild.model.adapters.soft_prompt import prepend
from fedguild.model.info import ModelInfo

EMBEDDING = "prompt_encoder.embedding"
"""Name of the encoder's input, [n, d]."""
LAYERS = 3


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

    @property
    def prefix_tokens(self) -> int:
        return self.tokens

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
        lengths = [part.tokens for part in parts]
        prepend(host, lengths, lambda: _encoded({name: host.loaded[name].stored for name in names}))

    def _sizes(self) -> list[tuple[int, int]]:
        """Returns each layer's (inputs, outputs)."""
        return list(pairwise([self.hidden, self.width, self.width, self.hidden]))


def encoded_prompt(tensors: Mapping[str, Tensor]) -> Tensor:
    """Returns the prompt [n, d] encoded by the trainables of one slot's `EncodedPrompt`."""
    return _encoded({name: tensor[None] for name, tensor in tensors.items()})[0]


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
