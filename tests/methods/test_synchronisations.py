"""Every method's steps on a device whose values the host does not see: what it waits for, and how it copies there."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from fedguild.client.cohort import Cohort, LocalWork, Step
from fedguild.client.private_training import _Client
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.model import slot_products
from fedguild.model.backbone import make_backbone
from fedguild.model.on_device import kept_on_device
from fedguild.model.slots import SlotModel
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise
from fedguild.server.method import Roster
from tests.backbones import END, PAD, random_rows, tiny_model
from tests.client.device import Device, Found
from tests.methods.test_matrix import ALIKE, CASES, CLIENTS, cases, method_of
from tests.methods.test_private_methods import able
from tests.model.kernels import let_run

SETTINGS = TrainingSettings(optimizer="adamw", batch_size=2, gradient_accumulation_steps=2, steps=2, max_grad_norm=1.0)
PRIVATE = TrainingSettings(optimizer="adamw", batch_size=2, steps=2, max_grad_norm=None)
DP = DpSgd(clip=0.3, noise_multiplier=0.2, probability=0.6, steps=1, divisor=4.5, noise=Noise(b"key"))
DAILY = ("fedit", "fed-sb from random factors", "fedprompt")


@pytest.mark.parametrize(
    "label",
    [
        pytest.param(label, marks=pytest.mark.long if " " in label or (label in ALIKE and label not in DAILY) else ())
        for label in cases()
    ],
)
def test_the_host_waits_at_most_twice_a_step(label, monkeypatch):
    """With clients of unequal budgets and accumulated passes; no copy to the device makes it wait."""
    steps = steps_of(label, monkeypatch, num_hidden_layers=1)
    assert steps, "the method took no step"
    for step in steps:
        assert not step.blocking, step.blocking
        assert 1 <= len(step.waits) <= 2, step.waits


@pytest.mark.parametrize(
    "label",
    [pytest.param(label, marks=[] if label in DAILY else pytest.mark.long) for label in able("example", plain=True)],
)
def test_the_host_waits_for_nothing_in_a_step_of_dp_sgd(label, monkeypatch):
    """Several microbatches a step, with dropout where a method has it; the losses are not read."""
    steps = private_steps_of(label, monkeypatch, num_hidden_layers=1)
    assert len(steps) == DP.steps * len(CLIENTS)
    for step in steps:
        assert not step.blocking, step.blocking
        assert not step.waits, step.waits


def test_a_step_of_dp_sgd_takes_as_many_operations_for_any_number_of_experts_and_examples(monkeypatch):
    """Of one microbatch of equal rows, in which every example is a slot."""
    counts = set()
    for experts, examples in ((16, 2), (64, 2), (16, 5)):
        monkeypatch.setattr(DpSgd, "batch", lambda *_, examples=examples: [0] * examples)
        settings = PRIVATE.model_copy(update={"batch_size": examples})
        step = private_steps_of("fedit", monkeypatch, settings, num_experts=experts, num_hidden_layers=1)[-1]
        counts.add((step.operations, step.copies))
    assert len(counts) == 1


def test_a_step_of_dp_sgd_without_examples_waits_for_nothing(monkeypatch):
    monkeypatch.setattr(DpSgd, "batch", lambda self, step, examples: [])
    steps = private_steps_of("fedit", monkeypatch, num_hidden_layers=1)
    assert steps
    assert not [place for step in steps for place in (*step.blocking, *step.waits)]


@pytest.mark.parametrize(
    ("label", "names"),
    [
        ("hfedmoe", ()),
        ("ub-smoe", ("optimizer",)),
        pytest.param("hfedmoe", ("optimizer",), marks=pytest.mark.long),
        pytest.param("ub-smoe", (), marks=pytest.mark.long),
    ],
)
def test_leaving_experts_alone_takes_as_many_operations_for_any_number_of_them(label, names, monkeypatch):
    let_run(monkeypatch, names, "meta")
    sizes = [{"num_experts": experts, "num_hidden_layers": 1} for experts in (16, 64)]
    operations = [steps_of(label, monkeypatch, **size)[-1].operations for size in sizes]
    assert operations[0] == operations[1]


@pytest.mark.parametrize(
    ("label", "parts"),
    [
        ("fedit", ("q_proj", "gate", "experts.up_proj")),
        pytest.param("fed-sb from random factors", ("q_proj", "experts.up_proj"), marks=pytest.mark.long),
        pytest.param("fedalign-moe with full experts", ("gate", "experts.up_proj"), marks=pytest.mark.long),
        pytest.param("fedamole", ("q_proj.experts", "q_proj.router"), marks=pytest.mark.long),
        pytest.param("fedamole with vanilla routers", ("q_proj.experts", "q_proj.router"), marks=pytest.mark.long),
        ("flex", ("graft.gate", "graft.down_proj")),
    ],
    ids=str,
)
def test_what_is_trained_is_cast_once_a_step(label, parts, monkeypatch):
    """Not once a pass: three passes of a step cast as often as one."""
    casts, shapes = [], {}
    monkeypatch.setattr(Cohort, "finish", lambda self: shapes.update(self.trainables))
    for accumulation in (1, 3):
        settings = SETTINGS.model_copy(update={"gradient_accumulation_steps": accumulation, "batch_size": 1})
        found = Counter(steps_of(label, monkeypatch, settings, num_hidden_layers=1)[-1].casts)
        casts.append({name: found[tensor.stored.shape] for name, tensor in shapes.items()})
    assert casts[0] == casts[1]
    for part in parts:
        assert any(count for name, count in casts[0].items() if f"{part}." in name or name.endswith(part)), part


def steps_of(
    label: str, monkeypatch: pytest.MonkeyPatch, settings: TrainingSettings = SETTINGS, **changes: int
) -> list[Found]:
    """Returns what was counted in each optimizer step of a method."""
    steps: list[Found] = []
    device, original = Device(), Cohort.steps

    def counted(self: Cohort, most: Sequence[int] | None = None, *, pairs: bool = False) -> Iterator[Step]:
        last = -1
        for step in original(self, most, pairs=pairs):
            if step.index != last:  # only now has the last one read its losses
                last, device.found = step.index, Found()
                steps.append(device.found)
            yield step
        device.found = None

    monkeypatch.setattr(Cohort, "steps", counted)
    update_locally(label, monkeypatch, device, settings, **changes)
    return steps


def private_steps_of(
    label: str, monkeypatch: pytest.MonkeyPatch, settings: TrainingSettings | None = None, **changes: int
) -> list[Found]:
    """Returns what was counted in each step of DP-SGD."""
    steps: list[Found] = []
    device, spread = Device(), _Client._spread_weights

    def first_of_a_step(self: _Client, model: SlotModel, *, frozen: bool) -> None:
        device.found = Found()
        steps.append(device.found)
        spread(self, model, frozen=frozen)

    def told(*_: object) -> None:
        device.found = None

    monkeypatch.setattr(_Client, "_spread_weights", first_of_a_step)
    monkeypatch.setattr(Cohort, "tell_step", told)
    update_locally(label, monkeypatch, device, settings or PRIVATE, dp=DP, **changes)
    return steps


def update_locally(
    label: str,
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    settings: TrainingSettings,
    *,
    dp: DpSgd | None = None,
    **changes: int,
) -> None:
    """Runs a method's client half on the device, as DP-SGD if `dp` says so."""
    slot_products._ends.cache_clear()
    kept_on_device.cache_clear()
    method = method_of(label)
    model = tiny_model(CASES[label].family, dtype=torch.bfloat16, **changes).to("meta")
    tokenizer = SimpleNamespace(
        pad_token_id=PAD, eos_token_id=END, encode=lambda text, **_: [1 + ord(letter) % 31 for letter in text]
    )
    backbone = make_backbone(model, tokenizer, name="without values")
    info = backbone.info
    state = method.start(info, Roster([who.budget for who in CLIENTS], CLIENTS), torch_rng(0, "start"))
    work = []
    for who in CLIENTS:
        rows = random_rows([4 + (who.index + number) % 5 for number in range(9)], who.index)
        examples = [Encoded(tuple(row), 2) for row in rows]
        work.append(LocalWork(who, examples, method.download(state, info, who), Payload()))
    private = None if dp is None else [replace(dp, noise=dp.noise.child(who.index)) for who in CLIENTS]
    plans = [method.plan(info, who.budget) for who in CLIENTS]
    with device.running(monkeypatch), SlotModel(backbone, plans) as slots:
        method.local_update(Cohort(slots, work, settings, round_index=1, seed=1, private=private))
