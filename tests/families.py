"""Tiny random models of every mixture-of-experts family that is described, made from transformers' config classes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.phimoe.modeling_phimoe import PhimoeTopKRouter

from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.families import FAMILIES
from tests.backbones import END, EXPERTS, PAD, TOP_K, VOCABULARY, is_released

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": END,
    # attention, full or latent or sparse or linear
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "index_n_heads": 2,
    "index_head_dim": 16,
    "index_topk": 64,
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_head_dim": 8,
    "linear_num_heads": 2,
    # state spaces and convolutions
    "mamba_d_state": 8,
    "mamba_n_heads": 2,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_dt_rank": 4,
    "mamba_chunk_size": 8,
    "mamba_num_heads": 2,
    "mamba_head_dim": 16,
    "ssm_state_size": 8,
    "n_groups": 1,
    "chunk_size": 8,
    # experts
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "shared_intermediate_size": 8,
    "shared_expert_intermediate_size": 8,
    "moe_shared_expert_intermediate_size": 8,
    "num_experts": EXPERTS,
    "num_local_experts": EXPERTS,
    "n_routed_experts": EXPERTS,
    "moe_num_experts": EXPERTS,
    "num_experts_per_tok": TOP_K,
    "moe_topk": TOP_K,
    "n_shared_experts": 1,
    "moe_num_shared_experts": 1,
    "num_shared_experts": 1,
    "first_k_dense_replace": 1,
    "num_dense_layers": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
"""Values of every key that a family's config has."""
_LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _LINEAR,
    "granitemoehybrid": {"layer_types": ["mamba", "attention"]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": _LINEAR,
    "llama4_text": {"num_experts_per_tok": 1, "intermediate_size_mlp": 8},
    "minimax": _LINEAR,
    "qwen3_5_moe_text": _LINEAR,
    "qwen3_next": _LINEAR,
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mimo_v2_flash": {"num_key_value_heads": 1},
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["mamba", "moe", "attention", "mlp"],
        "n_group": 1,
        "topk_group": 1,
    },
    "phimoe": {"num_experts_per_tok": 2, "router_jitter_noise": 0.3},
}
"""Keys that a family needs besides."""
STACKED = frozenset(
    {
        "aria_text",
        "gpt_oss",
        "granitemoe",
        "granitemoe_swa",
        "granitemoehybrid",
        "granitemoeshared",
        "hy_v4",
        "llama4_text",
        "minimax_m3_vl_text",
    }
)
"""Families whose repositories on the hub have stacked experts; others have a linear layer for each."""
DESCRIBED = tuple(
    family.name
    for family in FAMILIES.found()
    if family.origin == "fedguild" and is_released(family.name) and family.name != "switch_transformers"
)
"""Those that the installed transformers has, without the encoder-decoder models."""


def tiny_config(family: str, **changes: Any) -> PreTrainedConfig:
    kind = type(AutoConfig.for_model(family))
    known = {*kind().to_dict(), *kind.attribute_map, *inspect.signature(kind).parameters}
    return kind(**{name: value for name, value in SMALL.items() if name in known} | OWN.get(family, {}) | changes)


def tiny_model(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """Returns a random model on transformers' own (eager) experts; biases of the routing are random too."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            tiny_config(family, **changes), dtype=dtype, attn_implementation="eager"
        )
        for name, tensor in (*model.named_buffers(), *model.named_parameters()):
            if name.endswith(("correction_bias", "expert_bias", "router.bias", "proj_bias")):
                tensor.detach().copy_(torch.rand(tensor.shape))
    for module in model.modules():
        if isinstance(module, PhimoeTopKRouter):  # it takes two experts, whatever `top_k` says
            module.register_forward_hook(
                lambda router, _, output: (output[0], *(o[:, : router.top_k] for o in output[1:]))
            )
    model.set_experts_implementation("eager")
    return model.eval()


def tiny_backbone(family: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Backbone:
    """Returns the same random model as `tiny_model`, as a frozen backbone."""
    return make_backbone(tiny_model(family, dtype=dtype, **changes), None, name=f"tiny {family}")
