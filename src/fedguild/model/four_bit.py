"""Frozen weights in 4 bit (NF4) by bitsandbytes, on a CUDA GPU or a CPU.

transformers gives linear layers 4-bit weights as it loads them. The fused experts are bare parameters, which it leaves
in 16 bit (bitsandbytes issue 1849), and they are most of a mixture-of-experts model. `quantise_experts` packs those
too, by bitsandbytes' parametrisation: the module then dequantises a weight when it is accessed. The experts' kernel
accesses it in each pass and keeps nothing in between, so one layer's weights are in 16 bit at a time. While the model
loads, the experts of all layers are. Routers, embeddings and the head stay in 16 bit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers import BitsAndBytesConfig
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available

from fedguild.core.errors import ConfigError, ModelError

OLDEST = "0.50.0"
"""Before this version, dequantised weights pile up under gradient checkpointing (bitsandbytes pull request 1999)."""
KIND = "nf4"


def four_bit_options(dtype: torch.dtype, device: torch.device, router: str = "") -> dict[str, Any]:
    """Returns the arguments that make `from_pretrained` load linear layers in 4 bit.

    Args:
        router: The end of the routers' module paths, which may be linear layers; empty if there are none.

    Raises:
        ConfigError: the device is neither a CUDA GPU nor a CPU, or bitsandbytes or accelerate is missing or too old.
    """
    if device.type not in ("cuda", "cpu"):
        raise ConfigError("model.load_in_4bit needs a CUDA GPU or a CPU.", "Set model.load_in_4bit=false.")
    if not is_bitsandbytes_available(OLDEST) or not is_accelerate_available():
        raise ConfigError(
            f"model.load_in_4bit needs accelerate and bitsandbytes {OLDEST} or newer.",
            "pip install 'fedguild[four-bit]'",
        )
    place: int | str = "cpu"
    if device.type == "cuda":
        place = torch.cuda.current_device() if device.index is None else device.index
    config = BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type=KIND,
        bnb_4bit_compute_dtype=dtype,
        llm_int8_skip_modules=["lm_head", f".{router}"] if router else None,  # None: the head alone
    )
    return {"quantization_config": config, "device_map": {"": place}}


def quantise_experts(experts: Iterable[nn.Module]) -> None:
    """Packs the stacked weights [M, out, in] of experts modules, layer by layer, in place."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit  # type: ignore[import-not-found, unused-ignore]

    for module in experts:
        stacked = [name for name, weight in module.named_parameters(recurse=False) if weight.dim() == 3]
        for name in stacked:
            replace_parameter_4bit(module, name, quant_type=KIND)


def prepare_for_cpu(model: nn.Module, name: str) -> None:
    """Works around two faults of bitsandbytes 0.50 on a CPU.

    In a pass without gradients it would pack linear layers once more, in a layout with scales in bf16; scores would not
    be those of the model that is trained. And it takes the scales of other blocks for a weight whose rows are no whole
    blocks.

    Raises:
        ModelError: a weight has such rows.
    """
    for path, module in model.named_modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            module.support_avx512bf16_for_cpu = False
        weights = module.parametrizations.items() if parametrize.is_parametrized(module) else ()
        packed = {f"{path}.{weight}": getattr(form, "quant_state", None) for weight, (form,) in weights}
        packed[path] = getattr(getattr(module, "weight", None), "quant_state", None)
        for weight, state in packed.items():
            if state is not None and state.shape[-1] % state.blocksize:
                raise ModelError(
                    f"bitsandbytes cannot unpack {weight} of {name} on a CPU: its rows of {state.shape[-1]} values are "
                    f"no whole blocks of {state.blocksize}.",
                    "Set model.load_in_4bit=false, or model.device=cuda.",
                )
