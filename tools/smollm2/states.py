"""The dense model's hidden states before and after each split layer: what the mixture is trained to give again.

Layers below the first split one are the same in both models, so they run once and their output is kept on the disk.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaForCausalLM

SHARD_ROWS = 16


def write(model: LlamaForCausalLM, rows: Tensor, layers: range, folder: Path) -> None:
    """Writes a shard for every `SHARD_ROWS` rows; shards that are there already are kept.

    A shard holds `tokens` [rows, tokens] and `hidden` [layers + 1, rows, tokens, width] in fp16: the input of each
    layer of `layers`, then the output of the last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(rows.split(SHARD_ROWS)):
        path = folder / f"{number:04d}.safetensors"
        if path.exists():
            continue
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            hidden = hidden_states(model, part, layers)
        partial = path.with_suffix(".part")
        save_file({"tokens": part.contiguous(), "hidden": hidden.half().contiguous()}, partial)
        partial.rename(path)
        print(f"states: shard {number + 1} of {-(-len(rows) // SHARD_ROWS)}", flush=True)


def hidden_states(model: LlamaForCausalLM, rows: Tensor, layers: range) -> Tensor:
    """Returns the residual stream around `layers`, [layers + 1, rows, tokens, width]."""
    kept: list[Tensor] = []
    hooks = [
        model.model.layers[layer].register_forward_pre_hook(
            lambda _, args, kwargs: kept.append((args[0] if args else kwargs["hidden_states"]).float()),
            with_kwargs=True,
        )
        for layer in (*layers, layers.stop)
        if layer < len(model.model.layers)
    ]
    whole = model.model.layers
    model.model.layers = whole[: layers.stop + 1]
    try:
        model.model(rows)
    finally:
        model.model.layers = whole
        for hook in hooks:
            hook.remove()
    return torch.stack(kept)


def shards(folder: Path) -> list[Path]:
    """Returns the shards that are there, in order."""
    return sorted(folder.glob("*.safetensors"))


def load(path: Path) -> tuple[Tensor, Tensor]:
    """Returns a shard's tokens and hidden states (fp32)."""
    shard = load_file(path)
    return shard["tokens"], shard["hidden"].float()
