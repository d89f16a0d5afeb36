"""Training of cohorts on one backbone, shared by the local engine and the actors of `ray`.

Nothing here depends on where tasks come from or where uploads go.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Generic, Literal, TypeVar

import psutil
import torch

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.memory import ClientMemory
from fedguild.client.merge_ledger import VERSION, merge_version
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload
from fedguild.engines.client_report import ClientReport
from fedguild.engines.peak_memory import peak_bytes, reset_peak, used_bytes
from fedguild.measuring.costs.memory import PLAIN, StepForm, largest_cohort
from fedguild.model import kernels
from fedguild.model.backbone import Backbone
from fedguild.model.heap import give_back_if_scarce
from fedguild.model.info import ModelInfo
from fedguild.model.packed_rows import PADDING_LIMIT, pads_attention
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.server.engine import Delivery, Task, Wait, not_needed
from fedguild.server.method import Method, returned
from fedguild.server.sampling import fastest

CohortSize = int | Literal["auto"]
Planned = tuple[Task, AdapterPlan]
Member = TypeVar("Member")
OnStep = Callable[[int, int, float], None]
Private = Callable[[ClientInfo, int], DpSgd]

MEMORY_SHARE = 0.5
"""Share of the free memory that `auto` fills with clients, by the estimate and by what they are measured to take."""
CPU_TOKENS = 4096
"""Tokens of a pass for each thread of a CPU, beyond which `auto` adds no client: more at once gain no time there."""


@dataclass(frozen=True)
class Trained:
    """The result of one client's training.

    Attributes:
        upload: What the client sends.
        memory: What it keeps for its next round; None if its memory stays as it was, because the training diverged or
            there is nothing to keep.
        left: Its model as the training left it, to be scored, with the version of the backbone that it trained on; None
            if not requested.
    """

    upload: Payload
    memory: Payload | None
    report: ClientReport
    left: Payload | None = None

    def remember(self, memory: ClientMemory, client: str, round_index: int) -> None:
        if self.memory is not None:
            memory.save(client, round_index, self.memory)
        if self.left is not None and memory.trained is not None:
            memory.trained.save(client, round_index, self.left)


def _uploads_of(method: Method, trained: object, clients: int) -> list[Payload]:
    """Returns what a method's `local_update` returned.

    Raises:
        FedGuildError: it is not an upload for each client.
    """
    if not isinstance(trained, list) or len(trained) != clients:
        given = f"{len(trained)} of them" if isinstance(trained, list) else f"a {type(trained).__name__}"
        raise FedGuildError(
            f"The `local_update` of {method.name} returned {given}, where a list of {clients} payloads is expected, "
            "one for each client of the cohort."
        )
    return [returned(method, "local_update", upload) for upload in trained]


@dataclass(frozen=True)
class Trainer:
    """Trains cohorts on a backbone, one at a time.

    Attributes:
        on_step: Called after each optimizer step with the cohort's (steps done, total steps, mean loss).
        private: Returns a client's DP-SGD in a round; None to train without.
        noise_seed: See `Cohort.noise_rng`; None for the run's seed.
    """

    backbone: Backbone
    settings: TrainingSettings
    seed: int
    on_step: OnStep | None = None
    private: Private | None = None
    noise_seed: int | None = None

    def train(
        self,
        method: Method,
        plans: Sequence[AdapterPlan],
        work: Sequence[LocalWork],
        round_index: int,
        *,
        keep_trained: bool = False,
    ) -> list[Trained]:
        """Trains one cohort; returns its clients' results, in slot order.

        Args:
            round_index: The round, from 1.
            keep_trained: Whether to return the trained models for scoring.

        Raises:
            torch.OutOfMemoryError: the cohort does not fit the device's memory.
        """
        reset_peak(self.backbone.device)
        with SlotModel(self.backbone, plans) as model:
            cohort = Cohort(
                model,
                work,
                self.settings,
                round_index=round_index,
                seed=self.seed,
                pad_id=self.backbone.tokenizer.pad_token_id if self.backbone.tokenizer is not None else 0,
                on_step=self.on_step,
                keep_trained=keep_trained,
                noise_seed=self.noise_seed,
                private=None if self.private is None else [self.private(part.client, round_index) for part in work],
            )
            started = time.perf_counter()
            uploads = _uploads_of(method, method.local_update(cohort), len(work))
            cohort.share_time(time.perf_counter() - started)
        give_back_if_scarce()
        peak = peak_bytes(self.backbone.device)
        routing = cohort.routing if self.backbone.info.moe else None
        frequency = None if routing is None else routing.frequency().float().cpu()
        return [
            Trained(
                upload,
                Payload(kept) if kept and all(bool(tensor.isfinite().all()) for tensor in kept.values()) else None,
                ClientReport(replace(report), None if frequency is None else frequency[:, slot], peak),
                Payload(left, {VERSION: merge_version(work[slot].download)}) if keep_trained else None,
            )
            for slot, (upload, kept, report, left) in enumerate(
                zip(uploads, cohort.kept, cohort.reports, cohort.trained, strict=True)
            )
        ]

    def cohort_size(
        self,
        plans: Sequence[AdapterPlan],
        lengths: Sequence[Sequence[int]],
        free: int,
        round_index: int,
        *,
        rows: int = 1,
    ) -> int:
        """Returns how many of these clients to train at once.

        Args:
            lengths: The tokens of each row of the examples, by client.
            free: Free bytes of the device's memory.
            round_index: The round.
            rows: Rows of an example, 2 of a preference pair.
        """
        largest = max(plans, key=lambda plan: (plan.rank, plan.active_experts or self.backbone.info.top_k))
        further = (plan.beside_in(round_index) for plan in plans)
        beside = max((plan for plan in further if plan is not None), key=lambda plan: plan.rank, default=None)
        packs = self.backbone.packs and all(part.packs for part in largest.parts)
        rows *= self.settings.batch_size
        tokens = most_tokens(lengths, rows, packs=packs)
        form = self._step_form(most_tokens(lengths, rows, packs=False), tokens, most_tokens(lengths, 1, packs=False))
        return auto_cohort_size(self.backbone, largest, tokens, len(plans), free, self.settings, beside, form)

    def _step_form(self, padded: int, tokens: int, longest: int) -> StepForm:
        """Returns how clients take their steps.

        Args:
            padded: Tokens of a pass with all padding; `tokens` are those as it is computed.
            longest: Tokens of the longest row.
        """
        settings, device = self.settings, self.backbone.device
        by_kernel = settings.optimizer != "sgd" and kernels.runs("optimizer", device)
        pads = tokens < padded and pads_attention(self.backbone.model.config, device, self.backbone.dtype)
        return StepForm(
            settings.gradient_accumulation_steps,
            by_torch=not by_kernel,
            examples=settings.batch_size if self.private is not None else 0,
            padded_tokens=padded if pads else 0,
            row_tokens=longest,
        )


def most_tokens(lengths: Sequence[Sequence[int]], batch_size: int, *, packs: bool) -> int:
    """Returns the most tokens of any client's share of a forward pass, with the padding that is computed.

    Args:
        lengths: The tokens of each row, by client.
        batch_size: Rows of a client in a pass.
        packs: Whether rows with more than a little padding are packed.
    """
    longest = max(max(own) for own in lengths)
    padded = batch_size * longest
    if not packs:
        return padded
    real = max(sum(sorted(own)[-batch_size:]) for own in lengths)
    return min(padded, math.ceil(PADDING_LIMIT * real))


class FittingCohorts(Generic[Member]):
    """Splits members into cohorts; whenever a cohort does not fit the memory, the cohort size is halved permanently.

    It also shrinks if a member is measured to take more than `room` allows.

        for cohort in cohorts:
            with cohorts.fitting():
                ...  # train the cohort; if memory runs out, it comes again in smaller parts

    Args:
        splits: Whether a cohort that does not fit may be trained again in parts; not if other processes share its
            passes.
        room: Bytes that a cohort may take; None for no limit.
    """

    def __init__(
        self,
        members: Sequence[Member],
        size: int,
        device: torch.device,
        *,
        splits: bool = True,
        room: int | None = None,
    ) -> None:
        self._splits, self._room = splits, room
        self._left = list(members)
        self._cohort: list[Member] = []
        self._size = size
        self._device = device

    def __iter__(self) -> Iterator[list[Member]]:
        while self._left:
            self._cohort, self._left = self._left[: self._size], self._left[self._size :]
            yield self._cohort

    @contextmanager
    def fitting(self) -> Iterator[None]:
        """Puts the cohort back, to be halved, if memory runs out inside the block.

        Raises:
            FedGuildError: the device's memory is too small for one member, or for the cohort if it may not be split.
        """
        before = used_bytes(self._device)
        try:
            yield
            if self._room is not None:
                taken = max(1, peak_bytes(self._device) - before)
                self._size = max(1, min(self._size, self._room * len(self._cohort) // taken))
        except torch.OutOfMemoryError as error:
            if not self._splits:
                raise FedGuildError(
                    f"The memory of {self._device} is too small to train {len(self._cohort)} client(s) at once.",
                    "Lower federation.cohort_size, training.batch_size or data.max_length.",
                ) from error
            if len(self._cohort) == 1:
                raise FedGuildError(
                    f"The memory of {self._device} is too small to train one client.",
                    "Lower training.batch_size or data.max_length, or set model.gradient_checkpointing=true.",
                ) from error
            self._left, self._size = self._cohort + self._left, len(self._cohort) // 2
            torch.cuda.empty_cache()


def plan_groups(planned: Sequence[Planned]) -> list[list[Planned]]:
    """Returns groups of consecutive tasks that can train in one cohort."""
    return [list(group) for _, group in groupby(planned, key=lambda pair: pair[1].cohort_key)]


def split_by_need(
    method: Method, model: ModelInfo, tasks: Sequence[Task], terms: Wait, seed: int
) -> tuple[list[Planned], dict[int, Delivery]]:
    """Returns the tasks to train with their plans, and client index -> the delivery of those not needed.

    The clients that are needed are drawn at random (`fedguild.server.sampling.fastest`).
    """
    planned = [(task, method.plan(model, task.client.budget)) for task in tasks]
    if not planned:
        return [], {}
    chosen = fastest([task.client for task in tasks], terms.enough, seed, tasks[0].round)
    left_out = {
        task.client.index: not_needed(task, plan, len(chosen))
        for task, plan in planned
        if task.client.index not in chosen
    }
    return [pair for pair in planned if pair[0].client.index in chosen], left_out


def in_order(left_out: dict[int, Delivery], deliveries: Iterator[Delivery]) -> Iterator[Delivery]:
    """Yields deliveries, each after those of the clients before it that were left out."""
    for delivered in deliveries:
        yield from taken_before(left_out, delivered.task.client.index)
        yield delivered
    yield from taken_before(left_out)


def taken_before(left_out: dict[int, Delivery], index: int | None = None) -> list[Delivery]:
    return [left_out.pop(client) for client in sorted(left_out) if index is None or client < index]


def delivery(task: Task, plan: AdapterPlan, trained: Trained) -> Delivery:
    report = trained.report
    return Delivery(task, trained.upload, plan, report.training, report.frequency, report.peak_memory_bytes)


def auto_cohort_size(
    backbone: Backbone,
    plan: AdapterPlan,
    tokens: int,
    clients: int,
    free: int,
    settings: TrainingSettings | None = None,
    beside: AdapterPlan | None = None,
    form: StepForm = PLAIN,
) -> int:
    """Returns how many clients to train at once: as many as fit `MEMORY_SHARE` of the free bytes.

    On a CPU, they have no more tokens than `CPU_TOKENS` for each thread, unless one client has.

    Args:
        backbone: The loaded backbone, whose weights are not counted again.
        tokens: Tokens of one client's share of a forward pass, with the padding that is computed.
        free: Free bytes of the device's memory.
        settings: How clients train; None for Adam.
        beside: The plan of further slots that clients hold.
    """
    return largest_cohort(
        backbone.info,
        plan,
        tokens,
        min(clients, _most_clients(tokens, backbone.device)),
        int(MEMORY_SHARE * free),
        dtype=backbone.dtype,
        moments=2 if settings is None else settings.moments,
        checkpointing=any(getattr(module, "gradient_checkpointing", False) for module in backbone.model.modules()),
        beside=beside,
        form=form,
    )


def clients_at_once(each: int, tokens: int, free: int, device: torch.device) -> int:
    """Returns how many clients `auto` trains at once if each takes so many bytes and has so many tokens in a pass."""
    return max(1, min(_most_clients(tokens, device), int(MEMORY_SHARE * free) // each))


def _most_clients(tokens: int, device: torch.device) -> int:
    if device.type != "cpu":
        return sys.maxsize
    return max(1, CPU_TOKENS * torch.get_num_threads() // tokens)


def room_of(device: torch.device) -> int:
    """Returns the bytes that a cohort may take."""
    return int(MEMORY_SHARE * free_bytes(device))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0]) + cached
    return int(psutil.virtual_memory().available)
