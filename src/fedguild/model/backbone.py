"""The frozen backbone: a causal or encoder-decoder language model of transformers, loaded once and never changed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedConfig
from transformers.utils.import_utils import is_accelerate_available
from transformers.utils.quantization_config import Mxfp4Config

from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.payload import digest_of
from fedguild.data.batches import Seq2Seq
from fedguild.model.families import FAMILIES
from fedguild.model.four_bit import four_bit_options, prepare_for_cpu, quantise_experts
from fedguild.model.frozen_linear import speed_up_frozen_linears
from fedguild.model.heap import keep_freed_pages
from fedguild.model.info import LinearInfo, ModelInfo
from fedguild.model.kernels.fused import fuse
from fedguild.model.known import find_known, known_models
from fedguild.model.linears import adaptable_linears
from fedguild.model.moe.family import Family, attach, moe_layers
from fedguild.model.moe.native import check, native_layers
from fedguild.model.moe.undescribed import undescribed_moe
from fedguild.model.moe.view import MoeLayer
from fedguild.model.packaged import EMBEDDED, PACKAGED
from fedguild.model.packed_rows import allow_packing, masked_span
from fedguild.model.pretrained import (
    UNREADABLE,
    arguments_of,
    auto_class,
    is_gguf,
    is_hub_id,
    load_tokenizer,
    loading,
    read_config,
    reason_of,
    require_rows,
    source_of,
)
from fedguild.model.ranks import Ranks
from fedguild.model.runtime import Runtime
from fedguild.model.sharding import shard
from fedguild.model.weight_changes import exchanged, merged
from fedguild.model.weight_files import LoadingReport, check_weights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


@dataclass
class Backbone:
    """A frozen model with its tokenizer, its description and the hooks' runtime.

    Attributes:
        model: The transformers model, without gradients.
        tokenizer: Its tokenizer, padding token set.
        moe: Its mixture-of-experts layers; empty for a dense model.
        runtime: The state that the hooks share.
        dtype: The dtype of its products.
        packs: Whether a pass may pack rows without their padding (`packed_rows`).
        is_merged: Whether its weights currently include merged changes; see `merged`.
        ranks: The processes that share its layers; None if this one holds all of it.
    """

    model: Any
    tokenizer: Any
    info: ModelInfo
    moe: list[MoeLayer]
    runtime: Runtime
    device: torch.device
    dtype: torch.dtype
    packs: bool = False
    is_merged: bool = False
    ranks: Ranks | None = None
    _ends_with_head: bool | None = None
    _originals: Mapping[str, Tensor] = field(default_factory=dict)

    def fingerprint(self) -> str:
        """Returns a digest of all weights, to verify that none has changed."""
        return digest_of(self.model.state_dict())

    @property
    def head(self) -> nn.Module:
        """The module whose output is the logits, or what they are computed from."""
        head: nn.Module = self.model.get_output_embeddings()
        return head

    @torch.no_grad()
    def ends_with_head(self) -> bool:
        """Whether the logits of a causal model are its head's plain output, changed by no hook.

        Some models scale or cap them after the head; the first call finds out with a few tokens. Call it outside of a
        pass.
        """
        if self.info.seq2seq is not None or self.head._forward_hooks:
            return False
        if self._ends_with_head is None:
            seen: list[Tensor] = []
            hook = self.head.register_forward_hook(lambda _, __, output: seen.append(output))
            current, self.runtime.current = self.runtime.current, None
            try:
                logits = self.model(torch.arange(3, device=self.device)[None], use_cache=False).logits
            finally:
                self.runtime.current = current
                hook.remove()
            self._ends_with_head = len(seen) == 1 and torch.equal(logits, seen[0])
        return self._ends_with_head

    @contextmanager
    def merged(self, merges: Mapping[str, Tensor]) -> Iterator[None]:
        """Adds low-rank changes to the weights inside the block and restores the weights bit for bit afterwards.

        Args:
            merges: `{version}/{module}.lora_A` [.., R, in] and `.lora_B` [.., out, R], the scale folded in;
                if empty, the weights stay unchanged at no cost.

        Raises:
            ModelError: changes are merged already, the weights are in 4 bit, or a change fits no weight.
        """
        if self.is_merged:
            raise ModelError(
                "The weights of this backbone include another state's changes.", "Leave that `merged` block first."
            )
        self.is_merged = bool(merges)
        try:
            with merged(self.model, self.info, merges) as self._originals:
                yield
        finally:
            self.is_merged, self._originals = False, {}

    @contextmanager
    def as_loaded(self) -> Iterator[None]:
        """Takes the changes that are merged into the weights out of them inside the block."""
        with exchanged(self.model, self._originals):
            yield

    @contextmanager
    def without_gradients(self) -> Iterator[None]:
        """Runs passes inside the block without gradients; not in inference mode, because FSDP keeps what it gathers."""
        with torch.inference_mode() if self.ranks is None else torch.no_grad():
            yield

    @contextmanager
    def caching(self) -> Iterator[None]:
        """Enables the cache of past tokens inside the block; a layer with checkpointing would drop it."""
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
    packing: bool = True,
    ranks: Ranks | None = None,
) -> Backbone:
    """Loads a backbone from a hub id, a folder, or by the name of a checkpoint in this package (`embedded`, `english`).

    On a CPU the process keeps the memory pages that it frees from then on (heap.py).

    Args:
        path: Hub id, folder, `embedded` or `english`.
        revision: Branch, tag or commit on the hub.
        dtype: `auto` (bf16 on a GPU, fp32 on a CPU), float32, bfloat16 or float16.
        device: `auto`, `cpu`, `cuda` or `cuda:N`.
        load_in_4bit: Whether to keep the frozen linear layers and experts in 4 bit (needs bitsandbytes).
        attention: transformers' attention implementation; `sdpa` means `eager` for models that sdpa cannot run, such as
            gpt-oss with its attention sinks, and for encoder-decoder models with their position biases.
        trust_remote_code: Whether the hub's own model code may run.
        gradient_checkpointing: Whether to recompute activations in the backward pass.
        packing: Whether to pack rows without their padding, if the model's attention allows it.
        ranks: The processes that share the backbone's layers, each on its own device; all of them call this.

    Raises:
        ModelError: the model cannot be found or loaded, or its experts are not supported.
        ConfigError: the device or dtype is not available, or a backbone is to be in 4 bit that is sharded or packed
            already.
    """
    where = pick_device(device) if ranks is None else ranks.device
    if ranks is not None and load_in_4bit:
        raise ConfigError("Weights in 4 bit cannot be sharded.", "Set model.load_in_4bit=false.")
    kind = pick_dtype(dtype, where)
    if where.type == "cpu":
        keep_freed_pages()
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config = read_config(path, **options)
    unpacking: dict[str, Any] = {}
    if (getattr(config, "quantization_config", None) or {}).get("quant_method") == "mxfp4":
        if load_in_4bit:
            raise ConfigError(
                f"The experts of '{path}' are in MXFP4 already, and are unpacked to be trained.",
                "Set model.load_in_4bit=false.",
            )
        unpacking = {"quantization_config": Mxfp4Config(dequantize=True)}
    placement: dict[str, Any] = {}
    if ranks is None:
        family = _family_of(config) if load_in_4bit else None
        router = ".".join(filter(None, (family.router, family.projection))) if family else ""
        placement = four_bit_options(kind, where, router) if load_in_4bit else straight_to(where)
    tokenizer = load_tokenizer(path, **options)
    kernel = attention_kernel(attention, encoder_decoder=config.is_encoder_decoder)
    if ranks is not None and ranks.rank > 0:  # rank 0 reads the weights for all
        model = _without_weights(config, trust_remote_code, dtype=kind, attn_implementation=kernel)
    else:
        with loading(path):
            model, report = auto_class(config).from_pretrained(
                **arguments_of(path),
                dtype=kind,
                attn_implementation=kernel,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
                **placement,
                **unpacking,
            )
        for weight in model.parameters() if unpacking else ():  # transformers before 5.23 unpacks to bf16
            weight.data = weight.data.to(kind)
        if is_gguf(path):  # its weights are dequantised
            model.hf_quantizer.remove_quantization_config(model)
        LoadingReport(
            report["missing_keys"], report["unexpected_keys"], report["mismatched_keys"], list(model.state_dict())
        ).require_agreement(path)
    placed: Any = model if placement or ranks is not None else model.to(where)
    options = {"gradient_checkpointing": gradient_checkpointing, "packing": packing, "ranks": ranks}
    backbone = make_backbone(placed, tokenizer, name=path, **options)
    require_rows(tokenizer, backbone.info.vocabulary, path)
    return backbone


class LaterBackbone:
    """A backbone without weights: its description and its tokenizer; for a process that leaves the weights to others.

    Access to anything else loads the backbone.
    """

    def __init__(
        self, info: ModelInfo, tokenizer: Any, device: torch.device, dtype: torch.dtype, load: Callable[[], Backbone]
    ) -> None:
        self.info, self.tokenizer, self.device, self.dtype = info, tokenizer, device, dtype
        self._load = load
        self._whole: Backbone | None = None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._whole is None:
            self._whole = self._load()
        return getattr(self._whole, name)


def later_backbone(
    info: ModelInfo,
    load: Callable[[], Backbone],
    *,
    path: str,
    revision: str | None,
    dtype: str,
    device: str,
    trust_remote_code: bool,
    **_: Any,
) -> LaterBackbone:
    """Returns a backbone that calls `load` when its weights are needed; other arguments as of `load_backbone`."""
    tokenizer = load_tokenizer(path, revision=revision, trust_remote_code=trust_remote_code)
    require_rows(tokenizer, info.vocabulary, path)
    where = torch.device(device.partition(":")[0]) if device != "auto" else pick_device(device)
    return LaterBackbone(info, tokenizer, where, pick_dtype(dtype, where), load)


def attention_kernel(attention: str, *, encoder_decoder: bool) -> str | None:
    """Returns the implementation to ask transformers for; None, its own choice, is sdpa where the model supports it."""
    if attention != "sdpa":
        return attention
    return "eager" if encoder_decoder else None


def straight_to(device: torch.device) -> dict[str, Any]:
    """Returns the argument that makes `from_pretrained` put every weight on its device as it is read.

    It is empty for a CPU, and without the package accelerate: then the whole model passes through the host's memory.
    """
    return {"device_map": {"": device}} if device.type != "cpu" and is_accelerate_available() else {}


def inspect_model(path: str = EMBEDDED, *, revision: str | None = None, trust_remote_code: bool = False) -> ModelInfo:
    """Returns a model's description from its config, without loading the model or reading a weight.

    A folder is checked for everything that loading needs: its tokenizer, complete weight files, and the names and
    shapes that the config requires. For a model on the hub, only the config is downloaded.

    Raises:
        ModelError: there is no such model, its folder is incomplete, its weights do not match its config, or its
            experts are not supported.
    """
    options: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
    config, folder = read_config(path, **options), Path(source_of(path))
    with loading(path):
        info = _described(config, path, trust_remote_code)
        tokenizer = load_tokenizer(path, **options) if folder.exists() else None
        if folder.is_dir():
            check_weights(folder, _without_weights(config, trust_remote_code))
        if tokenizer is not None:
            require_rows(tokenizer, info.vocabulary, path)
    return info


def make_backbone(
    model: Any,
    tokenizer: Any,
    *,
    name: str,
    gradient_checkpointing: bool = False,
    packing: bool = True,
    ranks: Ranks | None = None,
) -> Backbone:
    """Freezes a loaded model and attaches the view of its experts.

    Args:
        model: A causal or encoder-decoder language model of transformers, on its device. Its family may change it in
            place, for example stack its experts.
        tokenizer: Its tokenizer; may be None if no text is encoded.
        name: The model's name in records and messages.
        packing: Whether to pack rows without their padding, if the model's attention allows it.
        ranks: The processes that share the model's layers; all of them call this, rank 0 with the weights.

    Raises:
        ModelError: its experts are not supported, or it cannot recompute activations.
    """
    model.requires_grad_(False)
    model.eval()
    family = _family_of(model.config)
    natives = native_layers(model, family) if family else []
    if family:
        with next(model.parameters()).device if ranks is not None else nullcontext():
            family.prepare(model)
    if gradient_checkpointing:
        _checkpoint_layers(model, name)
    runtime = Runtime()
    layers = moe_layers(model, family, runtime) if family else []
    if family and layers:
        attach(model, family, layers)
        check(model, family, layers, natives)
    info = describe(model, name, layers)
    if info.undescribed and model.dtype is torch.float64:
        model.set_experts_implementation("eager")  # transformers' grouped products lack fp64
    fuse(model, next(model.parameters()).device if ranks is None else ranks.device, model.dtype)
    if getattr(model, "is_loaded_in_4bit", False):
        quantise_experts(layer.experts for layer in layers)
        if model.device.type == "cpu":
            prepare_for_cpu(model, name)
    packs = allow_packing(model) and packing and all(layer.capacity is None for layer in layers)
    dtype = model.dtype
    if ranks is not None:
        shard(model, list(_checkpointed_layers(model)), ranks)
    speed_up_frozen_linears(model)
    device = next(model.parameters()).device if ranks is None else ranks.device
    return Backbone(model, tokenizer, info, layers, runtime, device, dtype, packs, ranks=ranks)


def _checkpointed_layers(model: nn.Module) -> list[Any]:
    from transformers.modeling_layers import GradientCheckpointingLayer  # it brings all of the modelling code

    return [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]


def _checkpoint_layers(model: Any, name: str) -> None:
    """Enables checkpointing: only the layers are set to training mode, so the model's own dropout stays off."""
    layers = _checkpointed_layers(model)
    if not layers:
        raise ModelError(f"{name} cannot recompute activations.", "Set model.gradient_checkpointing=false.")
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for layer in layers:
        layer.training = True


