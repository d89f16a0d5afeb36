"""Rows packed without padding: all tokens of a pass in one sequence, each attending to its own row.

A pass over rows of unequal length computes its linear layers, norms and routers for the padding too, which on short
instructions is most of the tokens. Packed, the model sees one row of all real tokens, and only its attention has to
separate them. transformers looks the attention up by name (`AttentionInterface`), so a backbone that can pack gets its
own; without packing it equals transformers' sdpa bit for bit, but for short rows that train in bf16 on a CPU
(`short_attention`). transformers' modelling code takes two seconds to import, so this module imports it only where
there is a model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from fedguild.data.batches import SlotBatch
from fedguild.model.linears import adaptable_linears
from fedguild.model.short_attention import is_short, short_attention

ATTENTION = "fedguild_packed"
"""Name of the attention of a backbone that can pack."""
FULL = "full_attention"
"""transformers' type of a layer that attends to the whole row."""
PADDING_LIMIT = 1.1
"""Largest number of tokens per real one that a batch may have and still stay as it is."""
ROW_BY_ROW = ("cpu",)
"""Types of device on which rows attend one after the other; on others they are padded within the attention."""
_VARLEN_DTYPES = (torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class PackedRows:
    """The rows that one pass packs.

    N is the number of real tokens, R of rows, T the length of the longest.

    Attributes:
        lengths: Tokens of each row; they sum to N.
        places: [N] place of each token in the padded rows [R·T].
        ends: [R + 1] int32, 0 and where each row ends.
    """

    lengths: tuple[int, ...]
    places: Tensor
    ends: Tensor

    @property
    def longest(self) -> int:
        return max(self.lengths)

    def to(self, device: torch.device) -> PackedRows:
        return replace(
            self, places=self.places.to(device, non_blocking=True), ends=self.ends.to(device, non_blocking=True)
        )


def masked_span(model: Any) -> int | None:
    """Returns the longest row of which a mask of the attention decides alone which tokens a token depends on.

    It is 0 for an encoder-decoder model, for recurrent and convolutional layers, and for attention that takes no mask
    as it is given; the window of sliding or chunked attention; None, any length, where all layers attend to the whole
    row.
    """
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or [FULL]) - {FULL}
    spans = [getattr(config, name, None) for name in ("sliding_window", "attention_chunk_size")]
    if (
        config.is_encoder_decoder
        or not getattr(model, "_supports_attention_backend", False)
        or getattr(model, "_is_stateful", False)
        or kinds - {"sliding_attention", "chunked_attention"}
        or any(linear.group == "mixer" for linear in adaptable_linears(model, ()))
    ):
        return 0
    if kinds or spans[0]:
        return min((span for span in spans if span), default=0)
    return None


def allow_packing(model: Any) -> bool:
    """Gives a model the attention for packed rows; returns False if it cannot pack.

    It cannot if rows meet outside the attention, or within it other than causally over the whole row (`masked_span`),
    or if its attention is another than sdpa.
    """
    suits = model.config._attn_implementation in ("sdpa", ATTENTION) and masked_span(model) is None
    if suits:
        _register()
        model.set_attn_implementation(ATTENTION)
    return suits


