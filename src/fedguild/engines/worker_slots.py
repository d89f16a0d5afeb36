"""Scoring of models in other processes, each of which holds the backbone or a part of it.

The batches are those of an evaluation in this process, so the results have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from itertools import count, islice
from typing import Any, Protocol

import torch
from torch import Tensor

from fedguild.core.codec import encode
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload
from fedguild.data.batches import SlotBatch
from fedguild.engines.plain_plans import plain_plan
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan

_numbers = count(1)


class Workers(Protocol):
    """Processes with an actor each (`fedguild.engines.ray_actor.CohortActor`)."""

    @property
    def count(self) -> int:
        """Their number."""
        ...

    def call(self, name: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls a method of every actor at the same time, each with its own arguments; returns the results in order.

        Raises:
            FedGuildError: an actor failed.
        """
        ...


class WorkerSlots:
    """Several models, loaded in every worker; they score batches in turn. An `EvaluatedModel`."""

    device = torch.device("cpu")

    def __init__(self, workers: Workers, slots: int, model: ModelInfo) -> None:
        self.workers = workers
        self.slots = slots
        self.seq2seq = model.seq2seq
        self.masked_span = model.masked_span

    def token_losses(self, batch: SlotBatch) -> Tensor:
        (losses,) = self.each("token_losses", [(batch,)])
        return losses  # type: ignore[no-any-return]

    def generate(self, prompts: Sequence[Sequence[Sequence[int]]], max_new_tokens: int) -> list[list[list[int]]]:
        (texts,) = self.each("generate", [(prompts, max_new_tokens)])
        return texts  # type: ignore[no-any-return]

    def each(self, name: str, inputs: Iterable[tuple[Any, ...]]) -> Iterator[Any]:
        """Yields the results of `token_losses` or `generate` for many inputs, distributed over the workers.

        Raises:
            FedGuildError: a worker failed.
        """
        waiting = iter(inputs)
        while volley := list(islice(waiting, self.workers.count)):
            plain = [tuple(map(_plain, arguments)) for arguments in volley]
            given: list[tuple[Any, ...]] = [(name, arguments) for arguments in plain]
            given += [(name,)] * (self.workers.count - len(volley))
            for found in self.workers.call("compute", given):
                for result in found:
                    yield torch.from_numpy(result.copy()) if name == "token_losses" else result


@contextmanager
def opened(
    workers: Workers,
    plans: Sequence[AdapterPlan],
    tensors: Sequence[Mapping[str, Tensor]],
    merged: Mapping[str, Tensor],
    model: ModelInfo,
) -> Iterator[WorkerSlots]:
    """Loads models into all workers for the duration of a block; after an error they stay there, as the run ends."""
    digest = f"scored {next(_numbers)}" if merged else ""
    payloads = [*(encode(Payload(own)) for own in tensors), encode(Payload(merged))]
    arguments = ([plain_plan(plan) for plan in plans], digest, *payloads)
    workers.call("open_slots", [arguments] * workers.count)
    yield WorkerSlots(workers, len(plans), model)
    workers.call("close_slots", [()] * workers.count)


def raised(results: Sequence[Any]) -> Sequence[Any]:
    """Returns the workers' results.

    Raises:
        FedGuildError: one of them is an error.
    """
    for result in results:
        if isinstance(result, dict) and "error" in result:
            raise FedGuildError(result["error"], result["hint"])
    return results


def _plain(value: Any) -> Any:
    if isinstance(value, SlotBatch):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return value
