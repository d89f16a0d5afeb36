"""The local engine: cohorts of any size give the same uploads, and keep what finished clients leave."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.client.memory import ClientMemory
from fedguild.core.accounting import count_traffic
from fedguild.core.errors import FedGuildError
from fedguild.core.payload import Payload, with_part
from fedguild.engines import cohorts, local
from fedguild.engines.cohorts import auto_cohort_size, free_bytes
from fedguild.engines.local import LocalEngine
from fedguild.measuring.costs.memory import StepForm, memory
from fedguild.methods import build_method
from fedguild.model import kernels
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Method
from tests.backbones import random_adapter
from tests.client.clients import distance, flat
from tests.methods.federation import LARGE, MIDDLE, SETTINGS, SMALL, Federation, client
from tests.model.kernels import let_run

CLIENTS = (client(0, LARGE, 5), client(1, SMALL, 3), client(2, MIDDLE, 4), client(3, LARGE, 2), client(4, SMALL, 6))
ROUND = 2
KEPT = {"model.layers.0.mlp.output_scale": torch.tensor(1.5), "model.layers.1.mlp.output_scale": torch.tensor(0.5)}
"""The rescaler that client 1 kept from round 1."""


@pytest.fixture
def flame() -> Method:
    return build_method("flame", {"rank": 3})


def tasks_of(method: Method, backbone: Backbone, clients: Sequence[ClientInfo] = CLIENTS) -> list[Task]:
    """Returns what the server asks for after some training: a global adapter far from its start."""
    plan = method.plan(backbone.info, LARGE).without(OutputScale)
    download = Payload(with_part("adapter", random_adapter(backbone.info, plan, seed=5, size=0.2)))
    return [Task(ROUND, who, Payload({n: t.float() for n, t in download.tensors.items()})) for who in clients]


def engine_of(backbone: Backbone, method: Method, folder: Path, cohort_size: Any, **options: Any) -> LocalEngine:
    examples = Federation(backbone, method, CLIENTS, folder).examples
    memory = ClientMemory(folder / "clients")
    memory.save("client-001", 1, Payload(KEPT))
    settings = SETTINGS.model_copy(update={"steps": 3, "max_grad_norm": 1.0})
    return LocalEngine(backbone, examples, settings, memory, cohort_size=cohort_size, seed=1, **options)


def deliver(backbone: Backbone, method: Method, folder: Path, cohort_size: Any = 2, **options: Any) -> list[Delivery]:
    engine = engine_of(backbone, method, folder, cohort_size, **options)
    return list(engine.train(method, backbone.info, tasks_of(method, backbone)))


def uploads(deliveries: Sequence[Delivery]) -> list[dict[str, torch.Tensor]]:
    assert all(delivery.upload is not None for delivery in deliveries)
    return [dict(delivery.upload.tensors) for delivery in deliveries if delivery.upload is not None]


def largest_distance(found: Sequence[Delivery], expected: Sequence[Delivery]) -> float:
    pairs = list(zip(uploads(found), uploads(expected), strict=True))
    assert all(one.keys() == other.keys() for one, other in pairs)
    return max(distance(flat(one), flat(other)) for one, other in pairs)


def kept_rounds(folder: Path) -> dict[str, list[str]]:
    return {path.name: sorted(file.name for file in path.iterdir()) for path in sorted((folder / "clients").iterdir())}


@pytest.mark.parametrize("cohort_size", [2, 5, 9, "auto"])
def test_every_cohort_size_gives_the_uploads_of_clients_alone(olmoe_backbone, flame, tmp_path, cohort_size):
    alone = deliver(olmoe_backbone, flame, tmp_path / "alone", 1)
    found = deliver(olmoe_backbone, flame, tmp_path / "found", cohort_size)
    assert [delivery.task.client for delivery in found] == list(CLIENTS)
    assert largest_distance(found, alone) < 1e-5
    for one, other in zip(found, alone, strict=True):
        traffic = [count_traffic(ROUND, one.task.client.index, d.task.download, d.upload) for d in (one, other)]
        assert traffic[0] == traffic[1]
        assert traffic[0].upload_bytes > 0
        assert torch.equal(one.frequency, other.frequency)
        for field in ("steps", "tokens", "examples"):
            assert getattr(one.report, field) == getattr(other.report, field)
        assert one.report.loss == pytest.approx(other.report.loss, rel=1e-5)
    assert kept_rounds(tmp_path / "found") == kept_rounds(tmp_path / "alone")


def test_a_client_starts_from_its_download_and_its_memory(olmoe_backbone, flame, tmp_path, monkeypatch):
    starts = {}
    original = Cohort.steps

    def watch(cohort, **options):
        starts.update({who.index: cohort.read(slot) for slot, who in enumerate(cohort.clients)})
        return original(cohort, **options)

    monkeypatch.setattr(Cohort, "steps", watch)
    (first, *_) = deliver(olmoe_backbone, flame, tmp_path)
    for name, value in first.task.download.part("adapter").items():
        assert all(torch.equal(start[name], value) for start in starts.values())
    for name, value in KEPT.items():
        assert starts[1][name] == value
        assert starts[0][name] == 1.0


def test_a_delivery_tells_what_was_trained(olmoe_backbone, flame, tmp_path):
    for delivery in deliver(olmoe_backbone, flame, tmp_path):
        who, report = delivery.task.client, delivery.report
        assert delivery.plan == flame.plan(olmoe_backbone.info, who.budget)
        assert delivery.failure == ""
        assert report.steps == 3
        assert report.seconds > 0
        assert delivery.frequency.shape == (2, 8)
        torch.testing.assert_close(delivery.frequency.sum(dim=1), torch.full((2,), float(who.budget.active_experts)))
        sent = delivery.upload.part("routing")
        layers = [layer.experts for layer in olmoe_backbone.info.moe]
        assert torch.equal(delivery.frequency, torch.stack([sent[name] for name in layers]))


def test_memory_is_kept_cohort_by_cohort_before_its_deliveries(olmoe_backbone, flame, tmp_path):
    arriving = engine_of(olmoe_backbone, flame, tmp_path, 2).train(
        flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone)
    )
    new = ["round-00002.memory"]
    next(arriving)
    assert kept_rounds(tmp_path) == {"client-000": new, "client-001": ["round-00001.memory", *new]}
    next(arriving)
    next(arriving)
    assert kept_rounds(tmp_path).keys() == {f"client-00{index}" for index in range(4)}


class NoRoom:
    """A device that holds so many slots, and no more; `tried` tells the cohorts that were begun."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: int) -> None:
        self.tried: list[int] = []
        steps = Cohort.steps

        def limited(cohort: Cohort, **options: Any) -> Any:
            self.tried.append(len(cohort.work))
            yield next(moves := steps(cohort, **options))
            if len(cohort.work) > holds:
                raise torch.OutOfMemoryError("no room")
            yield from moves

        monkeypatch.setattr(Cohort, "steps", limited)


