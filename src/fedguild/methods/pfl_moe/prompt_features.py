"""Features of a prompt in the frozen backbone: one vector [H] per row, without any adapter (PFL-MoE's phi)."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from fedguild.data.batches import SlotBatch
from fedguild.model.backbone import Backbone

Features = Literal["hidden", "embedding"]


@torch.no_grad()
def prompt_features(backbone: Backbone, batch: SlotBatch, kind: Features) -> Tensor:
    """Returns [R, H] in fp32 (or fp64): the mean over each row's prompt tokens, 0 for a row without any.

    A prompt is everything before the first target of a row: the whole row if nothing is to be predicted, and
    the encoder's input in an encoder-decoder model. It does not matter on which side rows are padded.

    Args:
        backbone: The frozen model; adapters attached to it have no effect here.
        batch: The rows.
        kind: The mean of the last hidden states (of the encoder, if there is one), or of the token embeddings.
    """
    device = backbone.device
    ids, mask = (side.to(device, non_blocking=True) for side in prompts(batch))
    if kind == "embedding":
        states = backbone.model.get_input_embeddings()(ids)
    else:
        current, backbone.runtime.current = backbone.runtime.current, None
        try:
            if backbone.info.seq2seq is None:
                states = backbone.model.base_model(input_ids=ids, use_cache=False).last_hidden_state
            else:
                states = backbone.model.get_encoder()(input_ids=ids, attention_mask=mask).last_hidden_state
        finally:
            backbone.runtime.current = current
    exact = states.to(torch.promote_types(states.dtype, torch.float32))
    real = mask[..., None].to(exact.dtype)
    mean: Tensor = (exact * real).sum(dim=1) / real.sum(dim=1).clamp(min=1)
    return mean


def prompts(batch: SlotBatch) -> tuple[Tensor, Tensor]:
    """Returns the token ids [R, T] of every row's prompt, padded on the right, and their mask [R, T]."""
    mask = batch.mask
    if batch.decoder_ids is None:
        rows, width = mask.shape
        row = target_rows(batch)
        last = torch.full((rows,), width - 1, device=mask.device)
        last.scatter_reduce_(0, row, batch.predict_at - row * width, "amin")
        mask = mask & (torch.arange(width, device=mask.device) <= last[:, None])
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    longest = max(1, int(mask.sum(dim=1).max()))
    return batch.input_ids.gather(1, order)[:, :longest], mask.gather(1, order)[:, :longest]


def target_rows(batch: SlotBatch) -> Tensor:
    """Returns [P], the row of every target of a batch."""
    side = batch.input_ids if batch.decoder_ids is None else batch.decoder_ids
    return batch.predict_at.div(side.shape[1], rounding_mode="floor")