def pads_attention(config: Any, device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the attention pads packed rows, as on a GPU without torch's variable-length attention for the model."""
    text = config.get_text_config()
    values = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    keys = values
    if getattr(text, "qk_rope_head_dim", None):  # latent attention, as DeepSeek's
        keys, values = text.qk_nope_head_dim + text.qk_rope_head_dim, text.v_head_dim
    return device.type not in ROW_BY_ROW and not _has_variable_length(device, dtype, keys, values)


def _has_variable_length(device: torch.device, dtype: torch.dtype, keys: int, values: int) -> bool:
    fits = dtype in _VARLEN_DTYPES and keys == values <= 256 and keys % 8 == 0
    return fits and device.type == "cuda" and _runs_flash_attention(device)


@cache
def _runs_flash_attention(device: torch.device) -> bool:
    """Whether a GPU is of Nvidia's Ampere generation or newer, or one of AMD."""
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def pays(batch: SlotBatch) -> bool:
    """Whether a causal batch on the CPU has so much padding that packing is worth it."""
    return batch.mask.numel() > PADDING_LIMIT * int(batch.mask.sum())


def packed(batch: SlotBatch) -> tuple[SlotBatch, PackedRows]:
    """Returns a causal batch on the CPU as one row [1, N], and the rows in it.

    In the packed batch, `rows_per_slot` are each slot's tokens.
    """
    rows, width = batch.mask.shape
    real = batch.mask.reshape(-1)
    places = real.nonzero().squeeze(1)
    lengths = batch.mask.sum(dim=1)
    ends = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
    slot_ends = [0]
    for count in batch.rows_per_slot:
        slot_ends.append(slot_ends[-1] + count)
    token_ends = ends[slot_ends]
    one_row = SlotBatch(
        input_ids=batch.input_ids.reshape(-1)[places][None],
        mask=torch.ones(1, len(places), dtype=torch.bool),
        rows_per_slot=tuple(token_ends.diff().tolist()),
        predict_at=(real.cumsum(0) - 1)[batch.predict_at],
        targets=batch.targets,
        group=batch.group,
        position_ids=torch.arange(width).expand(rows, width).reshape(-1)[places][None],
    )
    return one_row, PackedRows(tuple(lengths.tolist()), places, ends.to(torch.int32))


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    packed_rows: PackedRows | None = None,
    is_masked: bool = True,
    **options: Any,
) -> tuple[Tensor, None]:
    """Returns the attention's output [B, T, heads, d], in the form of `AttentionInterface`.

    Args:
        query: [B, heads, T, d].
        key: [B, key-value heads, T, d].
        value: [B, key-value heads, T, d'].
        packed_rows: The rows packed in B = 1 and T = N; None if nothing is packed.
        is_masked: Whether the mask applies; if not, the attention is causal, as it is within packed rows.
        options: Other arguments that a model gives to its attention, such as `scaling`.
    """
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> Tensor:
        if is_short(query, key, options):
            return short_attention(query, key, value, mask, options.get("scaling"))
        return sdpa_attention_forward(module, query, key, value, mask, **options)[0]

    if packed_rows is None:
        return attend(query, key, value, attention_mask if is_masked else None), None
    if _has_variable_length(query.device, query.dtype, query.shape[-1], value.shape[-1]):
        return _variable_length(query, key, value, packed_rows, options.get("scaling")), None
    if query.device.type not in ROW_BY_ROW:
        return _padded(module, query, key, value, packed_rows, options), None
    queries, keys, values = (states.split(packed_rows.lengths, dim=2) for states in (query, key, value))
    outputs = [attend(*row, None) for row in zip(queries, keys, values, strict=True)]
    return torch.cat(outputs, dim=1), None


def _variable_length(query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, scale: float | None) -> Tensor:
    """Returns [1, N, heads, d] by torch's variable-length attention, which only CUDA has, for bf16 and fp16."""
    from torch.nn.attention.varlen import varlen_attn

    output = varlen_attn(
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        rows.ends,
        rows.ends,
        rows.longest,
        rows.longest,
        scale=scale,
        window_size=(-1, 0),
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return cast(Tensor, output)[None]


def _padded(
    module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, rows: PackedRows, options: dict[str, Any]
) -> Tensor:
    """Returns [1, N, heads, d] by one call for all rows, padded; no query sees what follows it."""

    def apart(states: Tensor) -> Tensor:
        tokens = states[0].transpose(0, 1)
        size = len(rows.lengths) * rows.longest
        filled = tokens.new_zeros(size, *tokens.shape[1:]).index_copy(0, rows.places, tokens)
        padded: Tensor = filled.unflatten(0, (-1, rows.longest)).transpose(1, 2)
        return padded

    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    output, _ = sdpa_attention_forward(module, apart(query), apart(key), apart(value), None, **options)
    packed: Tensor = output.flatten(0, 1).index_select(0, rows.places)[None]
    return packed


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION, packed_attention)
    AttentionMaskInterface.register(ATTENTION, sdpa_mask)