def describe(model: Any, name: str, layers: list[MoeLayer]) -> ModelInfo:
    """Returns a model's description; also works on meta tensors."""
    config = model.config.get_text_config()
    seq2seq = _seq2seq(config)
    head = model.get_output_embeddings()
    undescribed = () if layers else undescribed_moe(model)
    routed = {layer.info.router for layer in layers}.union(*(block.linears for block in undescribed))
    linears = adaptable_linears(model, routed)
    return ModelInfo(
        name=name,
        family=str(model.config.model_type),
        hidden=int(config.hidden_size),
        layers=int(config.num_hidden_layers) + int(config.num_decoder_layers if seq2seq else 0),
        vocabulary=int(head.weight.shape[0]),
        parameters=model.num_parameters(),
        linears=linears,
        moe=tuple(layer.info for layer in layers),
        seq2seq=seq2seq,
        masked_span=masked_span(model),
        undescribed=undescribed,
        described_families=tuple(FAMILIES) if undescribed else (),
        eager_heads=_eager_heads(model, linears),
    )


def _eager_heads(model: Any, linears: Sequence[LinearInfo]) -> int:
    if model.config._attn_implementation != "eager":
        return 0
    attentions = {linear.name.rpartition(".")[0] for linear in linears if linear.group == "attention"}
    return len(attentions) * int(getattr(model.config.get_text_config(), "num_attention_heads", 0))


