"""A training step on a device whose values the host cannot read: what it copies there, and what it waits for.

Tensors on `meta` have no values, so that whatever waits for one on a GPU raises here.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import groupby
from types import SimpleNamespace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded, collate
from fedguild.model import slot_products
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import make_backbone
from fedguild.model.moe import view
from fedguild.model.moe.products import GROUP_LIMIT
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, random_rows, tiny_model
from tests.client.device import Device, Found
from tests.model.kernels import let_run

SETTINGS = TrainingSettings(optimizer="adamw", batch_size=2, steps=2, lr_scheduler="linear", max_grad_norm=1.0)
OURS = ("low-rank", "grouped", "cross-entropy", "dropout")


class Moved(TorchDispatchMode):
    """Counts the bytes of the tensors that operations read and write on the device; a view moves none."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in function._schema.returns)
        if not is_view and function is not torch.ops.aten._unsafe_view.default:
            self.bytes += sum(
                value.numel() * value.element_size()
                for value in tree_leaves((args, kwargs, out))
                if isinstance(value, torch.Tensor) and value.device.type == "meta"
            )
        return out


class Copies(TorchDispatchMode):
    """Counts what is copied from the host to the device, the operations, and sums in new tensors."""

    def __init__(self):
        super().__init__()
        self.copies = 0
        self.operations = 0
        self.sums = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.operations += 1
        if function is torch.ops.aten._to_copy.default and args[0].device.type == "cpu" and out.device.type == "meta":
            self.copies += 1
        if function is torch.ops.aten.add.Tensor and out.dtype is torch.bfloat16:
            self.sums += 1
        return out


def meta_backbone(dtype=torch.bfloat16, **changes):
    return make_backbone(tiny_model("olmoe", dtype=dtype, **changes).to("meta"), None, name="without values")


def work_of(slots, lengths):
    return [
        LocalWork(
            ClientInfo(slot, Budget("all", 4, 8), len(lengths)),
            [Encoded(tuple(ids), 1) for ids in random_rows(list(lengths), slot)],
            Payload(),
            Payload(),
        )
        for slot in range(slots)
    ]


def train(backbone, slots, monkeypatch, *, dropout=0.3, active=(2, 4), lengths=(9, 3, 5, 5)):
    """Two steps of a cohort; returns copies to the device, operations, and reports, for each pass."""
    reports = []
    slot_products._ends.cache_clear()

    def read(self):
        reports.extend(sums.shape for sums, _ in self._unread)
        self._unread.clear()

    monkeypatch.setattr(Cohort, "read_losses", read)
    original = SlotOptimizer.step

    def step_reported(self, *given):
        reports.append("update")
        original(self, *given)

    monkeypatch.setattr(SlotOptimizer, "step", step_reported)
    plan = AdapterPlan((Lora(8, 1.0, ("attention", "router", "experts"), dropout),))
    plans = [replace(plan, active_experts=active[slot % len(active)]) for slot in range(slots)]
    work = work_of(slots, lengths)
    with SlotModel(backbone, plans) as model:
        cohort = Cohort(model, work, SETTINGS, round_index=1, seed=1)
        counts = []
        for step in cohort.steps():
            with Copies() as copies:
                step.backward(step.forward())
                step.apply()
            counts.append((copies.copies, copies.operations))
    assert [kind for kind, _ in groupby(reports)] == ["update", (slots,)] * 2  # the host waits when all is queued
    return counts[-1]


def test_experts_with_a_capacity_and_a_decoder_wait_for_nothing_within_a_layer(monkeypatch):
    """How many pairs are dropped or padding, the host does not know, and does not ask."""
    tokenizer = SimpleNamespace(pad_token_id=PAD, eos_token_id=END)
    model = tiny_model("switch", expert_capacity=3, dtype=torch.bfloat16).to("meta")
    backbone = make_backbone(model, tokenizer, name="without values")
    plan = AdapterPlan((Lora(8, 1.0, ("attention", "router", "experts")),))
    batches = [[Encoded(tuple(ids), 2) for ids in random_rows([9, 3, 5], slot)] for slot in range(2)]
    waits = []
    for asks in (True, False):
        monkeypatch.setattr(view, "waits_for_values", lambda _, asks=asks: not asks)
        device = Device(Found())
        with device.running(monkeypatch), SlotModel(backbone, [plan, plan]) as slots:
            slots.token_losses(collate(batches, PAD, slots.seq2seq)).sum().backward()
        waits.append([place for place in device.found.waits if "moe" in place])
    assert len(waits[0]) >= len(backbone.info.moe), "one in each layer"
    assert not waits[1]


@pytest.mark.parametrize(
    ("names", "lengths"),
    [
        ((), (9, 3, 5, 5)),
        pytest.param((), (6, 6, 6, 6), marks=pytest.mark.long),
        pytest.param(OURS, (9, 3, 5, 5), marks=pytest.mark.long),
    ],
    ids=["packed", "without padding", "by kernels"],
)
def test_the_host_waits_for_the_losses_alone(names, lengths, monkeypatch):
    """One wait a step; copies to the device do not grow with layers, experts or slots."""
    let_run(monkeypatch, names, "meta")
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


