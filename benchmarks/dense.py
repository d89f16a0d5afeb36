"""Eight clients of a real dense model in one fused step, against peft's clients one after the other.

Run: make smollm2; python benchmarks/dense.py
SmolLM2-135M-Instruct, LoRA of rank 8 on q_proj and v_proj, each client 2 rows of 64 tokens, AdamW. Prints in fp32 and
bf16 the times, tokens a second and the ratio peft / fused; the aim is 2 in both.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from models import Size, our_step, peft_step_of, rows
from peft import LoraConfig
from timing import add_device, keep_freed_pages, machine, medians
from transformers import AutoConfig, AutoModelForCausalLM

from fedguild.model.backbone import make_backbone

RANK = 8
TARGETS = ("q_proj", "v_proj")
CLIENTS, ROWS, TOKENS = 8, 2, 64


def main() -> None:
    """Measures both dtypes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=Path("models/smollm2-135m"), help="folder of the model")
    parser.add_argument("--repeats", type=int, default=5)
    add_device(parser)
    given = parser.parse_args()
    keep_freed_pages()
    if not given.small and not (given.model / "config.json").is_file():
        parser.error(f"{given.model} is no model's folder; `make smollm2` writes it.")
    for dtype in dict.fromkeys((given.dtype, torch.bfloat16)):
        print(machine(given.device, dtype))
        measure(None if given.small else given.model, given.repeats, dtype, given.device)


def measure(folder: Path | None, repeats: int, dtype: torch.dtype, device: torch.device) -> None:
    """Prints one dtype's times and ratio; without a folder, on a small random model."""
    ours, theirs = (_model(folder, dtype, device) for _ in range(2))
    size = Size(0, 0, 0, 0, ours.config.vocab_size, TOKENS)
    batches = [rows(size, ROWS, seed) for seed in range(CLIENTS)]
    fused, _ = our_step(make_backbone(ours, None, name="SmolLM2"), batches, RANK, TARGETS, active=None)
    one = peft_step_of(theirs, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS)), batches[0])

    def one_after_the_other() -> None:
        for _ in range(CLIENTS):
            one()

    seconds = medians({"fused": fused, "peft": one_after_the_other}, repeats=repeats)
    tokens = CLIENTS * ROWS * TOKENS
    print(
        f"peft x {CLIENTS} {1e3 * seconds['peft']:.0f} ms ({tokens / seconds['peft']:.0f} tokens/s), "
        f"fused {1e3 * seconds['fused']:.0f} ms ({tokens / seconds['fused']:.0f} tokens/s); "
        f"peft / fused {seconds['peft'] / seconds['fused']:.2f}",
        flush=True,
    )


def _model(folder: Path | None, dtype: torch.dtype, device: torch.device) -> Any:
    if folder is not None:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 512}
    config = AutoConfig.for_model("llama", **sizes, num_attention_heads=2, num_key_value_heads=1)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).to(device)


if __name__ == "__main__":
    main()