def test_a_cohort_that_does_not_fit_is_halved(olmoe_backbone, flame, tmp_path, monkeypatch):
    alone = deliver(olmoe_backbone, flame, tmp_path / "alone", 1)
    device = NoRoom(monkeypatch, holds=2)
    found = deliver(olmoe_backbone, flame, tmp_path / "found", 9)
    assert device.tried == [5, 2, 2, 1]
    assert largest_distance(found, alone) < 1e-5
    assert kept_rounds(tmp_path / "found") == kept_rounds(tmp_path / "alone")


def test_a_device_that_does_not_hold_one_client_is_told_so(olmoe_backbone, flame, tmp_path, monkeypatch):
    device = NoRoom(monkeypatch, holds=0)
    with pytest.raises(FedGuildError, match="The memory of cpu is too small to train one client") as caught:
        deliver(olmoe_backbone, flame, tmp_path, 4)
    assert device.tried == [4, 2, 1]
    assert all(key in caught.value.hint for key in ("training.batch_size", "data.max_length", "gradient_checkpointing"))
    assert kept_rounds(tmp_path) == {"client-001": ["round-00001.memory"]}
    assert olmoe_backbone.runtime.current is None


def test_a_client_that_diverged_harms_nobody_and_keeps_what_it_had(olmoe_backbone, flame, tmp_path):
    honest = deliver(olmoe_backbone, flame, tmp_path / "honest", 5)
    tasks = tasks_of(flame, olmoe_backbone)
    broken = {name: torch.full_like(tensor, float("nan")) for name, tensor in tasks[1].download.tensors.items()}
    tasks[1] = replace(tasks[1], download=Payload(broken))
    engine = engine_of(olmoe_backbone, flame, tmp_path / "found", 5)
    found = list(engine.train(flame, olmoe_backbone.info, tasks))
    assert found[1].upload.part("adapter")["model.layers.0.mlp.experts.up_proj.lora_B"].isnan().any()
    others = [index for index in range(5) if index != 1]
    assert largest_distance([found[i] for i in others], [honest[i] for i in others]) < 1e-5
    assert kept_rounds(tmp_path / "found")["client-001"] == ["round-00001.memory"]
    assert torch.equal(
        engine.memory.load("client-001", ROUND + 1).tensors["model.layers.0.mlp.output_scale"], torch.tensor(1.5)
    )


