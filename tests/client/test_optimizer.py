"""The optimizer of all slots against one torch optimizer per client, in fp64."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.adapters.lora import Lora
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import make_backbone
from fedguild.model.kernels import adam
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import random_adapter, tiny_backbone, tiny_model
from tests.model.kernels import let_run
from tests.oracles.optimizer import ClientOptimizer

PLAN = AdapterPlan((Lora(4, 1.0, ("q_proj", "router", "experts")), OutputScale("per_layer")))
PLANS = [PLAN, PLAN.with_lora(rank=1), PLAN.with_lora(rank=3)]
RATES = [  # of three slots: equal, unequal, resting in the middle, finished early
    (0.1, 0.1, 0.1),
    (0.1, 0.02, 0.1),
    (0.1, None, 0.05),
    (None, 0.1, 0.05),
    (0.01, 0.1, None),
    (0.01, 0.01, None),
]
KINDS = {
    "adamw": TrainingSettings(optimizer="adamw", weight_decay=0.1),
    "adamw, other constants": TrainingSettings(optimizer="adamw", betas=(0.5, 0.9), eps=1e-3),
    "adam with decay": TrainingSettings(optimizer="adam", weight_decay=0.1),
    "sgd": TrainingSettings(optimizer="sgd"),
    "sgd with momentum and decay": TrainingSettings(optimizer="sgd", weight_decay=0.1, momentum=0.9),
}


ADAM = {name: KINDS[name] for name in ("adamw", "adam with decay")}
"""What a kernel of ours does."""
WAYS = [pytest.param(None, settings, id=name) for name, settings in KINDS.items()]
WAYS += [pytest.param("numba", KINDS[name], id=f"{name}, by a CPU's kernel") for name in KINDS if "adam" in name]
WAYS += [
    pytest.param("triton", settings, id=f"{name}, by the kernel", marks=[] if name == "adamw" else pytest.mark.long)
    for name, settings in ADAM.items()
]
TRAININGS = [
    pytest.param(
        *way.values,
        clip,
        masked,
        id=f"{way.id}-{'clipped' if clip else 'unclipped'}-{'masked' if masked else 'whole'}",
        marks=pytest.mark.long
        if way.values[0] == "triton" and not (clip and masked and "adamw" in str(way.id))
        else [],
    )
    for way in WAYS
    for clip in (None, 5.0)
    for masked in (False, True)
]
"""In Triton's interpreter one of them every day."""


def let_step(monkeypatch, language):
    """Lets a kernel of ours in Triton or Numba take the steps, or torch."""
    let_run(monkeypatch, ["optimizer"] if language else [], language=language or "triton")


@pytest.fixture(scope="module")
def backbone():
    return tiny_backbone("olmoe", dtype=torch.float64)


@pytest.fixture(scope="module")
def small_backbone():
    """For Triton's interpreter, which takes a millisecond for each (expert, slot) of each factor."""
    return tiny_backbone("olmoe", dtype=torch.float64, num_hidden_layers=1, num_experts=4)


def put_gradients(model: SlotModel, step: int) -> list[dict[str, torch.Tensor]]:
    """Gives every slot random gradients, of very different sizes; returns them by slot."""
    grads = [random_adapter(model.backbone.info, plan, 100 + step, size=3.0**slot) for slot, plan in enumerate(PLANS)]
    for name, trainable in model.trainables.items():
        trainable.stored.grad = torch.zeros_like(trainable.stored)
        for slot, own in enumerate(grads):
            trainable.own(slot, of=trainable.stored.grad).copy_(own[name])
    return grads


def random_masks(model: SlotModel, step: int) -> dict[str, torch.Tensor]:
    """Which experts each slot updates, [M, S] by name: all in the first step, then others in each."""
    rng = torch.Generator().manual_seed(step)
    of_experts = {name: t.stored.shape[:2] for name, t in model.trainables.items() if t.axis == 1}
    return {
        name: (torch.rand(*shape[::-1], generator=rng) < (0.6 if step else 2)).T for name, shape in of_experts.items()
    }