def describe_config(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False, attention: str = "sdpa"
) -> ModelInfo:
    """Returns a model's description from its config alone, without weights.

    Args:
        path: `embedded`, `english`, a folder, a `config.json`, a known model's hub id or short name (which needs no
            download), or any other hub id.
        revision: Branch, tag or commit on the hub, which is then asked for known models too.
        attention: As of `load_backbone`.

    Raises:
        ModelError: there is no such config, or its experts are not supported.
    """
    known = find_known(path) if revision is None and not Path(path).exists() else None
    if known is not None:
        return _described_known(known.name, attention)
    hint = (
        "Give a hub id, a folder with config.json, that file itself, 'embedded', 'english', or offline one of: "
        f"{', '.join(model.name for model in known_models())}."
    )
    place = Path(source_of(path))
    if place.is_dir() and not (place / "config.json").is_file():
        raise ModelError(f"Cannot read the config of '{path}': the folder has no config.json.", hint)
    if not place.exists() and not is_hub_id(path):
        raise ModelError(f"Cannot read the config of '{path}': there is no such folder or file.", hint)
    try:
        config = AutoConfig.from_pretrained(
            **arguments_of(path), revision=revision, trust_remote_code=trust_remote_code
        )
    except UNREADABLE as error:
        raise ModelError(f"Cannot read the config of '{path}': {reason_of(error)}", hint) from error
    return _described(config, path, trust_remote_code, attention)


