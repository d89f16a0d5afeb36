"""The cohort: several clients that train together in one forward and backward pass.

A client in a cohort gets the update that it would get alone, up to floating-point rounding. Its loss is the mean over
its own response tokens, its gradient is clipped by its own norm, its optimizer has its own state, and it stops after
its own last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import zip_longest

import numpy as np
import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.optimizer import SlotOptimizer
from fedguild.client.preference import has_pairs, preference_losses, reference_losses
from fedguild.client.schedule import learning_rate, plan_steps
from fedguild.client.sums import sums_of_slots
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.core.seeding import derive, numpy_rng
from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.moe.statistics import RoutingStatistics
from fedguild.model.on_device import on_device
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd


@dataclass(frozen=True)
class LocalWork:
    """One client's input to a round; `memory` is what it kept at its last participation, empty if it has none."""

    client: ClientInfo
    examples: Sequence[Encoded]
    download: Payload
    memory: Payload


@dataclass
class LocalReport:
    """Figures of a client's training.

    Attributes:
        tokens: Tokens seen in training, padding excluded.
        examples: Examples seen, repeats counted.
        loss: Mean loss over its response tokens, in nats; of preference pairs, over the pairs.
        first_loss: The same of the first step alone, before any update; None where it is not known.
        seconds: The time of the cohort's local update times this client's share of the tokens that the cohort read; 0
            before the update ends.
        reference_tokens: Tokens that the backbone without the adapter has read, for preference pairs.
        forward_tokens: Tokens read without gradients beside the training, a token as often as it is read.
        withheld: Whether the client withholds all figures, which are 0 then, except steps that follow from what is
            public.
    """

    steps: int = 0
    tokens: int = 0
    examples: int = 0
    loss: float = 0.0
    seconds: float = 0.0
    withheld: bool = False
    first_loss: float | None = None
    reference_tokens: int = 0
    forward_tokens: int = 0
    _targets: int = field(default=0, repr=False)
    _loss_sum: float = field(default=0.0, repr=False)

    def add(self, other: LocalReport) -> None:
        self.first_loss = other.first_loss if self.first_loss is None else self.first_loss
        self.steps += other.steps
        self.tokens += other.tokens
        self.examples += other.examples
        self.reference_tokens += other.reference_tokens
        self.forward_tokens += other.forward_tokens
        self._targets += other._targets
        self._loss_sum += other._loss_sum
        self.loss = self._loss_sum / max(1, self._targets)


