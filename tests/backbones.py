"""Small random models of every supported family, for tests that need a backbone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    DeepseekV2Config,
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    OlmoConfig,
    OlmoeConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    SwitchTransformersConfig,
    T5Config,
)
from transformers.models.switch_transformers import SwitchTransformersTop1Router

from fedguild.core.errors import ModelError
from fedguild.core.seeding import torch_rng
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.families import FAMILIES as DESCRIBED
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan, adapter_shapes

VOCABULARY = 32
PAD, END = 0, 2
EXPERTS, TOP_K = 8, 4

_SHARED: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "bos_token_id": 1,
    "eos_token_id": END,
}
_SOME_DENSE = {"first_k_dense_replace": 1, "n_shared_experts": 1, "moe_intermediate_size": 8}
_LATENT = {"kv_lora_rank": 8, "q_lora_rank": 8, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8}
_ROUTED = {"n_routed_experts": EXPERTS, "num_experts_per_tok": TOP_K}
_QWEN = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K, "moe_intermediate_size": 8}
_GROUPS = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

MOE_FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "olmoe": (OlmoeConfig, {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}),
    "mixtral": (MixtralConfig, {"num_local_experts": EXPERTS, "num_experts_per_tok": TOP_K, "num_key_value_heads": 1}),
    "qwen2_moe": (Qwen2MoeConfig, {**_QWEN, "shared_expert_intermediate_size": 8}),
    "qwen3_moe": (Qwen3MoeConfig, {**_QWEN, "norm_topk_prob": True, "head_dim": 8}),
    "deepseek_v2 greedy": (DeepseekV2Config, {**_SOME_DENSE, **_LATENT, **_ROUTED, "topk_method": "greedy"}),
    "deepseek_v2 grouped": (
        DeepseekV2Config,
        {**_SOME_DENSE, **_LATENT, **_ROUTED, **_GROUPS, "topk_method": "group_limited_greedy"},
    ),
    "deepseek_v3": (DeepseekV3Config, {**_SOME_DENSE, **_LATENT, **_ROUTED, **_GROUPS}),
}
DENSE_FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"num_key_value_heads": 1}),
    "qwen2": (Qwen2Config, {}),
    "olmo": (OlmoConfig, {}),
}
FAMILIES = MOE_FAMILIES | DENSE_FAMILIES
SEQ2SEQ_FAMILIES: dict[str, tuple[type, dict[str, Any]]] = {
    "switch": (
        SwitchTransformersConfig,
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 8,
            "num_layers": 2,
            "num_decoder_layers": 2,
            "num_sparse_encoder_layers": 1,
            "num_sparse_decoder_layers": 1,
            "num_heads": 2,
            "num_experts": EXPERTS,
            "initializer_factor": 2.0,
            "decoder_start_token_id": PAD,
            "attn_implementation": "eager",
        },
    ),
    "t5": (
        T5Config,
        {
            "d_model": 16,
            "d_kv": 8,
            "d_ff": 8,
            "num_layers": 1,
            "num_decoder_layers": 2,
            "num_heads": 2,
            "initializer_factor": 2.0,
            "decoder_start_token_id": PAD,
            "attn_implementation": "eager",
        },
    ),
}
"""The first has one sparse layer in the encoder and one in the decoder, each behind a dense one; the second none."""


def is_released(model_type: str) -> bool:
    """Whether the installed transformers has an architecture as it is described."""
    try:
        if model_type in DESCRIBED:
            DESCRIBED.load(model_type).require_release(model_type)
    except ModelError:
        return False
    return model_type in CONFIG_MAPPING


def tiny_model(family: str = "olmoe", *, dtype: torch.dtype = torch.float32, seed: int = 0, **changes: Any) -> Any:
    """Returns a random model of a family, on transformers' own (eager) experts; in fp64 its routers are too.

    In bf16 its weights are those of fp32. A test is skipped where transformers is too old for the family.
    """
    kind, own = (FAMILIES | SEQ2SEQ_FAMILIES)[family]
    if not is_released(kind.model_type):
        pytest.skip(f"this transformers is too old for {kind.model_type}")
    shared = {} if family in SEQ2SEQ_FAMILIES else {**_SHARED, "attn_implementation": "sdpa"}
    config = kind(**{**shared, "vocab_size": VOCABULARY, "pad_token_id": PAD, "eos_token_id": END, **own, **changes})
    auto = AutoModelForSeq2SeqLM if family in SEQ2SEQ_FAMILIES else AutoModelForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = auto.from_config(config, dtype=dtype).eval()
        if dtype is torch.bfloat16:
            torch.manual_seed(seed)
            model.load_state_dict(auto.from_config(config, dtype=torch.float32).state_dict())
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.copy_(torch.rand(buffer.shape))
    if family == "switch" and dtype is torch.float64:
        for module in model.modules():
            if isinstance(module, SwitchTransformersTop1Router):
                module.dtype = dtype
    if family in MOE_FAMILIES:
        model.set_experts_implementation("eager")
    return model


def tiny_backbone(
    family: str = "olmoe",
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    gradient_checkpointing: bool = False,
    **changes: Any,
) -> Backbone:
    """Returns the same random model as `tiny_model`, as a frozen backbone."""
    model = tiny_model(family, dtype=dtype, seed=seed, **changes)
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
    return make_backbone(model, tokenizer, name=f"tiny {family}", gradient_checkpointing=gradient_checkpointing)


def lora_plan(
    rank: int,
    scale: float,
    targets: tuple[str, ...],
    active_experts: int | None = None,
    *,
    output_scale: str = "none",
    start: float = 1.0,
    **changes: Any,
) -> AdapterPlan:
    """Returns a plan of LoRA (`changes` are its other fields) and, unless it is `none`, an output scale."""
    scales = () if output_scale == "none" else (OutputScale(output_scale, start),)  # type: ignore[arg-type]
    return AdapterPlan((Lora(rank, scale, targets, **changes), *scales), active_experts)


def random_adapter(info: ModelInfo, plan: AdapterPlan, seed: int, size: float = 0.3) -> dict[str, Tensor]:
    """Returns adapters far from zero: factors of normal values, output scales around 1."""
    rng = torch_rng(seed, "adapter")
    return {
        name: torch.randn(shape, generator=rng, dtype=torch.float64) * size + name.endswith("output_scale")
        for name, shape in adapter_shapes(info, plan).items()
    }


def random_rows(lengths: list[int], seed: int) -> list[list[int]]:
    """Returns token ids of the given lengths, none of them special."""
    rng = torch_rng(seed, "rows")
    return [torch.randint(3, VOCABULARY, (length,), generator=rng).tolist() for length in lengths]
