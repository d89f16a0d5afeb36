"""S slots on one frozen backbone, each with its own adapter, all in one forward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from fedguild.core.errors import ConfigError, ModelError
from fedguild.data.batches import Seq2Seq, SlotBatch, padded
from fedguild.model.adapters.dropout import Dropout
from fedguild.model.adapters.part import AdapterPart, OutputHook
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.backbone import Backbone
from fedguild.model.chunked_loss import chunk_rows, chunked_losses
from fedguild.model.inputs import model_inputs
from fedguild.model.moe.statistics import RoutingStatistics
from fedguild.model.on_device import kept_on_device
from fedguild.model.packed_rows import PackedRows, packed, pays
from fedguild.model.plan import AdapterPlan
from fedguild.model.runtime import Pass


class SlotModel:
    """The adapters of S slots, attached to a backbone until `close`.

    Slots may differ in active experts and in whatever their parts allow, for example LoRA's rank and scale. Use it as a
    context manager, one at a time on a backbone. Parts attach to it as an `AdapterHost`
    (`fedguild.model.adapters.part`); `trainables` is `loaded` without the frozen tensors.

    Raises:
        ConfigError: the plans do not fit together, a target names no layer, or a plan has more active experts than the
            model's top-k.
        ModelError: another SlotModel is still attached, or a plan sets active experts for a dense model.
    """

    def __init__(self, backbone: Backbone, plans: Sequence[AdapterPlan]) -> None:
        if backbone.runtime.current is not None:
            raise ModelError("Another SlotModel is attached to this backbone.", "Close it first.")
        _check_plans(backbone, plans)
        self.backbone = backbone
        self.plans = tuple(plans)
        self.slots = len(plans)
        self.device = backbone.device
        self.dtype = torch.float64 if backbone.dtype is torch.float64 else torch.float32
        self.dropout = Dropout()
        self.loaded: dict[str, SlotTensor] = {}
        self.attached: dict[type, Any] = {}
        self.widen: Callable[[SlotBatch], SlotBatch] = _as_it_is
        self.needs_rows = False
        self._head_inputs: list[Tensor] | None = None
        self.copies = 1
        self._active = tuple(plan.active_experts or backbone.info.top_k for plan in plans)
        self._running: dict[str, Tensor] = {}
        self._undo: list[Callable[[], None]] = []
        self._parts = list(zip(*(plan.parts for plan in plans), strict=True))
        for parts in self._parts:
            self._allocate(parts)
        self.trainables = {name: tensor for name, tensor in self.loaded.items() if tensor.stored.requires_grad}
        try:
            self._attach()
        except BaseException:
            self.close()
            raise
        backbone.runtime.current = self._pass((1,) * self.slots * self.copies, None)

    def __enter__(self) -> SlotModel:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        for layer in self.backbone.moe:
            layer.detach()
        self.backbone.runtime.current = None
        self.backbone.runtime.statistics = None

    @contextmanager
    def set_aside(self) -> Iterator[None]:
        """Detaches the adapters inside the block, so that another SlotModel can be attached.

        Their values stay, also those that a part sets when it attaches, and so do observers of the routing, which see
        nothing of the other SlotModel.

        Raises:
            ModelError: it runs every row twice, so that its parts cannot be attached again.
        """
        if self.copies > 1:
            raise ModelError("A SlotModel that runs every row twice cannot be set aside.")
        observers = [list(layer.observers) for layer in self.backbone.moe]
        self.close()
        try:
            yield
        finally:
            values = {name: tensor.stored.detach().clone() for name, tensor in self.loaded.items()}
            self._attach()
            for name, value in values.items():
                self.loaded[name].stored.detach().copy_(value)
            for layer, own in zip(self.backbone.moe, observers, strict=True):
                layer.observers.extend(own)
            self.backbone.runtime.current = self._pass((1,) * self.slots, None)

    @contextmanager
    def activating(self, experts: Sequence[int]) -> Iterator[None]:
        """Runs the passes inside the block, and their backward passes, with other active experts than the plans'.

        Args:
            experts: Active experts of each slot.

        Raises:
            ModelError: the model is dense.
            ConfigError: a number is not from 1 to the model's top-k.
        """
        for number in experts:
            self.backbone.info.require_active_experts(number, "A step of a client")
        before, self._active = self._active, tuple(experts)
        try:
            yield
        finally:
            self._active = before

    def change_output(self, module: nn.Module, hook: OutputHook) -> None:
        """Calls a hook after a module of the backbone, in the slots' own passes, until `close`."""

        def called(_: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
            current = self.backbone.runtime.current
            return output if current is None else hook(current, args, output)

        self.on_close(module.register_forward_hook(called).remove)

    def on_close(self, undo: Callable[[], None]) -> None:
        """Registers a function that detaches an adapter from the backbone."""
        self._undo.append(undo)

    def load(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Sets tensors of a slot's adapter, frozen or trained.

        Args:
            tensors: Name -> tensor, at the slot's own shapes; a name left out keeps its value.

        Raises:
            ModelError: a name is unknown or a shape does not fit.
        """
        for name, value in tensors.items():
            target = self.loaded.get(name)
            shape = None if target is None else target.shapes[slot]
            if target is None or shape != tuple(value.shape):
                raise ModelError(f"{name} {tuple(value.shape)} does not fit slot {slot}, which expects {shape}.")
            target.write(slot, value)

    def read(self, slot: int, *, frozen: bool = False) -> dict[str, Tensor]:
        """Returns copies of a slot's trainables, in fp32 on the CPU, at its own shapes.

        Args:
            frozen: Whether to include its frozen tensors.
        """
        return {
            name: tensor.own(slot).to("cpu", self.dtype, copy=True).contiguous()
            for name, tensor in (self.loaded if frozen else self.trainables).items()
            if tensor.shapes[slot] is not None
        }

    @property
    def seq2seq(self) -> Seq2Seq | None:
        return self.backbone.info.seq2seq

    @property
    def masked_span(self) -> int | None:
        return self.backbone.info.masked_span

    def running(self, name: str) -> Tensor:
        """Returns the storage of a tensor as passes use it: [S, ..], or [2S, ..] after `run_twice`."""
        return self._running.get(name, self.loaded[name].stored)

    def run_twice(self, second: str) -> None:
        """Gives every slot a second LoRA with tensors named `{second}{name}`; neither of the two is trained.

        For a part that has declared these names and doubles every batch: a pass runs all rows under the slots' LoRA,
        followed by all rows again under the second.
        """
        self.copies = 2
        for name in [name for name in self.loaded if f"{second}{name}" in self.loaded]:
            first = self.loaded[name]
            both = self._running[name] = torch.cat([first.stored.detach()] * 2, dim=first.axis)
            for key, half in zip((name, f"{second}{name}"), both.split(self.slots, dim=first.axis), strict=True):
                self.loaded[key] = replace(first, name=key, stored=half)
                self.trainables.pop(key, None)

    def token_losses(self, batch: SlotBatch, label_smoothing: float = 0.0) -> Tensor:
        """Returns [P], the negative log-likelihood in nats of every target of the batch.

        With label smoothing ε it is the cross-entropy with 1 - ε on the target and ε spread over the vocabulary. Many
        logits are computed in chunks, if the model ends with its head.

        Raises:
            ModelError: the batch is for another kind of model, encoder-decoder or causal.
        """
        targets = batch.targets.to(self.device, non_blocking=True)
        rows = chunk_rows(self.backbone.info.vocabulary, self.dtype)
        if len(targets) <= rows or not self.backbone.ends_with_head():
            logits = self.logits(batch)
            return nn.functional.cross_entropy(logits, targets, reduction="none", label_smoothing=label_smoothing)
        self._head_inputs = []
        try:
            self.logits(batch)
            (hidden,) = self._head_inputs
        finally:
            self._head_inputs = None
        return chunked_losses(hidden, targets, self.backbone.head.forward, label_smoothing, rows)

    def logits(self, batch: SlotBatch) -> Tensor:
        """Returns [P, V], the logits that predict every target of the batch, in fp32 (or fp64).

        Rows are packed without their padding, if the backbone and the slots' parts allow it and there is enough of it.

        Raises:
            ModelError: the batch is for another kind of model, encoder-decoder or causal.
        """
        self._require_rows(batch.input_ids)
        batch = self.widen(batch)
        rows: PackedRows | None = None
        if self._packs(batch):
            batch, rows = packed(batch)
            rows = rows.to(self.device)
        runtime = self.backbone.runtime
        masks = [_unless_full(mask, self.device) for mask in (batch.mask, batch.decoder_mask)]
        real_tokens = None if rows else _real_tokens(batch)
        batch = batch.to(self.device)
        runtime.current = self._pass(batch.rows_per_slot, masks[0], batch.predict_at, masks[1], real_tokens)
        runtime.counting = True
        try:
            logits = self.backbone.model(**model_inputs(self.backbone, batch, rows), use_cache=False).logits
        finally:
            runtime.counting = False
        kind = torch.float64 if logits.dtype is torch.float64 else torch.float32
        selected: Tensor = logits.reshape(-1, logits.shape[-1]).to(kind)
        return selected

    @torch.no_grad()
    def generate(self, prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int) -> list[list[list[int]]]:
        """Returns the greedy continuations of every slot's prompts, cut before the end token.

        Prompts that do not fit the device's memory at once are continued in two halves.

        Args:
            prompts: `prompts[slot][row]`, token ids.
            max_new_tokens: Longest continuation, in tokens.
        """
        rows = [row for slot_rows in prompts for row in slot_rows]
        if not rows:
            return [[] for _ in prompts]
        if len(lengths := {len(row) for row in rows}) > 1 and not self.backbone.model._supports_default_dynamic_cache():
            return self._by_length(prompts, lengths, max_new_tokens)
        try:
            return self._generate(rows, prompts, max_new_tokens)
        except torch.OutOfMemoryError:
            if len(rows) == 1:
                raise
        torch.cuda.empty_cache()
        first, second = (self.generate(half, max_new_tokens) for half in _halves(prompts))
        return [[*one, *other] for one, other in zip(first, second, strict=True)]

    def _by_length(
        self, prompts: Sequence[Sequence[Sequence[int]]], lengths: set[int], max_new_tokens: int
    ) -> list[list[list[int]]]:
        """Returns the continuations of a model whose own cache forgets padding, as MiniMax's."""
        found = {}
        for length in sorted(lengths):
            own = [[row for row in rows if len(row) == length] for rows in prompts]
            found[length] = [iter(texts) for texts in self.generate(own, max_new_tokens)]
        return [[next(found[len(row)][slot]) for row in rows] for slot, rows in enumerate(prompts)]

    def _generate(
        self, rows: Sequence[Sequence[int]], prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int
    ) -> list[list[list[int]]]:
        tokenizer = self.backbone.tokenizer
        if self.seq2seq is None:
            ids, mask = (side.flip(1) for side in padded([row[::-1] for row in rows], tokenizer.pad_token_id))
        else:
            closed = [self.seq2seq.closed(row) for row in rows]
            ids, mask = padded(closed, tokenizer.pad_token_id, not_width=1)
        nothing = torch.zeros(0, dtype=torch.int64)
        self._require_rows(ids)
        batch = SlotBatch(ids, mask, tuple(len(slot_rows) for slot_rows in prompts), nothing, nothing, nothing)
        batch = self.widen(batch)
        real_tokens = _real_tokens(batch)
        batch = batch.to(self.device)
        before = batch.input_ids.shape[1] if self.seq2seq is None else 1
        runtime = self.backbone.runtime
        runtime.current = self._pass(batch.rows_per_slot, batch.mask, real_tokens=real_tokens)
        runtime.counting = True
        try:
            with self.backbone.caching():
                out = self.backbone.model.generate(
                    input_ids=batch.input_ids,
                    attention_mask=batch.mask.long(),
                    max_new_tokens=max_new_tokens,
                    do_sample=False,
                    pad_token_id=tokenizer.pad_token_id,
                    eos_token_id=tokenizer.eos_token_id,
                    synced_gpus=False,  # the ranks of a sharded backbone agree in each pass by themselves
                    **({} if self.seq2seq is None else {"decoder_start_token_id": self.seq2seq.start}),
                )
        finally:
            runtime.counting = False
        new = iter(_until(row, tokenizer.eos_token_id) for row in out[:, before:].tolist())
        return [[next(new) for _ in slot_rows] for slot_rows in prompts]

    @contextmanager
    def collect_routing(self) -> Iterator[RoutingStatistics]:
        """Counts the activated experts of the forward passes inside the block."""
        moe = self.backbone.info.moe
        experts = max((layer.num_experts for layer in moe), default=0)
        statistics = RoutingStatistics.empty(len(moe), self.slots * self.copies, experts, self.device)
        self.backbone.runtime.statistics = statistics
        try:
            yield statistics
        finally:
            # A training that failed may be left, and this run by the garbage collector, while another one counts.
            if self.backbone.runtime.statistics is statistics:
                self.backbone.runtime.statistics = None

    def _pass(
        self,
        rows: tuple[int, ...],
        mask: Tensor | None,
        select: Tensor | None = None,
        decoder_mask: Tensor | None = None,
        real_tokens: tuple[int, ...] | None = None,
    ) -> Pass:
        top_k = self.backbone.info.top_k
        active = self._active * self.copies
        present = [k for k, count in zip(active, rows, strict=True) if count] or [top_k]
        mixed = len(set(present)) > 1
        table = kept_on_device(active, self.device) if mixed else None
        return Pass(rows, mask, table, max(present), select, decoder_mask, active, real_tokens)

    def _require_rows(self, ids: Tensor) -> None:
        """Raises ModelError for a token without a row in the embedding, among ids that are on the host."""
        largest = int(ids.max()) if ids.device.type == "cpu" and ids.numel() else 0
        if largest >= self.backbone.info.vocabulary:
            token = self.backbone.tokenizer.convert_ids_to_tokens(largest)
            raise ModelError(
                f"The token {largest} '{token}' of a text has no row in the model's embedding, which has "
                f"{self.backbone.info.vocabulary}.",
                "Leave it out of the data, or resize the model with `model.resize_token_embeddings`.",
            )

    def _packs(self, batch: SlotBatch) -> bool:
        """Whether a pass packs this batch: a plain causal one on the CPU, with enough padding."""
        plain = batch.segments is None and batch.position_ids is None and batch.decoder_ids is None
        allowed = self.backbone.packs and not self.needs_rows
        return plain and allowed and batch.mask.device.type == "cpu" and pays(batch)

    def _allocate(self, parts: Sequence[AdapterPart]) -> None:
        """Creates the storage of one kind of trainable; a slot's tensor may be smaller than its slice."""
        per_slot = [part.shapes(self.backbone.info) for part in parts]
        for name in {name: None for shapes in per_slot for name in shapes}:
            shapes = tuple(shapes.get(name) for shapes in per_slot)
            largest = tuple(map(max, zip(*(shape for shape in shapes if shape is not None), strict=True)))
            layout = parts[0].layout(name, largest, self.backbone.dtype)
            stored = layout.allocate(self.slots, self.dtype, self.device, trains=parts[0].trains(name))
            self.loaded[name] = SlotTensor(name, stored, layout.axis, layout.swapped, shapes, layout.decays)

    def _attach(self) -> None:
        for parts in self._parts:
            parts[0].attach(self, parts)
        head = self.backbone.head
        self.on_close(head.register_forward_pre_hook(self._select_hook()).remove)

    def _select_hook(self) -> Callable[..., Any]:
        def hook(_: nn.Module, args: tuple[Tensor, ...]) -> Any:
            current = self.backbone.runtime.current
            if current is None or current.select is None:
                return None
            hidden = args[0]
            selected = hidden.reshape(-1, hidden.shape[-1]).index_select(0, current.select)
            if self._head_inputs is not None:
                self._head_inputs.append(selected)
                selected = selected[:1]
            return (selected, *args[1:])

        return hook


def _check_plans(backbone: Backbone, plans: Sequence[AdapterPlan]) -> None:
    first = plans[0]
    if any(plan.cohort_key != first.cohort_key for plan in plans):
        raise ConfigError("The clients of a cohort must share LoRA targets and the other kinds of trainables.")
    for plan in plans:
        if plan.active_experts is not None:
            backbone.info.require_active_experts(plan.active_experts, "The plan of a client")


def _as_it_is(batch: SlotBatch) -> SlotBatch:
    return batch


def _unless_full(mask: Tensor | None, device: torch.device) -> Tensor | None:
    return None if mask is None or bool(mask.all()) else mask.to(device, non_blocking=True)


def _real_tokens(batch: SlotBatch) -> tuple[int, ...] | None:
    """Returns each slot's real tokens; None if the mask is not on the host."""
    if batch.mask.device.type != "cpu":
        return None
    of_rows = iter(batch.mask.sum(dim=1).tolist())
    return tuple(sum(islice(of_rows, rows)) for rows in batch.rows_per_slot)


def _halves(prompts: Sequence[Sequence[Sequence[int]]]) -> list[list[list[Sequence[int]]]]:
    """Returns the first and the second half of all slots' prompts, each by slot."""
    middle = sum(map(len, prompts)) // 2
    cuts = [min(max(middle - before, 0), len(rows)) for before, rows in zip(_before(prompts), prompts, strict=True)]
    return [
        [list(rows[:cut]) for rows, cut in zip(prompts, cuts, strict=True)],
        [list(rows[cut:]) for rows, cut in zip(prompts, cuts, strict=True)],
    ]


def _before(prompts: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    return [sum(map(len, prompts[:slot])) for slot in range(len(prompts))]


def _until(row: list[int], end: int | None) -> list[int]:
    return row[: row.index(end)] if end in row else row