@pytest.mark.parametrize(("language", "settings", "clip", "masked"), TRAININGS)
def test_every_slot_is_updated_as_by_its_own_torch_optimizer(
    backbone, small_backbone, language, settings, clip, masked, monkeypatch
):
    """With unequal rates, slots that rest or have finished, and experts that a slot leaves alone."""
    let_step(monkeypatch, language)
    backbone = small_backbone if language == "triton" else backbone
    starts = [random_adapter(backbone.info, plan, slot) for slot, plan in enumerate(PLANS)]
    alone = [ClientOptimizer({name: value.clone() for name, value in start.items()}, settings) for start in starts]
    with SlotModel(backbone, PLANS) as model:
        for slot, start in enumerate(starts):
            model.load(slot, start)
        optimizer = SlotOptimizer(model.trainables, settings)
        for step, rates in enumerate(RATES):
            grads = put_gradients(model, step)
            masks = random_masks(model, step) if masked else {}
            norms = optimizer.clip(float("inf") if clip is None else clip)
            optimizer.step(rates, masks)
            for slot, rate in enumerate(rates):
                if rate is not None:
                    own = {name: mask[:, slot] for name, mask in masks.items()}
                    norm = alone[slot].step(grads[slot], rate, clip, own)
                    assert norm == pytest.approx(norms[slot].item(), rel=1e-12)
        for slot, client in enumerate(alone):
            for name, value in model.read(slot).items():
                assert torch.allclose(value, client.tensors[name].detach(), rtol=1e-12, atol=1e-13), name
                assert not torch.equal(value, starts[slot][name])


@pytest.mark.parametrize(("language", "settings"), WAYS)
def test_ranks_beyond_a_slots_own_stay_exactly_zero(backbone, small_backbone, language, settings, monkeypatch):
    let_step(monkeypatch, language)
    backbone = small_backbone if language == "triton" else backbone
    with SlotModel(backbone, PLANS) as model:
        for slot, plan in enumerate(PLANS):
            model.load(slot, random_adapter(backbone.info, plan, slot))
        optimizer = SlotOptimizer(model.trainables, settings)
        for step in range(3):
            put_gradients(model, step)
            optimizer.step((0.1, 0.1, 0.1))
        for trainable in model.trainables.values():
            beyond = trainable.stored.detach().clone()
            for slot in range(3):
                trainable.own(slot, of=beyond).zero_()
            assert not beyond.any()


def trained(backbone, plans, seeds, settings, rates, *, masked=False):
    """Every slot's weights after steps with gradients, and experts left out, that depend on the slot's seed alone."""
    with SlotModel(backbone, plans) as model:
        for slot, (plan, seed) in enumerate(zip(plans, seeds, strict=True)):
            model.load(slot, random_adapter(backbone.info, plan, seed))
        optimizer = SlotOptimizer(model.trainables, settings)
        for step in range(len(rates[0])):
            for trainable in model.trainables.values():
                trainable.stored.grad = torch.zeros_like(trainable.stored)
            for slot, (plan, seed) in enumerate(zip(plans, seeds, strict=True)):
                for name, value in random_adapter(backbone.info, plan, 100 * (step + 1) + seed).items():
                    trainable = model.trainables[name]
                    trainable.own(slot, of=trainable.stored.grad).copy_(value)
            masks = {}
            if masked:
                count = backbone.info.moe[0].num_experts
                rngs = [torch.Generator().manual_seed(100 * step + seed) for seed in seeds]
                rows = [torch.rand(count, generator=rng) < 0.6 for rng in rngs]
                experts = [name for name, trainable in model.trainables.items() if trainable.axis == 1]
                masks = dict.fromkeys(experts, torch.stack(rows, dim=1))
            optimizer.step([of_slot[step] for of_slot in rates], masks)
        return [model.read(slot) for slot in range(len(plans))]


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS.keys())
@pytest.mark.parametrize("extra", [OutputScale("per_layer"), FullRouter()], ids=["output scales", "full routers"])
def test_a_slots_bits_are_those_alone(settings, extra, masked, monkeypatch):
    """fp32, by `torch.equal`: in step, then at rates of their own, resting, finished; some sizes fill no lanes."""
    let_step(monkeypatch, None)
    assert_bits_are_those_alone(settings, extra, masked=masked)


