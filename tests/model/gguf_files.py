"""A model of transformers as a GGUF file, written with the package gguf."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoModelForCausalLM, AutoTokenizer


def write_llama(folder: Path, out: Path) -> None:
    """Writes the Llama of a folder, with its byte-level tokenizer, in fp32."""
    import gguf

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    config, heads = (
        model.config,
        {"q_proj": model.config.num_attention_heads, "k_proj": model.config.num_key_value_heads},
    )
    writer = gguf.GGUFWriter(str(out), "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_vocab_size(config.vocab_size)
    special = set(tokenizer.all_special_ids)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([tokenizer.convert_ids_to_tokens(index) for index in range(len(tokenizer))])
    writer.add_token_types([3 if index in special else 1 for index in range(len(tokenizer))])
    merges = json.loads((folder / "tokenizer.json").read_text())["model"]["merges"]
    writer.add_token_merges([" ".join(merge) for merge in merges])
    writer.add_eos_token_id(tokenizer.eos_token_id)
    writer.add_pad_token_id(tokenizer.pad_token_id)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        array = value.numpy()
        for projection, number in heads.items():
            if f".{projection}." in name:
                array = _interleaved(array, number)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _interleaved(weight: Any, heads: int) -> Any:
    """llama.cpp has the halves of rotary dimensions interleaved."""
    halves = weight.reshape(heads, 2, weight.shape[0] // heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))