class ByBudget:
    """A method that adapts the routers of large clients and the attention of all others."""

    def plan(self, model: Any, budget: Any) -> AdapterPlan:
        return AdapterPlan((Lora(2, 1.0, ("router",) if budget == LARGE else ("attention",)),))

    def local_update(self, cohort: Cohort) -> list[Payload]:
        for step in cohort.steps():
            step.backward(step.forward())
            step.apply()
        return [Payload(cohort.read(slot)) for slot in range(len(cohort.work))]


def test_clients_with_other_targets_train_in_other_cohorts(olmoe_backbone, flame, tmp_path, monkeypatch):
    trained = []

    def watched(backbone: Backbone, plans: Sequence[AdapterPlan]) -> SlotModel:
        trained.append([plan.lora.targets[0] for plan in plans])
        return SlotModel(backbone, plans)

    monkeypatch.setattr(cohorts, "SlotModel", watched)
    method = ByBudget()
    tasks = [Task(ROUND, who, Payload()) for who in CLIENTS]
    found = list(engine_of(olmoe_backbone, flame, tmp_path, "auto").train(method, olmoe_backbone.info, tasks))
    assert trained == [["router"], ["attention", "attention"], ["router"], ["attention"]]
    assert [delivery.task.client for delivery in found] == list(CLIENTS)
    for delivery in found:
        shapes = trainable_shapes(olmoe_backbone.info, delivery.plan)
        assert {name: tuple(tensor.shape) for name, tensor in delivery.upload.tensors.items()} == shapes
    assert kept_rounds(tmp_path) == {"client-001": ["round-00001.memory"]}


@pytest.mark.parametrize(
    ("room", "clients", "expected"), [(7.5, 100, 7), (7.5, 4, 4), (0.3, 100, 1), (0.0, 3, 1), (99.0, 100, 12)]
)
def test_auto_fills_its_share_of_the_free_memory(olmoe_backbone, monkeypatch, room, clients, expected):
    """And on a CPU a number of tokens for each thread, beyond which more clients at once gain nothing."""
    monkeypatch.setattr(cohorts.torch, "get_num_threads", lambda: 2)
    plan = AdapterPlan((Lora(4, 1.0, ("attention", "experts")),))
    need = memory(olmoe_backbone.info, plan, 640, dtype=torch.float32)
    one = need.total_bytes - need.weights_bytes
    free = int(room * one / cohorts.MEMORY_SHARE)
    assert auto_cohort_size(olmoe_backbone, plan, 640, clients, free) == expected


