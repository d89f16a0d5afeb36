"""A deployment attached to its backbone: the transformers model itself, with adapters and routing, that generates.

`SlotModel` attaches the deployment as the only slot. This module tells the hooks, at every forward pass, which tokens
are padding, and runs every row twice if two adapters run in parallel (PFL-MoE).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedguild.core.errors import ModelError
from fedguild.data.batches import SlotBatch
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.method import Deployment

_NO_LABEL = -100
"""Label that transformers leaves out of the loss."""


def attached(backbone: Backbone, deployment: Deployment) -> Any:
    """Returns the backbone's model with a deployment attached to it permanently.

    It is called, generates and is scored like any model of transformers. Its tokenizer is `model.tokenizer`. If the
    method mixes the logits of two adapters by a gate that reads the prompt, the gate sees the whole row in a pass
    without a cache, and the prompt alone in `generate`.

    Args:
        backbone: The model; it cannot be used otherwise from then on.
        deployment: The adapter, and the changes merged beneath it.

    Raises:
        ModelError: something is attached to the backbone already, or an encoder-decoder model would have to run two
            adapters.
    """
    model, keep = backbone.model, ExitStack()
    keep.enter_context(backbone.merged(deployment.merged))
    slots = keep.enter_context(SlotModel(backbone, [deployment.plan]))
    slots.load(0, deployment.tensors)
    if backbone.info.seq2seq is None:
        model.forward = _described(slots, model.forward, _front(slots))
    elif slots.copies > 1:
        keep.close()
        raise ModelError(
            f"{backbone.info.name} is an encoder-decoder model, which cannot run two adapters outside of FedGuild.",
            "Score it with `fedguild evaluate`.",
        )
    else:
        for side in (model.get_encoder(), model.get_decoder()):
            side.forward = _described(slots, side.forward, 0)
    model.save_pretrained = _refuse_to_save
    model.tokenizer = backbone.tokenizer
    object.__setattr__(model, "fedguild_attached", keep)  # holds the adapters as long as the model lives
    return model.eval()


def _described(slots: SlotModel, forward: Callable[..., Any], front: int) -> Callable[..., Any]:
    """Wraps `_Described` in a function with the signature of `forward`, which `generate` inspects."""
    described = _Described(slots, forward, front)

    @wraps(forward)
    def run(*arguments: Any, **named: Any) -> Any:
        return described(*arguments, **named)

    return run


class _Described:
    """A model's forward pass, or that of its encoder or decoder, which first describes the pass to the hooks.

    Args:
        front: Positions that a soft prompt puts in front of every row.
    """

    def __init__(self, slots: SlotModel, forward: Callable[..., Any], front: int) -> None:
        self._slots, self._forward, self._front = slots, forward, front

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        """Returns the output of a pass over [R, T] token ids, with logits for these rows and tokens alone."""
        slots = self._slots
        if arguments:
            named = {"input_ids": arguments[0], **named}
        ids = named.get("input_ids")
        given: Any = named.get("inputs_embeds") if ids is None else ids
        if ids is None and (self._front or slots.copies > 1):
            raise ModelError(
                "A soft prompt and a gate between two adapters need token ids.", "Give input_ids, not inputs_embeds."
            )
        rows, tokens = given.shape[:2]
        begins = not _cached_tokens(named.get("past_key_values"))
        if self._front:
            named = self._with_front(named, begins)
            tokens += self._front if begins else 0
        mask = _mask(named.get("attention_mask"), rows, tokens)
        if slots.copies > 1:
            if begins:
                _look_at_prompts(slots, named["input_ids"], mask)
            named = {name: _twice(value, rows) for name, value in named.items()}
            mask = None if mask is None else torch.cat([mask, mask])
        slots.backbone.runtime.current = slots._pass((rows,) * slots.copies, mask)
        output = self._forward(*arguments[1:], **named)
        if slots.copies > 1:
            output.logits = output.logits[:rows]
        if self._front and begins and output.logits.shape[1] == tokens:
            output.logits = output.logits[:, self._front :]
        return output

    def _with_front(self, named: dict[str, Any], begins: bool) -> dict[str, Any]:
        """Returns the arguments of a pass whose rows start, in this pass or an earlier one, with the soft prompt."""
        front, ids = self._front, named["input_ids"]
        mask = named.get("attention_mask")
        if begins:
            named = {**named, "input_ids": pad(ids, (front, 0))}
            if named.get("labels") is not None:
                named["labels"] = pad(named["labels"], (front, 0), value=_NO_LABEL)
        if mask is not None:
            named["attention_mask"] = mask = pad(mask, (front, 0), value=1)
        if named.get("position_ids") is not None:
            width = named["input_ids"].shape[1]
            shifted = named["position_ids"] + front
            real = None if mask is None else (mask.long().cumsum(-1) - 1).clamp(min=0)[:, -width:]
            counted = torch.arange(width, device=ids.device).expand(len(ids), -1)
            named["position_ids"] = real if real is not None else counted if begins else shifted
        named.pop("cache_position", None)
        return named


def _mask(given: Any, rows: int, tokens: int) -> Tensor | None:
    """Returns [R, T] bool, False for padding; None if every token of the pass is real.

    With a cache the mask also covers earlier tokens: its last T columns are those of the pass.
    """
    if not isinstance(given, Tensor) or given.dim() != 2 or len(given) != rows:
        return None
    mask = given[:, -tokens:].bool()
    return None if bool(mask.all()) else mask


def _cached_tokens(cache: Any) -> int:
    return 0 if cache is None else int(cache.get_seq_length())


def _look_at_prompts(slots: SlotModel, ids: Tensor, mask: Tensor | None) -> None:
    """Lets the slots' parts read the rows of a pass, before it is run twice."""
    slots.widen(_rows(ids, torch.ones_like(ids, dtype=torch.bool) if mask is None else mask))


def _rows(ids: Tensor, mask: Tensor) -> SlotBatch:
    nothing = torch.zeros(0, dtype=torch.int64, device=ids.device)
    return SlotBatch(ids, mask, (len(ids),), nothing, nothing, nothing)


def _front(slots: SlotModel) -> int:
    if slots.copies > 1:
        return 0
    one = torch.zeros(1, 1, dtype=torch.int64, device=slots.device)
    return int(slots.widen(_rows(one, one == 0)).input_ids.shape[1]) - 1


def _twice(value: Any, rows: int) -> Any:
    """Returns a tensor with its rows repeated after the last; anything without rows is returned unchanged."""
    return torch.cat([value, value]) if isinstance(value, Tensor) and value.dim() > 1 and len(value) == rows else value


def _refuse_to_save(*_: Any, **__: Any) -> None:
    """Raises ModelError: only the weights would be saved, without the adapter."""
    raise ModelError(
        "Saving this model would leave out what FedGuild attached to it.",
        "Export it: `fedguild export RUN --budget NAME --output FOLDER`.",
    )
