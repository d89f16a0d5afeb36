"""The English checkpoint's architecture: OLMoE's, with its 8 active experts of 64, made small."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from fedguild.core.seeding import torch_rng
from tools.tiny.tokenizer import MAX_TOKENS

_INITIAL_DEVIATION = 0.05


@dataclass(frozen=True)
class Sizes:
    """The sizes that determine the number of parameters; the defaults give 15.8 M.

    Attributes:
        vocabulary: Size of the tokenizer's vocabulary; the embeddings are tied to the output.
        layers: Decoder layers.
        hidden: Width of the residual stream.
        heads: Attention heads, and as many key and value heads.
        experts: Experts per layer.
        active: Active experts per token.
        expert_width: Intermediate size of an expert.
    """

    vocabulary: int = 8192
    layers: int = 4
    hidden: int = 256
    heads: int = 4
    experts: int = 64
    active: int = 8
    expert_width: int = 64


def new_model(tokenizer: Any, sizes: Sizes, seed: int) -> OlmoeForCausalLM:
    """Returns the untrained model.

    As in OLMoE, the weights of the active experts come from a softmax over all experts and are not
    renormalised, and every head has a key and a value head of its own.
    """
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=sizes.hidden,
        intermediate_size=sizes.expert_width,
        num_hidden_layers=sizes.layers,
        num_attention_heads=sizes.heads,
        num_key_value_heads=sizes.heads,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.active,
        norm_topk_prob=False,
        router_aux_loss_coef=0.01,
        tie_word_embeddings=True,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = OlmoeForCausalLM(config)
    rng = torch_rng(seed, "english", "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _INITIAL_DEVIATION, generator=rng)
    return model
