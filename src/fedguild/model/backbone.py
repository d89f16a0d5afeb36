"""The frozen backbone: a causal or encoder-decoder language model of transformers, loaded once and never changed."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from fedguild.data.batches import Seq2Seq
from fedguild.errors import ConfigError, ModelError
from fedguild.heap import keep_freed_pages
from fedguild.model.four_bit import four_bit_options, quantise_experts
from fedguild.model.frozen_linear import speed_up_frozen_linears
from fedguild.model.known import find_known, known_models
from fedguild.model.merging import merged
from fedguild.model.moe.switch import stack_experts
from fedguild.model.moe.view import MoeLayer, attach, find_moe_layers
from fedguild.model.packaged import EMBEDDED, packaged
from fedguild.model.plan import LinearInfo, ModelInfo
from fedguild.model.runtime import Runtime

_ATTENTION = {"self_attn", "attn", "SelfAttention", "EncDecAttention"}
"""Names that attention has in a module path."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class Backbone:
    """A frozen model with its tokenizer, its description and the hooks' runtime.

    Attributes:
        model: The transformers model, without gradients.
        tokenizer: Its tokenizer, padding token set.
        info: What the model looks like.
        moe: Its mixture-of-experts layers; empty for a dense model.
        runtime: What the hooks share.
        device: Where it lies.
        dtype: The dtype of its products.
        is_merged: Whether its weights hold changes at the moment; see `merged`.
    """

    model: Any
    tokenizer: Any
    info: ModelInfo
    moe: list[MoeLayer]
    runtime: Runtime
    device: torch.device
    dtype: torch.dtype
    is_merged: bool = False

    def fingerprint(self) -> str:
        """Returns a digest of every weight, to prove that nothing changed one."""
        digest = hashlib.sha256()
        for name, tensor in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    @contextmanager
    def merged(self, merges: Mapping[str, Tensor]) -> Iterator[None]:
        """Adds low-rank changes to the weights inside the block; afterwards they are bit by bit as before.

        Args:
            merges: `{version}/{module}.lora_A` [.., R, in] and `.lora_B` [.., out, R], the scale folded in;
                none leave everything as it is, at no cost.

        Raises:
            ModelError: changes are merged already, the weights are in 4 bit, or a change fits no weight.
        """
        if self.is_merged:
            raise ModelError("The weights of this backbone hold the changes of another state.", "End that block first.")
        self.is_merged = bool(merges)
        try:
            with merged(self.model, self.info, merges):
                yield
        finally:
            self.is_merged = False

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Lets the layers keep what they computed for past tokens; a layer that checkpoints drops it."""
        checkpointed = [layer for layer in _checkpointed_layers(self.model) if layer.training]
        try:
            for layer in checkpointed:
                layer.training = False
            yield
        finally:
            for layer in checkpointed:
                layer.training = True


def load_backbone(
    path: str = EMBEDDED,
    *,
    revision: str | None = None,
    dtype: str = "auto",
    device: str = "auto",
    load_in_4bit: bool = False,
    attention: str = "sdpa",
    trust_remote_code: bool = False,
    gradient_checkpointing: bool = False,
) -> Backbone:
    """Loads a backbone from a hub id, a folder, or by the name of a checkpoint in this package (`embedded`, `english`).

    On a CPU the process keeps the pages that it frees from then on (heap.py).

    Args:
        path: Hub id, folder, `embedded` or `english`.
        revision: Branch, tag or commit on the hub.
        dtype: `auto` (bf16 on a GPU, fp32 on a CPU), float32, bfloat16 or float16.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        load_in_4bit: Whether to keep the frozen linear layers and experts in 4 bit (needs a GPU and bitsandbytes).
        attention: transformers' attention implementation; `sdpa` means `eager` for encoder-decoder models,
            whose position biases transformers cannot give to sdpa.
        trust_remote_code: Whether the hub's own model code may run.
        gradient_checkpointing: Whether to recompute activations in the backward pass.

    Raises:
        ModelError: the model cannot be found or loaded, or its experts are not supported.
        ConfigError: the device or dtype is not there.
    """
    where = pick_device(device)
    kind = pick_dtype(dtype, where)
    if where.type == "cpu":
        keep_freed_pages()
    source = str(packaged(path) or path)
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    if load_in_4bit:
        options |= four_bit_options(kind, where)
    try:
        with _quiet():
            tokenizer = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
            if config.is_encoder_decoder and attention == "sdpa":
                attention = "eager"
            model = _auto_class(config).from_pretrained(source, dtype=kind, attn_implementation=attention, **options)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(
            f"Cannot load the model '{path}': {str(error).splitlines()[0]}",
            "model.path takes a hub id, a folder with config.json and safetensors weights, 'embedded' or 'english'.",
        ) from error
    placed: Any = model
    if not load_in_4bit:
        placed = placed.to(where)
    return make_backbone(placed, tokenizer, name=path, gradient_checkpointing=gradient_checkpointing)


def make_backbone(model: Any, tokenizer: Any, *, name: str, gradient_checkpointing: bool = False) -> Backbone:
    """Freezes a loaded model and attaches the view of its experts.

    Args:
        model: A causal or encoder-decoder language model of transformers, on its device. The experts of
            SwitchTransformers are stacked in place.
        tokenizer: Its tokenizer; may be None where no text is encoded.
        name: What to call it in records and messages.
        gradient_checkpointing: Whether to recompute activations in the backward pass.

    Raises:
        ModelError: its experts are not supported, or it cannot recompute activations.
    """
    model.requires_grad_(False)
    model.eval()
    stack_experts(model)
    speed_up_frozen_linears(model)
    if gradient_checkpointing:
        _checkpoint_layers(model, name)
    if tokenizer is not None and tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    runtime = Runtime()
    family = str(model.config.model_type)
    layers = find_moe_layers(model, family, runtime)
    attach(model, layers)
    info = describe(model, name, layers)
    if getattr(model, "is_loaded_in_4bit", False):
        quantise_experts(layer.experts for layer in layers)
    parameter = next(model.parameters())
    return Backbone(model, tokenizer, info, layers, runtime, parameter.device, model.dtype)


def _checkpointed_layers(model: nn.Module) -> list[GradientCheckpointingLayer]:
    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpoint_layers(model: Any, name: str) -> None:
    """Switches checkpointing on: only the layers are told that they train, so no dropout of the model's own acts."""
    layers = _checkpointed_layers(model)
    if not layers:
        raise ModelError(f"{name} cannot recompute activations.", "Set model.gradient_checkpointing=false.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def describe(model: Any, name: str, layers: list[MoeLayer]) -> ModelInfo:
    """Returns what a model looks like; works on meta tensors too."""
    config = model.config.get_text_config()
    seq2seq = _seq2seq(config)
    head = model.get_output_embeddings()
    routers = {layer.info.router for layer in layers}
    linears = []
    for path, module in model.named_modules():
        if isinstance(module, nn.Linear) and module is not head and path not in routers:
            group = "attention" if _ATTENTION & set(path.split(".")) else "mlp"
            linears.append(LinearInfo(path, group, module.in_features, module.out_features))  # type: ignore[arg-type]
    return ModelInfo(
        name=name,
        family=str(model.config.model_type),
        hidden=int(config.hidden_size),
        layers=int(config.num_hidden_layers) + int(config.num_decoder_layers if seq2seq else 0),
        vocabulary=int(head.weight.shape[0]),
        parameters=model.num_parameters(),
        linears=tuple(linears),
        moe=tuple(layer.info for layer in layers),
        seq2seq=seq2seq,
    )


def describe_config(path: str, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelInfo:
    """Returns what a model looks like from its config alone, without weights.

    Args:
        path: `embedded`, `english`, a folder, a `config.json`, a known model's hub id or short name (which needs no
            download), or any other hub id.
        revision: Branch, tag or commit on the hub, which is then asked for known models too.
        trust_remote_code: Whether the hub's own model code may run.

    Raises:
        ModelError: there is no such config, or its experts are not supported.
    """
    known = find_known(path) if revision is None and not Path(path).exists() else None
    source = str(packaged(path) or path)
    try:
        if known is not None:
            config = AutoConfig.for_model(**known.config)
        else:
            config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise ModelError(
            f"Cannot read the config of '{path}': {str(error).splitlines()[0]}",
            "Give a hub id, a folder with config.json, that file itself, 'embedded', 'english', or offline one of: "
            f"{', '.join(model.name for model in known_models())}.",
        ) from error
    return _described(config, known.hub_id if known else path, trust_remote_code)


def describe_architecture(config: Mapping[str, Any], name: str) -> ModelInfo:
    """Returns what a model of these keys of a `config.json`, `model_type` among them, looks like.

    Raises:
        ModelError: its experts are not supported.
    """
    return _described(AutoConfig.for_model(**config), name)


def _described(config: PreTrainedConfig, name: str, trust_remote_code: bool = False) -> ModelInfo:
    with torch.device("meta"):
        model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
        stack_experts(model)
    return describe(model, name, find_moe_layers(model, str(config.model_type), Runtime()))


def _auto_class(config: PreTrainedConfig) -> Any:
    return AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM


def _seq2seq(config: Any) -> Seq2Seq | None:
    """Returns how an encoder-decoder model takes a text; None for a causal model.

    Raises:
        ModelError: it is not of T5's kind, whose decoder starts from padding.
    """
    if not config.is_encoder_decoder:
        return None
    if not hasattr(config, "num_decoder_layers"):
        raise ModelError(
            f"Encoder-decoder models of the family '{config.model_type}' are not supported.",
            "Supported: t5 and switch_transformers, and every causal language model.",
        )
    start = getattr(config, "decoder_start_token_id", None)
    end = config.eos_token_id
    return Seq2Seq(config.pad_token_id if start is None else start, end[0] if isinstance(end, list) else end)


def pick_device(device: str) -> torch.device:
    """Returns the device a setting means; `auto` is the first GPU if there is one.

    Raises:
        ConfigError: a GPU is asked for but there is none, or the name is unknown.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"model.device: unknown device '{device}'.", "Known: auto, cpu, cuda, cuda:N.") from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda is asked for, but torch sees no GPU.", "Set model.device=cpu or auto.")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype a setting means; `auto` is bf16 on a GPU and fp32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype: unknown dtype '{dtype}'.", f"Known: auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]


class _quiet:  # noqa: N801 - reads as a statement: `with _quiet():`
    """Keeps transformers' progress bars out of our own output."""

    def __enter__(self) -> None:
        self._level = transformers_logging.get_verbosity()
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()

    def __exit__(self, *_: object) -> None:
        transformers_logging.set_verbosity(self._level)
