"""Llama-3.2-1B from its published sizes, on meta tensors: for counts that papers state."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from fedguild.model.backbone import describe
from fedguild.model.plan import ModelInfo


def llama_1b() -> ModelInfo:
    """Returns what Llama-3.2-1B looks like."""
    config = LlamaConfig(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        return describe(AutoModelForCausalLM.from_config(config), "meta-llama/Llama-3.2-1B", [])