@pytest.mark.long
def test_there_is_no_cliff_in_the_number_of_groups(monkeypatch):
    """More (expert, slot) groups than a kernel takes: a few more operations for each layer, not some for each group."""
    experts = 64
    assert 15 * experts < GROUP_LIMIT < 16 * experts
    operations = {slots: train(meta_backbone(num_experts=experts), slots, monkeypatch)[1] for slots in (14, 15, 16, 17)}
    assert operations[15] == operations[14]
    assert operations[17] == operations[16]
    assert 0 < operations[16] - operations[15] < 2 * 150


def bytes_of_a_step(slots, rows, monkeypatch, **changes):
    """Returns the bytes that a second step moves but for the optimizer, and those of one slot's trained factors."""
    slot_products._ends.cache_clear()
    monkeypatch.setattr(Cohort, "read_losses", lambda self: self._unread.clear())
    settings = SETTINGS.model_copy(update={"batch_size": rows})
    plan = AdapterPlan((Lora(8, 1.0, ("attention", "router", "experts")),))
    with SlotModel(meta_backbone(**changes), [plan] * slots) as model:
        factors = sum(trainable.stored.numel() * 4 for trainable in model.trainables.values())
        for step in Cohort(model, work_of(slots, (9,) * rows), settings, round_index=1, seed=1).steps():
            with Moved() as moved:
                step.backward(step.forward())
    return moved.bytes, factors // slots


def test_a_step_moves_the_bytes_of_its_tokens_once_whatever_the_slots(monkeypatch):
    """The same tokens in more slots: a further slot moves its factors, as they are cast, used and differentiated."""
    moved = {slots: bytes_of_a_step(slots, 8 // slots, monkeypatch)[0] for slots in (2, 4, 8)}
    _, factors = bytes_of_a_step(2, 4, monkeypatch)
    assert moved[8] - moved[4] == 2 * (moved[4] - moved[2])
    assert (moved[4] - moved[2]) / 2 < 4.5 * factors
    assert moved[8] < 1.5 * moved[2]


@pytest.mark.long
def test_of_a_further_expert_a_step_moves_its_own_weights_and_the_routers_scores(monkeypatch):
    """At the same pairs: what it moves for each token is the same at any width of the model."""

    def of_an_expert(rows, hidden):
        sizes = {"hidden_size": hidden, "num_attention_heads": 2, "num_key_value_heads": 2}
        counts = {
            experts: bytes_of_a_step(2, rows, monkeypatch, num_experts=experts, **sizes) for experts in (8, 16, 32)
        }
        moved, factors = ({experts: count[place] for experts, count in counts.items()} for place in (0, 1))
        assert moved[32] - moved[16] == 2 * (moved[16] - moved[8])
        return (moved[16] - moved[8]) / 8, 2 * (factors[16] - factors[8]) / 8

    scores = set()
    for hidden in (16, 32):
        (few, factors), (many, _) = of_an_expert(2, hidden), of_an_expert(4, hidden)
        scores.add(many - few)
        assert few - (many - few) < 5 * factors  # as many tokens less as many: none
    assert len(scores) == 1


@pytest.mark.long
def test_a_layers_launches_do_not_grow_with_experts_or_slots(monkeypatch):
    """Operations of torch and launches of our kernels, of the layers that a deeper model has more."""
    let_run(monkeypatch, OURS, "meta")
    launches = count_launches(monkeypatch)

    def of_a_step(slots, **changes):
        launches.clear()
        _, operations = train(meta_backbone(**changes), slots, monkeypatch)
        return operations, launches.total() / 2

    found = set()
    for slots, experts in ((2, 8), (5, 8), (2, 32)):
        shallow, deep = (of_a_step(slots, num_experts=experts, num_hidden_layers=layers) for layers in (1, 3))
        found.add(tuple((after - before) / 2 for before, after in zip(shallow, deep, strict=True)))
    assert len(found) == 1, found
    # Forward A and B, backward Bᵀ and Aᵀ, of gate and up together and of down; dA and dB of all three.
    assert launches["segmented_rows"] >= 2 * 3 * 8
    assert launches["segmented_outer"] >= 2 * 3 * 6


def count_launches(monkeypatch):
    """Counts the calls of our kernels, by name, from now on."""
    segmented = pytest.importorskip("fedguild.model.kernels.segmented", reason="Triton is there for Linux only")
    launches = Counter()

    def counted(name, function):
        def call(*args, **kwargs):
            launches[name] += 1
            return function(*args, **kwargs)

        monkeypatch.setattr(segmented, name, call)

    for name in ("segmented_rows", "segmented_outer"):
        counted(name, getattr(segmented, name))
    return launches


@pytest.mark.parametrize("lengths", [(6,), (9, 3, 5)], ids=["without padding", "packed"])
def test_products_are_added_in_place(lengths, monkeypatch):
    """A forward pass with LoRA makes no further tensor of a layer's output: as many sums as without, in bf16."""
    let_run(monkeypatch, OURS, "meta")
    sums = []
    batch = collate([[Encoded(tuple(ids), 1) for ids in random_rows(list(lengths), slot)] for slot in range(2)], 0)
    for targets in (("router",), ("attention", "router", "experts")):
        with SlotModel(meta_backbone(), [AdapterPlan((Lora(8, 1.0, targets),))] * 2) as model, torch.no_grad():
            with Copies() as counts:
                model.token_losses(batch)
            sums.append(counts.sums)
    assert sums[0] == sums[1] > 0
