"""The mixture as it is stored, and as a folder of transformers.

What is stored is small: each layer's share of the neurons, its router, scales and low-rank corrections, in fp16. The
dense model and that file give the same folder, bit for bit, on every machine.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2MoeConfig, Qwen2MoeForCausalLM

from tools.smollm2.experts import Experts, Sizes
from tools.smollm2.heal import Student

SHARED_WIDTH = 8
"""Qwen2-MoE has a shared expert; here it is this wide, and zero."""


def save(student: Student, path: Path) -> None:
    """Writes a mixture's own tensors in fp16, the neurons' order in int16."""
    stored = {
        f"{layer}.{name}": (value.to(torch.int16) if name == "order" else value.half()).contiguous()
        for layer, experts in student.split.items()
        for name, value in experts.state_dict().items()
    }
    save_file(stored, path)


def load(dense: LlamaForCausalLM, path: Path, active: int) -> Student:
    """Returns the mixture stored in a file, in fp32.

    Args:
        dense: The model that it was made from.
        path: What `save` wrote.
        active: Active experts per token.
    """
    stored = {
        name: value.float() if value.is_floating_point() else value.long() for name, value in load_file(path).items()
    }
    layers = sorted({int(name.partition(".")[0]) for name in stored})
    dense.requires_grad_(False)
    student = Student(dense, range(layers[0], layers[-1] + 1))
    for layer in layers:
        own = {name.partition(".")[2]: value for name, value in stored.items() if name.startswith(f"{layer}.")}
        sizes = Sizes(own["reads_in"].shape[0], active, own["reads_in"].shape[1])
        experts = Experts(dense.model.layers[layer].mlp, sizes, own["order"])
        experts.load_state_dict(own)
        student.experts[str(layer)] = experts
    return student


@torch.no_grad()
def as_qwen2_moe(student: Student) -> Qwen2MoeForCausalLM:
    """Returns the mixture as a model of transformers; the layers that are not split stay dense (`mlp_only_layers`)."""
    dense, layers = student.dense, student.layers
    given, sizes = dense.config, next(iter(student.split.values())).sizes
    config = Qwen2MoeConfig(
        vocab_size=given.vocab_size,
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=given.num_attention_heads,
        num_key_value_heads=given.num_key_value_heads,
        max_position_embeddings=given.max_position_embeddings,
        rms_norm_eps=given.rms_norm_eps,
        rope_parameters=given.rope_parameters,
        tie_word_embeddings=given.tie_word_embeddings,
        pad_token_id=given.pad_token_id,
        bos_token_id=given.bos_token_id,
        eos_token_id=given.eos_token_id,
        moe_intermediate_size=given.intermediate_size // sizes.experts,
        shared_expert_intermediate_size=SHARED_WIDTH,
        num_experts=sizes.experts,
        num_experts_per_tok=sizes.active,
        norm_topk_prob=False,
        mlp_only_layers=[layer for layer in range(given.num_hidden_layers) if layer not in layers],
    )
    model = Qwen2MoeForCausalLM(config)
    model.float().eval()
    source, state = dense.state_dict(), model.state_dict()
    for name, value in state.items():
        if name in source:
            value.copy_(source[name])
        else:
            value.zero_()  # biases of attention and the shared expert, which the dense model does not have
    for layer, experts in student.split.items():
        gate_up, down = experts.weights()
        of_layer: dict[str, Tensor] = {
            "gate.weight": experts.router,
            "experts.gate_up_proj": gate_up,
            "experts.down_proj": down,
        }
        for name, value in of_layer.items():
            state[f"model.layers.{layer}.mlp.{name}"].copy_(value)
    return model


def assemble(dense: Path, stored: Path, out: Path, active: int) -> None:
    """Writes the mixture to a folder, with the dense model's tokenizer.

    Args:
        dense: The dense model's folder.
        stored: What `save` wrote.
        out: The folder to write.
        active: Active experts per token.
    """
    as_qwen2_moe(load(LlamaForCausalLM.from_pretrained(dense).eval(), stored, active)).save_pretrained(out)
    AutoTokenizer.from_pretrained(dense).save_pretrained(out)