@cache
def _described_known(name: str, attention: str) -> ModelInfo:
    known = find_known(name)
    assert known is not None
    if (architecture := known.config["model_type"]) not in CONFIG_MAPPING:
        raise ModelError(
            f"transformers {transformers.__version__} has no architecture '{architecture}', of {known.hub_id}.",
            "Update transformers.",
        )
    return _described(AutoConfig.for_model(**known.config), known.hub_id, attention=attention)


def is_at_hand(path: str, revision: str | None = None) -> bool:
    """Whether `describe_config` needs no network for a model."""
    return path in PACKAGED or Path(path).exists() or (revision is None and find_known(path) is not None)


def describe_architecture(config: Mapping[str, Any], name: str) -> ModelInfo:
    """Returns the description of a model from the keys of a `config.json`, including `model_type`.

    Raises:
        ModelError: its experts are not supported.
    """
    return _described(AutoConfig.for_model(**config), name)


def _described(
    config: PreTrainedConfig, name: str, trust_remote_code: bool = False, attention: str = "sdpa"
) -> ModelInfo:
    kernel = attention_kernel(attention, encoder_decoder=config.is_encoder_decoder)
    model = _without_weights(config, trust_remote_code, attn_implementation=kernel)
    family = _family_of(model.config)
    if family:
        with torch.device("meta"):
            family.prepare(model)
    info = describe(model, name, moe_layers(model, family, Runtime()) if family else [])
    if info.moe and info.top_k > (experts := min(layer.num_experts for layer in info.moe)):
        raise ModelError(
            f"The config of '{name}' has {info.top_k} experts per token, but layers of {experts}.",
            "Correct config.json.",
        )
    return info


