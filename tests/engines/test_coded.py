"""Payloads rounded within a process: the values of the wire, and no more copies than there were tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.codec import Codec, through
from fedguild.core.payload import Payload
from fedguild.engines.coded import CodedEngine
from fedguild.methods import build_method
from fedguild.model.plan import AdapterPlan
from fedguild.server.engine import WAIT_FOR_ALL, Delivery, Task, Wait

CLIENTS = 4


class Echo:
    """An engine whose clients send back what they received; `received` keeps it."""

    def __init__(self) -> None:
        self.received: list[Payload] = []

    def train(self, method: Any, model: Any, tasks: Sequence[Task], terms: Wait = WAIT_FOR_ALL) -> Iterator[Delivery]:
        self.received += [task.download for task in tasks]
        for task in tasks:
            yield Delivery(task, task.download, AdapterPlan(()))

    def close(self) -> None:
        """Does nothing."""


def tasks() -> list[Task]:
    """Returns a task for each client: two tensors for all, one of which is sent under two names, and one of its own."""
    rng = torch.Generator().manual_seed(0)
    shared, small = torch.randn(64, 64, generator=rng), torch.randn(4, 4, generator=rng)
    named = {"adapter/a": shared, "adapter/b": shared, "merge/1/a": shared, "adapter/small": small}
    return [
        Task(
            1,
            ClientInfo(index, Budget("all", 0, 2), 10),
            Payload({**named, "adapter/own": torch.randn(64, 64, generator=rng)}, {"index": index}),
        )
        for index in range(CLIENTS)
    ]


@pytest.mark.parametrize("codec", ["bf16", "int8"])
def test_a_tensor_for_all_clients_is_rounded_once(codec: Codec, olmoe_backbone: Any) -> None:
    engine, sent = Echo(), tasks()
    deliveries = list(CodedEngine(engine, codec).train(build_method("fedit", {}), olmoe_backbone.info, sent))
    copies = {name: len({id(one.tensors[name]) for one in engine.received}) for name in sent[0].download.tensors}
    assert copies == {"adapter/a": 1, "adapter/b": 1, "merge/1/a": 1, "adapter/small": 1, "adapter/own": CLIENTS}
    first = engine.received[0].tensors
    assert first["adapter/a"] is first["adapter/b"]
    assert first["merge/1/a"] is sent[0].download.tensors["merge/1/a"]
    for task, got, delivery in zip(sent, engine.received, deliveries, strict=True):
        alone = through(task.download, codec)
        assert got.scalars == alone.scalars
        assert list(got.tensors) == list(alone.tensors)
        assert all(torch.equal(got.tensors[name], tensor) for name, tensor in alone.tensors.items())
        assert delivery.upload is not None
        twice = through(alone, codec)
        assert all(torch.equal(delivery.upload.tensors[name], tensor) for name, tensor in twice.tensors.items())
