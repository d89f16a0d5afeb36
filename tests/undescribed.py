"""Small random mixtures of experts of many families, whose descriptions are left out."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fedguild.model import backbone
from fedguild.model.backbone import Backbone, make_backbone
from tests.backbones import END, PAD, VOCABULARY

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": END,
}
_HYBRID = ["linear_attention", "full_attention"]
_DELTA = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "layer_types": _HYBRID,
}
_ROUTED = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_GROUPED = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_shared_experts": 1}
_GLM = {**_GROUPED, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1, "mamba_chunk_size": 4}
_SHARED_EXPERT = {"shared_expert_intermediate_size": 8}

UNDESCRIBED: dict[str, dict[str, Any]] = {
    "gpt_oss": {**_LOCAL, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "qwen3_next": {**_ROUTED, **_DELTA, **_SHARED_EXPERT, "norm_topk_prob": True},
    "granitemoehybrid": {
        **_LOCAL,
        **_MAMBA,
        "layer_types": ["mamba", "attention"],
        "shared_intermediate_size": 8,
        "residual_multiplier": 0.5,
        "position_embedding_type": "nope",
    },
    "nemotron_h": {
        **_GROUPED,
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "mamba_num_heads": 4,
        "mamba_head_dim": 8,
        "ssm_state_size": 4,
        "n_groups": 1,
        "chunk_size": 4,
        "moe_shared_expert_intermediate_size": 8,
        "n_group": 1,
        "topk_group": 1,
    },
    "glm4_moe": _GLM,
    "qwen3_5_moe_text": {**_ROUTED, **_DELTA, **_SHARED_EXPERT},
    "lfm2_moe": {**_ROUTED, "layer_types": ["conv", "full_attention"], "num_dense_layers": 0, "conv_L_cache": 3},
    "phimoe": {**_LOCAL, "router_jitter_noise": 0.3, "input_jitter_noise": 0.3},
    "llama4_text": {**_LOCAL, "num_experts_per_tok": 1, "intermediate_size_mlp": 8, "attn_temperature_tuning": False},
    "minimax_m2": {**_LOCAL, "rotary_dim": 4},
    "ernie4_5_moe": {"moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 8, "moe_num_shared_experts": 1},
    "jetmoe": {**_LOCAL, "kv_channels": 8},
    "cohere2_moe": {**_ROUTED, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4},
    "gemma4_text": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
        "global_head_dim": 8,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 32,
    },
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2, "moe_intermediate_size": 8},
    "jamba": {**_ROUTED, "mamba_d_state": 4, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
}
"""Model type -> what its config has beside the shared sizes."""
HYBRIDS = ("qwen3_next", "granitemoehybrid", "nemotron_h", "lfm2_moe", "jamba")
"""Those with other token mixers than attention."""


def plain(family: str, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    """Returns a random model as transformers makes it."""
    config = AutoConfig.for_model(family, **{**_SHARED, **UNDESCRIBED[family], **changes})
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    if dtype is torch.float64:
        model.set_experts_implementation("eager")  # the grouped products of transformers lack fp64
    return model


def as_backbone(model: Any, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Backbone:
    """Returns a model as a backbone of a family without a description."""
    monkeypatch.setattr(backbone, "_family_of", lambda _: None)
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
    return make_backbone(model, tokenizer, name=model.config.model_type, **options)