@pytest.mark.parametrize(
    ("settings", "language"),
    [
        pytest.param(ADAM["adamw"], "triton", id="adamw", marks=pytest.mark.long),
        pytest.param(ADAM["adam with decay"], "triton", id="adam with decay", marks=pytest.mark.long),
        *(pytest.param(settings, "numba", id=f"{name}, on a CPU") for name, settings in ADAM.items()),
    ],
)
def test_a_slots_bits_are_those_alone_by_the_kernel(settings, language, monkeypatch):
    let_step(monkeypatch, language)
    assert_bits_are_those_alone(settings, OutputScale("per_layer"), masked=True, num_hidden_layers=1, num_experts=4)


def assert_bits_are_those_alone(settings, extra, *, masked, **changes):
    backbone = tiny_backbone("olmoe", hidden_size=20, intermediate_size=9, **changes)
    plan = AdapterPlan((Lora(4, 1.0, ("q_proj", "experts")), extra))
    plans, seeds = [plan, plan.with_lora(rank=1), plan.with_lora(rank=3)], [7, 8, 9]
    rates = list(zip(*RATES, strict=True))
    beside = trained(backbone, plans, seeds, settings, rates, masked=masked)
    for slot in range(3):
        own = slice(slot, slot + 1)
        (alone,) = trained(backbone, plans[own], seeds[own], settings, rates[own], masked=masked)
        for name, value in alone.items():
            assert torch.equal(beside[slot][name], value), (slot, name)


def test_threads_of_any_number_leave_the_same_bits(monkeypatch):
    """Tensors of several pieces."""
    let_step(monkeypatch, "numba")
    backbone = tiny_backbone("olmoe", hidden_size=136, intermediate_size=72)
    results, before = [], torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(trained(backbone, PLANS, range(3), KINDS["adamw"], list(zip(*RATES, strict=True))))
    torch.set_num_threads(before)
    for one, other in zip(*results, strict=True):
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
def test_a_step_is_as_many_launches_for_any_model_and_cohort(masked, monkeypatch):
    """Of the kernel two, rows that fill 16 bytes and those that do not; from the host one small table to each.

    Clipping reads each gradient once, and nothing of its size is written.
    """
    let_run(monkeypatch, ["optimizer"], "meta")
    launches = []
    original = adam._launch
    monkeypatch.setattr(adam, "_launch", lambda *args, **options: launches.append(original(*args, **options)))
    operations = set()
    for slots, changes in ((2, {}), (5, {}), (2, {"num_experts": 32}), (2, {"num_hidden_layers": 4})):
        backbone = make_backbone(tiny_model("olmoe", **changes).to("meta"), None, name="without values")
        with SlotModel(backbone, [PLAN] * slots) as model:
            optimizer = SlotOptimizer(model.trainables, KINDS["adamw"])
            rates: list[float | None] = [0.1 * (slot + 1) for slot in range(slots)]
            rates[-1] = None
            masks = random_masks(model, 1) if masked else {}
            for _ in range(2):
                launches.clear()
                with Written() as clipping:
                    for trainable in model.trainables.values():
                        trainable.stored.grad = torch.empty_like(trainable.stored)
                    clipping.clear()
                    optimizer.clip(1.0)
                with Written() as stepping:
                    optimizer.step(rates, masks)
            largest = max(trainable.stored.numel() for trainable in model.trainables.values())
            assert clipping.operations <= 2 * len(model.trainables) + 12
            assert clipping.largest < largest / 8
            assert len(launches) == 2
            assert stepping.largest <= adam.COLUMNS * len(model.trainables) + adam.NUMBERS * (slots + 1)
            operations.add(stepping.operations)
    assert len(operations) == 1


class Written(TorchDispatchMode):
    """Counts the operations of torch, and the elements of the largest new tensor."""

    def __init__(self):
        super().__init__()
        self.clear()

    def clear(self):
        self.operations = self.largest = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if not function.is_view and function is not torch.ops.aten.detach.default:
            self.operations += 1
            self.largest = max(self.largest, out.numel() if isinstance(out, torch.Tensor) else 0)
        return out
