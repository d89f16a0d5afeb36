"""A training step on a device whose values the host cannot read: what it copies there, and what it waits for.

Tensors on `meta` have no values, so that whatever waits for one on a GPU raises here.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.model import slot_products
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import make_backbone
from fedguild.model.moe.products import GROUP_LIMIT
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.payload import Payload
from tests.backbones import random_rows, tiny_model

SETTINGS = TrainingSettings(optimizer="adamw", batch_size=2, steps=2, schedule="linear", clip_norm=1.0)


class Copies(TorchDispatchMode):
    """Counts what is copied from the host to the device, and the operations."""

    def __init__(self):
        super().__init__()
        self.copies = 0
        self.operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and out.device.type == "meta":
            self.copies += 1
        return out


def meta_backbone(dtype=torch.bfloat16, **changes):
    return make_backbone(tiny_model("olmoe", dtype=dtype, **changes).to("meta"), None, name="without values")


def train(backbone, slots, monkeypatch, *, dropout=0.3, active=(2, 4), lengths=(9, 3, 5, 5)):
    """Two steps of a cohort; returns copies to the device, operations, and reports, for each pass."""
    reports = []
    slot_products._ends.cache_clear()

    def read(self):
        reports.extend(sums.shape for sums, _ in self._unread)
        self._unread.clear()

    monkeypatch.setattr(Cohort, "read_losses", read)
    monkeypatch.setattr(SlotOptimizer, "_kernel", lambda self, values, *_: reports.append("update"))
    plan = AdapterPlan((Lora(8, 1.0, ("attention", "router", "experts"), dropout),))
    plans = [replace(plan, active_experts=active[slot % len(active)]) for slot in range(slots)]
    work = [
        LocalWork(
            ClientInfo(slot, Budget("all", 4, 8), len(lengths)),
            [Encoded(tuple(ids), 1) for ids in random_rows(list(lengths), slot)],
            Payload(),
            Payload(),
        )
        for slot in range(slots)
    ]
    with SlotModel(backbone, plans) as model:
        cohort = Cohort(model, work, SETTINGS, round_index=1, seed=1)
        counts = []
        for step in cohort.steps():
            with Copies() as copies:
                step.backward(step.forward())
                step.apply()
            counts.append((copies.copies, copies.operations))
    assert [kind for kind in reports if kind != "update"] == [(slots,)] * 2
    return counts[-1]


@pytest.mark.parametrize("lengths", [(9, 3, 5, 5), (6, 6, 6, 6)], ids=["packed", "without padding"])
def test_the_host_waits_for_the_losses_alone(lengths, monkeypatch):
    """One wait a pass; copies to the device do not grow with layers, experts or slots."""
    copies = {
        name: train(meta_backbone(**changes), slots, monkeypatch, lengths=lengths)[0]
        for name, slots, changes in (
            ("small", 2, {}),
            ("more slots", 5, {}),
            ("more experts", 2, {"num_experts": 32}),
            ("more layers", 2, {"num_hidden_layers": 5}),
        )
    }
    assert len(set(copies.values())) == 1, copies
    assert copies["small"] <= 13


def test_padding_and_mixed_experts_are_counted_on_the_host(monkeypatch):
    """Without packing; the number of active pairs follows from the mask and the slots' active experts."""
    backbone = meta_backbone()
    backbone.packs = False
    train(backbone, 2, monkeypatch)


def test_operations_do_not_grow_with_experts(monkeypatch):
    operations = [train(meta_backbone(num_experts=experts), 2, monkeypatch)[1] for experts in (8, 64)]
    assert operations[0] == operations[1]


def test_there_is_no_cliff_in_the_number_of_groups(monkeypatch):
    """More (expert, slot) groups than a kernel takes: a few more operations for each layer, not some for each group."""
    experts = 64
    assert 15 * experts < GROUP_LIMIT < 16 * experts
    operations = {slots: train(meta_backbone(num_experts=experts), slots, monkeypatch)[1] for slots in (14, 15, 16, 17)}
    by_slot = operations[15] - operations[14]
    assert operations[17] - operations[16] == by_slot
    assert 0 < operations[16] - operations[15] - by_slot < 2 * 150