def _family_of(config: PreTrainedConfig) -> Family | None:
    name = str(config.model_type)
    family = FAMILIES.load(name) if name in FAMILIES else None
    if family is None or not family.fits(config):
        return None
    family.require_release(name)
    return family


def _without_weights(config: PreTrainedConfig, trust_remote_code: bool, **options: Any) -> Any:
    with torch.device("meta"):
        return auto_class(config).from_config(config, trust_remote_code=trust_remote_code, **options)


def _seq2seq(config: Any) -> Seq2Seq | None:
    """Returns the input form of an encoder-decoder model; None for a causal model.

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
        ConfigError: a GPU is requested but there is none, or the name is unknown.
    """
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(
            f"model.device: unknown device '{device}'.", "Known: auto, cpu, cuda, cuda:N, mps."
        ) from error
    if chosen.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("model.device: cuda is requested, but torch finds no GPU.", "Set model.device=cpu or auto.")
    if chosen.type == "mps" and not torch.backends.mps.is_available():
        raise ConfigError("model.device: mps is requested, but torch finds no Apple GPU.", "Set model.device=cpu.")
    return chosen


def pick_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """Returns the dtype a setting means; `auto` is bf16 on a GPU and fp32 on a CPU."""
    if dtype == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    if dtype not in DTYPES:
        raise ConfigError(f"model.dtype: unknown dtype '{dtype}'.", f"Known: auto, {', '.join(DTYPES)}.")
    return DTYPES[dtype]
