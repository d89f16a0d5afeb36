"""Model inputs of a batch: causal, causal with the batch's own attention or packed, or encoder-decoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fedguild.core.errors import ModelError
from fedguild.data.batches import SlotBatch
from fedguild.model.backbone import Backbone
from fedguild.model.packed_rows import ATTENTION, PackedRows


def model_inputs(backbone: Backbone, batch: SlotBatch, rows: PackedRows | None = None) -> dict[str, Any]:
    """Returns the arguments of a forward pass; causal attention needs no mask for padding on the right.

    Args:
        batch: The batch, on the model's device.
        rows: The rows packed in the batch; None if it is not packed.

    Raises:
        ModelError: the batch is for another kind of model, or its attention needs another implementation.
    """
    causal = backbone.info.seq2seq is None
    if causal != (batch.decoder_ids is None):
        raise ModelError(
            f"{backbone.info.name} is {'a causal' if causal else 'an encoder-decoder'} model, "
            "but the batch is for the other kind.",
            "Collate it with the model's own `seq2seq`.",
        )
    if causal and batch.segments is None and backbone.model.config._attn_implementation == ATTENTION:
        # Without a mask, transformers reads the positions back to the host to see whether rows are packed, and builds a
        # mask of [N, N] if so. It passes one of four dimensions on as it is, and our attention needs none.
        unused = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=batch.input_ids.device)
        inputs = {"input_ids": batch.input_ids, "position_ids": batch.position_ids}
        return {**inputs, "attention_mask": unused, "packed_rows": rows, "is_masked": False}
    if causal:
        attention = None if batch.segments is None else _attention(backbone, prefix_shared(batch.segments))
        return {"input_ids": batch.input_ids, "attention_mask": attention, "position_ids": batch.position_ids}
    return {"input_ids": batch.input_ids, "attention_mask": batch.mask, "decoder_input_ids": batch.decoder_ids}


def prefix_shared(segments: Tensor) -> Tensor:
    """Returns [R, 1, T, T] bool: a token attends to the prompt and its own segment up to itself.

    Computed on the device of the segments, so that a batch sent to a GPU does not carry T values per token.

    Args:
        segments: [R, T], as in a `SlotBatch`. Padding attends to itself and the prompt, because a softmax over no
            entries is NaN.
    """
    queries, keys = segments[:, :, None], segments[:, None, :]
    width = segments.shape[1]
    causal = torch.ones(width, width, dtype=torch.bool, device=segments.device).tril()
    return (causal & ((keys == 0) | (keys == queries)))[:, None]


def _attention(backbone: Backbone, allowed: Tensor) -> Tensor:
    """Returns a batch's attention mask in the model's form; eager attention adds it to its scores."""
    kind = backbone.model.config._attn_implementation
    if kind in ("sdpa", ATTENTION):
        return allowed
    if kind == "eager":
        blocked = torch.finfo(backbone.dtype).min
        return torch.zeros_like(allowed, dtype=backbone.dtype).masked_fill(~allowed, blocked)
    raise ModelError(
        f"The attention implementation {kind} cannot run rows that hold several candidate answers.",
        "Set model.attention to sdpa or eager.",
    )
