"""The embedded checkpoint's architecture: OLMoE's, made very small."""

from __future__ import annotations

from typing import Any

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from fedguild.core.seeding import torch_rng
from tools.tiny.tokenizer import MAX_TOKENS

_INITIAL_DEVIATION = 0.05


def new_model(tokenizer: Any, seed: int) -> OlmoeForCausalLM:
    """Returns the untrained model: 4 layers of 16 experts, of which 8 are active.

    As in OLMoE, the weights of the active experts come from a softmax over all experts and are
    not renormalised, so that fewer active experts mean a smaller output. The heads share one key
    and one value head: so little passes through attention that the experts have to do the work.
    """
    config = OlmoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=1,
        num_experts=16,
        num_experts_per_tok=8,
        norm_topk_prob=False,
        router_aux_loss_coef=0.01,
        max_position_embeddings=MAX_TOKENS,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    model = OlmoeForCausalLM(config)
    rng = torch_rng(seed, "tiny", "weights")
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, _INITIAL_DEVIATION, generator=rng)
    return model