class Cohort:
    """The clients of one cohort, their data, and the slots that they train in.

    Args:
        model: A SlotModel with one slot for each client.
        work: Each client's input, in slot order.
        settings: The training settings.
        round_index: The round, from 1.
        seed: The run's seed.
        pad_id: Token id of padding.
        on_step: Called after each optimizer step with (steps done, total steps, mean loss; NaN where it is withheld).
        keep_trained: Whether to copy the trained models for scoring.
        private: Each client's DP-SGD, in slot order, if the cohort trains with differential privacy per example. It
            must then be trained once, by `fedguild.client.training.train`, and in no other way.

    Attributes:
        trained: With `keep_trained`, every client's adapter as its training left it, frozen tensors included; where a
            method calls `leave`, what it passed. Empty before training.
    """

    def __init__(
        self,
        model: SlotModel,
        work: Sequence[LocalWork],
        settings: TrainingSettings,
        *,
        round_index: int,
        seed: int,
        pad_id: int = 0,
        on_step: Callable[[int, int, float], None] | None = None,
        keep_trained: bool = False,
        private: Sequence[DpSgd] | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self.model = model
        self.work = tuple(work)
        self.settings = settings
        self.round = round_index
        self.seed = seed
        self._noise_seed = seed if noise_seed is None else noise_seed
        self.pad_id = pad_id
        self.optimizer = SlotOptimizer(model.trainables, settings)
        self.reports = [LocalReport() for _ in work]
        self.kept: list[dict[str, Tensor]] = [{} for _ in work]
        self.keep_trained = keep_trained
        self.trained: list[dict[str, Tensor]] = [{} for _ in work]
        self.routing: RoutingStatistics | None = None
        self.private = None if private is None else tuple(private)
        self._references: list[Tensor] | None = None
        self._unread: list[tuple[Tensor, list[int]]] = []
        self._on_step = on_step
        self._before: tuple[Tensor, Tensor] | None = None

    @property
    def clients(self) -> tuple[ClientInfo, ...]:
        """The clients, in slot order."""
        return tuple(part.client for part in self.work)

    def noise_rng(self, slot: int, purpose: str) -> np.random.Generator:
        """Returns where a client's noise is drawn from, which protects its data.

        On the client's own machine it is a secret of that machine, new for every training: from the run's seed, which
        the server knows, the server could reproduce the noise.
        """
        return numpy_rng(self._noise_seed, purpose, self.round, self.clients[slot].index)

    def load(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Sets a client's trainables."""
        self.model.load(slot, tensors)

    def read(self, slot: int) -> dict[str, Tensor]:
        """Returns copies of a client's trainables."""
        return self.model.read(slot)

    def keep(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Stores tensors in the client's memory, for its next participation."""
        self.kept[slot].update(tensors)

    def leave(self, slot: int, tensors: Mapping[str, Tensor]) -> None:
        """Sets what a client's own model is right after its training, if that is not what its slot trained.

        It is kept only for scoring. Without tensors it is the model that the client keeps; tensors of other names than
        the plan's come back to `Method.deploy` as `Own.trained`.
        """
        if self.keep_trained:
            self.trained[slot] = {name: value.clone() for name, value in tensors.items()}

    def hold_out(self, slot: int, fraction: float, limit: int) -> Sequence[Encoded]:
        """Holds examples out of a client's training, the same ones in every round.

        Args:
            fraction: Fraction of its examples, rounded; at least one is held out and at least one is left.
            limit: Largest number of examples to hold out.

        Returns:
            The examples held out. If the client has only one example, it is returned and also stays in training.
        """
        self.require_not_private("holds examples out of the training")
        part = self.work[slot]
        count = min(limit, max(1, round(fraction * len(part.examples))))
        order = numpy_rng(self.seed, "held out", part.client.index).permutation(len(part.examples)).tolist()
        if len(order) == 1:
            return part.examples
        taken, left = order[: min(count, len(order) - 1)], sorted(order[min(count, len(order) - 1) :])
        works = list(self.work)
        works[slot] = replace(part, examples=[part.examples[index] for index in left])
        self.work = tuple(works)
        return [part.examples[index] for index in taken]

    def passes(self, examples: Sequence[Sequence[Encoded]]) -> Iterator[SlotBatch]:
        """Runs the model over every slot's examples, without gradients or dropout.

        The observers of the MoE layers see each pass; yields the batch after it. In `reports` they are forward tokens.

        Args:
            examples: `examples[slot]`, the rows of every slot; some may be empty.
        """
        for batch in self.batches(examples):
            with torch.no_grad():
                self.model.token_losses(batch)
            yield batch

    def batches(self, examples: Sequence[Sequence[Encoded]], passes: int = 1) -> Iterator[SlotBatch]:
        """Yields every slot's examples in batches, for forward passes without gradients or dropout by the caller.

        Args:
            examples: `examples[slot]`, the rows of every slot; some may be empty.
            passes: How often the caller runs the model over a batch, which is what `reports` count.
        """
        self.require_not_private("runs the model over examples beside the training")
        self.model.dropout.seed(None)
        size = self.settings.batch_size
        for start in range(0, max(map(len, examples), default=0), size):
            rows = [of_slot[start : start + size] for of_slot in examples]
            for report, of_slot in zip(self.reports, rows, strict=True):
                report.forward_tokens += passes * tokens_of(of_slot)
            yield collate(rows, self.pad_id, self.model.seq2seq)

    @contextmanager
    def afresh(self, plans: Sequence[AdapterPlan]) -> Iterator[Cohort]:
        """Yields the same clients in slots of other plans, for a separate training within the round.

        Examples, batches and randomness are this cohort's; the optimizer is new. This cohort's own slots cannot be used
        afterwards. The training is counted in `reports` and `routing`.

        Args:
            plans: Each client's plan, in slot order.
        """
        self.model.close()
        with SlotModel(self.model.backbone, plans) as model:
            again = Cohort(
                model,
                self.work,
                self.settings,
                round_index=self.round,
                seed=self.seed,
                noise_seed=self._noise_seed,
                pad_id=self.pad_id,
                on_step=self._on_step,
                keep_trained=self.keep_trained,
                private=self.private,
            )
            self.private = None if self.private is None else ()
            yield again
        self.trained = again.trained
        for report, more in zip(self.reports, again.reports, strict=True):
            report.add(more)
        if self.routing is None or again.routing is None:
            self.routing = self.routing or again.routing
        else:
            self.routing.add(again.routing)

    def require_not_private(self, what: str) -> None:
        """Refuses a use of the examples that differential privacy per example does not account for.

        Args:
            what: What the method does, as a verb phrase.

        Raises:
            ConfigError: the cohort trains with differential privacy per example.
        """
        if self.private is not None:
            raise ConfigError(
                f"privacy.unit is example, but the method {what}.",
                "Set privacy.unit=client, or choose a method that trains by fedguild.client.training.train alone.",
            )

    @property
    def trainables(self) -> Mapping[str, SlotTensor]:
        """Every trainable of all slots, by name."""
        return self.model.trainables

    def refer(self, drawn: Sequence[Sequence[int]]) -> list[Tensor] | None:
        """Returns every slot's [examples, 2] losses under the reference; None if its examples are no preference pairs.

        Args:
            drawn: The indices of the examples that each slot trains on; those of others have NaN.
        """
        if not any(has_pairs(part.examples) for part in self.work):
            return None
        chosen = [[part.examples[index] for index in picks] for part, picks in zip(self.work, drawn, strict=True)]
        found = reference_losses(self.model, chosen, self.settings.batch_size, self.pad_id)
        tables = []
        for part, picks, losses, report in zip(self.work, drawn, found, self.reports, strict=True):
            table = losses.new_full((len(part.examples), 2), math.nan)
            table[list(picks)] = losses
            tables.append(table)
            report.reference_tokens += tokens_of([part.examples[index] for index in picks])
        return tables

    def steps(self, most: Sequence[int] | None = None, *, pairs: bool = False) -> Iterator[Step]:
        """Yields the forward passes of the round; call `Step.apply` after each.

        Routing statistics are counted in `routing` during the iteration.

        Args:
            most: Upper limit of each client's optimizer steps, to shorten the round.
            pairs: Whether the examples may be preference pairs: for loops whose loss is `Step.forward` alone.

        Raises:
            ConfigError: the examples are preference pairs, and the loop does not take them.
        """
        self.require_not_private("has a training loop of its own")
        if not pairs and any(has_pairs(part.examples) for part in self.work):
            raise ConfigError(
                "The data are preference pairs, but the method has a training loop of its own.",
                "Set training.objective=sft, which trains on the chosen answers alone, or choose another method.",
            )
        plans = [
            plan_steps(
                len(part.examples), self.settings, numpy_rng(self.seed, "batches", self.round, part.client.index)
            )
            for part in self.work
        ]
        if most is not None:
            plans = [plan[:limit] for plan, limit in zip(plans, most, strict=True)]
        total = max(len(plan) for plan in plans)
        self._references = self.refer([sorted({i for step in plan for batch in step for i in batch}) for plan in plans])
        with self.model.collect_routing() as self.routing:
            for index, columns in enumerate(zip_longest(*plans, fillvalue=[])):
                before = self.routing.counts.clone(), self.routing.tokens.clone()
                self._before = before[0], self.routing.layer_tokens.clone()
                yield from self._micro_steps(index, columns, [len(plan) for plan in plans])
                self.routing.close_step(*before)
                self.read_losses()
                self._record_step(columns)
                if self._on_step is not None:
                    self._on_step(index + 1, total, self.mean_loss())
        self.finish()

    def mean_loss(self) -> float:
        """Returns the clients' mean training loss so far."""
        return sum(report.loss for report in self.reports) / len(self.reports)

    def _micro_steps(self, index: int, columns: Sequence[list[list[int]]], totals: list[int]) -> Iterator[Step]:
        batches = []
        for picks in zip_longest(*columns, fillvalue=[]):
            rows = [[part.examples[i] for i in pick] for part, pick in zip(self.work, picks, strict=True)]
            batches.append((rows, collate(rows, self.pad_id, self.model.seq2seq), self._referred(picks)))
        whole = [sum(terms_of(rows[slot]) for rows, *_ in batches) for slot in range(len(self.work))]
        rates = [learning_rate(self.settings, index, total, self.round) if index < total else None for total in totals]
        self.optimizer.zero_grad()
        for part, (rows, batch, reference) in enumerate(batches):
            self._seed_dropout(index, part)
            yield Step(self, index, rows, batch, whole, rates, reference, is_update=part == len(batches) - 1)

    def _referred(self, picks: Sequence[list[int]]) -> Tensor | None:
        """Returns [pairs, 2], the reference's losses of a pass over these examples of every slot."""
        if self._references is None:
            return None
        return torch.cat([table[pick] for table, pick in zip(self._references, picks, strict=True)])

    def _seed_dropout(self, index: int, part: int) -> None:
        self.model.dropout.seed(
            [derive(self.seed, "dropout", self.round, client.index, index, part) for client in self.clients]
        )

    def _record_step(self, columns: Sequence[list[list[int]]]) -> None:
        for report, batches in zip(self.reports, columns, strict=True):
            report.steps += bool(batches)

    def read_losses(self) -> None:
        """Adds the losses of an optimizer step's passes to the reports; the only point of a step where the host waits.

        By then the host has queued the whole step, its backward pass and update included.
        """
        if not self._unread:
            return
        passes, self._unread = self._unread, []
        values = torch.stack([sums for sums, _ in passes]).tolist() if len(passes) > 1 else [passes[0][0].tolist()]
        for totals, (_, counts) in zip(values, passes, strict=True):
            for report, total, count in zip(self.reports, totals, counts, strict=True):
                report._loss_sum += total
                report._targets += count
                report.loss = report._loss_sum / max(1, report._targets)
        for report in self.reports:
            if report.first_loss is None:
                report.first_loss = report.loss

    def tell_step(self, done: int, total: int) -> None:
        """Reports an optimizer step without its loss, which is NaN."""
        if self._on_step is not None:
            self._on_step(done, total, math.nan)

    def finish(self) -> None:
        """Ends a training: turns dropout off and copies the models to be scored."""
        self.read_losses()
        self.model.dropout.seed(None)
        if self.keep_trained:
            self.trained = [self.model.read(slot, frozen=True) for slot in range(len(self.work))]

    def share_time(self, seconds: float) -> None:
        """Shares the time of the local update among the clients, by the tokens that they read, trained on or not."""
        tokens = [each.tokens + each.forward_tokens + each.reference_tokens for each in self.reports]
        for report, own in zip(self.reports, tokens, strict=True):
            report.seconds = seconds * own / max(1, sum(tokens))


class Step:
    """One forward pass of a cohort; the last of an optimizer step applies it.

    Attributes:
        index: The optimizer step, from 0.
        is_update: Whether `apply` updates the weights (False while gradients accumulate).
        batch: The batch.
    """

    def __init__(
        self,
        cohort: Cohort,
        index: int,
        rows: Sequence[Sequence[Encoded]],
        batch: SlotBatch,
        terms: Sequence[int],
        rates: Sequence[float | None],
        reference: Tensor | None = None,
        *,
        is_update: bool,
    ) -> None:
        self.cohort = cohort
        self.index = index
        self.batch = batch
        self.is_update = is_update
        self._rows = rows
        self._terms = terms
        self._rates = rates
        self._reference = reference

    def forward(self, label_smoothing: float = 0.0) -> Tensor:
        """Returns [S], each client's part of its mean negative log-likelihood in nats, or of its mean DPO loss.

        The mean is over the response tokens, or the preference pairs, of the client's whole optimizer step, so the
        parts of accumulated passes add up to it. A client that has finished gives 0.

        Args:
            label_smoothing: See `SlotModel.token_losses`; only without preference pairs.
        """
        losses = self.cohort.model.token_losses(self.batch, label_smoothing)
        if self._reference is not None:
            pairs = [pair for rows in self._rows for pair in rows]
            losses = preference_losses(losses, pairs, self._reference, self.cohort.settings.dpo_beta)
        counts = [terms_of(rows) for rows in self._rows]
        sums = sums_of_slots(losses, counts)
        self._report(sums.detach(), counts)
        return sums / on_device([max(1, count) for count in self._terms], sums.device, sums.dtype)

    def backward(self, loss: Tensor) -> None:
        """Adds the gradients of [S] per-client losses; each reaches its own slot only."""
        loss.sum().backward()

    def shares(self) -> Tensor:
        """Returns [S], this pass's part of the response tokens, or pairs, of each client's optimizer step.

        They add up to 1 over accumulated passes, so a regulariser that is a mean over a pass's tokens weighs as much as
        the loss. A client that has finished gives 0.
        """
        parts = [terms_of(rows) / max(1, whole) for rows, whole in zip(self._rows, self._terms, strict=True)]
        return on_device(parts, self.cohort.model.device)

    def activations(self) -> tuple[Tensor, Tensor]:
        """Returns the tokens that the MoE layers processed since the optimizer step began, padding excluded.

        Returns:
            [L, S, M] tokens that activated each expert, and [L, S] tokens of each layer.
        """
        routing, before = self.cohort.routing, self.cohort._before
        assert routing is not None
        assert before is not None
        return routing.counts - before[0], routing.layer_tokens - before[1]

    def apply(self, updated: Mapping[str, Tensor] | None = None) -> None:
        """Clips and updates, unless gradients still accumulate.

        Args:
            updated: The entries to update of trainables that are not updated as a whole; see `SlotOptimizer.step`.
        """
        if not self.is_update:
            return
        if self.cohort.settings.max_grad_norm is not None:
            self.cohort.optimizer.clip(self.cohort.settings.max_grad_norm)
        self.cohort.optimizer.step(self._rates, updated)

    def _report(self, sums: Tensor, counts: list[int]) -> None:
        """Counts a pass in the reports; each client's sum of losses stays on the device for now."""
        for report, rows in zip(self.cohort.reports, self._rows, strict=True):
            report.tokens += tokens_of(rows)
            report.examples += len(rows)
        self.cohort._unread.append((sums, counts))


def terms_of(examples: Sequence[Encoded]) -> int:
    """Returns how many losses the mean of some examples is over: their response tokens, or their pairs."""
    return len(examples) if has_pairs(examples) else sum(len(row.targets) for row in examples)


def tokens_of(examples: Sequence[Encoded]) -> int:
    return sum(len(row.input_ids) for example in examples for row in example.rows)