def test_auto_plans_for_the_largest_client_and_the_longest_batch(olmoe_backbone, flame, tmp_path, monkeypatch):
    asked = []

    def one(*arguments: object) -> int:
        asked.append(arguments)
        return 1

    monkeypatch.setattr(cohorts, "auto_cohort_size", one)
    monkeypatch.setattr(local, "free_bytes", lambda device: 12345)
    let_run(monkeypatch, ())  # torch takes the steps
    engine = engine_of(olmoe_backbone, flame, tmp_path, "auto")
    list(engine.train(flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone)))
    lengths = [sorted(len(row.input_ids) for row in rows) for rows in engine.examples.values()]
    size = engine.settings.batch_size
    tokens = min(size * max(map(max, lengths)), math.ceil(1.1 * max(sum(own[-size:]) for own in lengths)))
    largest = flame.plan(olmoe_backbone.info, LARGE)
    by_torch = engine.settings.optimizer == "sgd" or not kernels.runs("optimizer", olmoe_backbone.device)
    form = StepForm(engine.settings.gradient_accumulation_steps, by_torch, row_tokens=max(map(max, lengths)))
    assert asked == [(olmoe_backbone, largest, tokens, 5, 12345, engine.settings, None, form)]


def test_auto_does_not_count_what_the_server_takes_between_deliveries(olmoe_backbone, flame, tmp_path, monkeypatch):
    peak, sizes = [0], []

    def watched(backbone: Backbone, plans: Sequence[AdapterPlan]) -> SlotModel:
        sizes.append(len(plans))
        return SlotModel(backbone, plans)

    monkeypatch.setattr(cohorts, "SlotModel", watched)
    monkeypatch.setattr(cohorts, "auto_cohort_size", lambda *_: 2)
    monkeypatch.setattr(local, "room_of", lambda _: 100)
    monkeypatch.setattr(cohorts, "used_bytes", lambda _: 0)
    monkeypatch.setattr(cohorts, "reset_peak", lambda _: peak.append(50))
    monkeypatch.setattr(cohorts, "peak_bytes", lambda _: peak[-1])
    engine = engine_of(olmoe_backbone, flame, tmp_path, "auto")
    for _ in engine.train(flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone)):
        peak.append(1000)
    assert sizes == [2, 2, 1]


@pytest.mark.parametrize(("packs", "tokens"), [(False, 2 * 40), (True, math.ceil(1.1 * 45))])
def test_auto_counts_the_padding_that_is_computed(packs, tokens):
    assert cohorts.most_tokens([[40, 3, 5], [9, 9, 9]], 2, packs=packs) == tokens
    assert cohorts.most_tokens([[40, 40], [9]], 2, packs=packs) == 80


def test_auto_counts_the_first_round_of_fed_sb(olmoe_backbone, flame, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(cohorts, "auto_cohort_size", lambda *arguments: asked.append(arguments[-2]) or 1)
    engine = engine_of(olmoe_backbone, flame, tmp_path, "auto")
    method = build_method("fed-sb", {"rank": 2, "start": "sketch"})
    for round_index in (1, 2):
        tasks = [Task(round_index, who, Payload()) for who in CLIENTS]
        members = [(task, method.plan(olmoe_backbone.info, task.client.budget)) for task in tasks]
        assert engine._size(members) == 1
    assert [plan and plan.rank for plan in asked] == [4 + 2 * 4 + 1, None]


def test_free_bytes_of_a_gpu_count_what_torch_keeps_cached(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 5000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: 700)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 300)
    assert free_bytes(torch.device("cuda")) == 1400


def test_auto_knows_whether_torch_takes_the_steps(olmoe_backbone, monkeypatch):
    """Torch's optimizer holds more for a while than a kernel of ours does."""
    adam, sgd = (
        cohorts.Trainer(olmoe_backbone, SETTINGS.model_copy(update={"optimizer": name}), seed=1)
        for name in ("adamw", "sgd")
    )
    let_run(monkeypatch, ())
    assert adam._step_form(5 * 8, 10, 8).by_torch
    let_run(monkeypatch, {"optimizer"}, language="numba")
    assert [each._step_form(5 * 8, 10, 8).by_torch for each in (adam, sgd)] == [False, True]
