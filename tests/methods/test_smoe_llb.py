"""SMoE-LLB: what a client minimises, against gradients of a slow loss; what is averaged; what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.client.observing import observing
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.payload import Payload
from fedguild.data.batches import collate
from fedguild.engines.local import LocalEngine
from fedguild.methods import build_method
from fedguild.methods.fedavg import FedAvg, FedAvgSettings
from fedguild.methods.smoe_llb import SmoeLlb, SmoeLlbSettings
from fedguild.model.backbone import Backbone
from fedguild.model.moe.view import Routing
from fedguild.model.slots import SlotModel
from fedguild.server.engine import Task
from fedguild.server.method import Method
from tests.backbones import PAD, tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles import smoe_llb as oracle
from tests.oracles.aggregation import weighted_mean

WHOLE = TrainingSettings(optimizer="sgd", learning_rate=0.5, batch_size=8, steps=1, max_grad_norm=None)
"""One step over all of a client's examples."""
CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3)]


def smoe_llb(**options: object) -> SmoeLlb:
    return SmoeLlb(SmoeLlbSettings(**{"rank": 2, **options}))


def trained(
    method: Method, backbone: Backbone, folder: Path, state: Payload | None = None, settings: TrainingSettings = WHOLE
) -> tuple[Payload, list[dict[str, Tensor]], Federation, list[Tensor]]:
    """A start, what every client uploads of a round from it, who they are, and [L, M] frequencies."""
    federation = Federation(backbone, method, CLIENTS, folder)
    state = state or federation.start()
    engine = LocalEngine(backbone, federation.examples, settings, federation.memory, seed=1)
    tasks = [Task(1, who, method.download(state, federation.model, who)) for who in CLIENTS]
    deliveries = list(engine.train(method, federation.model, tasks))
    return state, [one.upload.part("adapter") for one in deliveries], federation, [one.frequency for one in deliveries]


def test_two_clients_by_hand() -> None:
    """n = 10 and 30, expert entries (4, 1) and (8, -3): (7, -2)."""
    name = "model.layers.0.mlp.experts.up_proj.lora_A"
    sent = [
        upload(client(i, LARGE, n), adapter={name: torch.tensor(values).view(2, 1, 1)})
        for i, n, values in ((0, 10, [4.0, 1.0]), (1, 30, [8.0, -3.0]))
    ]
    found = (
        smoe_llb().aggregate(Payload.of({"adapter": {name: torch.zeros(2, 1, 1)}}), iter(sent)).part("adapter")[name]
    )
    assert found.flatten().tolist() == [7.0, -2.0]


@pytest.mark.parametrize("weights", [(0.3, 0.0), (0.0, 0.05), (0.3, 0.05)], ids=str)
@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_a_step_follows_the_slow_loss(family: str, weights: tuple[float, float], tmp_path: Path) -> None:
    """Three clients in a padded pass, in fp64: each moves by the gradient of its own loss, computed alone, slowly."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    method = smoe_llb(balance_weight=weights[0], z_weight=weights[1])
    start = Payload.of({"adapter": random_tensors(backbone.info, method.plan(backbone.info, LARGE), 7)})
    start = Payload.of({"adapter": {name: 0.3 * value.double() for name, value in start.part("adapter").items()}})
    _, sent, federation, _ = trained(method, backbone, tmp_path, start)
    for who, own in zip(CLIENTS, sent, strict=True):
        slopes = slow_gradients(backbone, method, who, start, federation, weights)
        for name, before in start.part("adapter").items():
            expected = before - WHOLE.learning_rate * slopes.get(name, torch.zeros_like(before))
            torch.testing.assert_close(own[name], expected, rtol=1e-8, atol=1e-10, msg=f"{who.name} {name}")


def slow_gradients(backbone, method, who, start, federation, weights) -> dict[str, Tensor]:
    """One client's gradients of nll + c_B … + c_z …, the losses by the oracle from its recorded routing."""
    seen: list[Routing] = []
    active = who.budget.active_experts
    with SlotModel(backbone, [method.plan(backbone.info, who.budget)]) as model:
        model.load(0, start.part("adapter"))
        with observing(backbone.moe, seen.append):
            nll = model.token_losses(collate([federation.examples[who.index]], PAD, None)).mean()
        balance, z = [], []
        for routing in seen:
            real = [True] * len(routing.slot) if routing.keep is None else routing.keep.tolist()
            balance.append(oracle.balance(routing.logits, oracle.chosen(routing.logits, active), real))
            z.append(oracle.z(routing.logits, real))
        loss = nll + weights[0] * sum(balance) / len(balance) + weights[1] * sum(z) / len(z)
        names = list(model.trainables)
        found = torch.autograd.grad(loss, [model.trainables[name].stored for name in names], allow_unused=True)
        return {
            name: model.trainables[name].own(0, of=slope).clone()
            for name, slope in zip(names, found, strict=True)
            if slope is not None
        }


@pytest.mark.parametrize("count", [1, 4])
def test_aggregation(count: int, olmoe_backbone: Backbone) -> None:
    method, model = smoe_llb(targets=("router",)), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    sent = [upload(client(i, LARGE, 2 + 3 * i), adapter=random_tensors(model, plan, i)) for i in range(count)]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    for name, value in before.items():
        values = [part.payload.tensors[f"adapter/{name}"] for part in sent]
        expected = weighted_mean(values, [torch.tensor(float(part.client.examples)) for part in sent], value)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


def test_without_the_losses_and_with_all_experts_it_is_fedavg(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Bit by bit."""
    everybody = [replace(who, budget=LARGE) for who in CLIENTS]
    runs = []
    for method in (
        smoe_llb(balance_weight=0, z_weight=0, alpha=16.0),
        FedAvg(FedAvgSettings(rank=2, alpha=16.0, gate="lora", experts="lora", targets=("attention",))),
    ):
        federation = Federation(olmoe_backbone, method, everybody, tmp_path / method.name)
        state = federation.start()
        for number in (1, 2):
            state = method.aggregate(state, iter(federation.train(state, number)))
        runs.append(state.part("adapter"))
    assert runs[0].keys() == runs[1].keys()
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


@pytest.mark.long
def test_the_losses_even_out_the_routing(tmp_path: Path) -> None:
    """The experts' shares of a client's tokens are less unequal after training with a strong balance loss."""
    backbone = tiny_backbone("olmoe")
    settings = WHOLE.model_copy(update={"learning_rate": 0.005, "steps": 120, "optimizer": "adam"})
    unevenness = []
    for weight in (0.0, 3.0):
        method = smoe_llb(balance_weight=weight, z_weight=0.0)
        _, sent, *_ = trained(method, backbone, tmp_path / str(weight), settings=settings)
        total = 0.0
        for who, own in zip(CLIENTS, sent, strict=True):
            still = settings.model_copy(update={"learning_rate": 0.0, "steps": 1})
            state = Payload.of({"adapter": own})
            *_, frequencies = trained(method, backbone, tmp_path / f"{weight} {who.name}", state, still)
            total += float(frequencies[who.index].square().sum())
        unevenness.append(total)
    assert unevenness[1] < 0.9 * unevenness[0]


def test_budgets_run_their_active_experts(olmoe_backbone: Backbone) -> None:
    method, model = smoe_llb(), olmoe_backbone.info
    state = method.start(model, [LARGE, MIDDLE, SMALL], torch.Generator().manual_seed(0))
    for budget, active in ((LARGE, 4), (MIDDLE, 2), (SMALL, 1)):
        for model_of in (
            method.deploy(state, model, budget),
            method.personalize(method.excerpt(state, model, client(0, budget)), model, client(0, budget), Payload()),
        ):
            assert (model_of.plan.active_experts, model_of.plan.rank, model_of.plan.lora.scale) == (active, 2, 10.0)
            assert all(model_of.tensors[name] is value for name, value in state.part("adapter").items())
    assert any(".gate.lora_B" in name for name in state.part("adapter"))


def test_bad_input(olmoe_backbone: Backbone, llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="'x' has active_experts 9"):
        smoe_llb().start(olmoe_backbone.info, [LARGE, Budget("x", 9, 2)], torch.Generator())
    with pytest.raises(ModelError, match=r"SMoE-LLB needs a mixture-of-experts model, but tiny llama"):
        smoe_llb().plan(llama_backbone.info, LARGE)
    for option, value in (("balance_weight", -0.1), ("z_weight", -1)):
        with pytest.raises(ConfigError, match=rf"method\.{option}: .*got {value}\.\nIt is: c_"):
            build_method("smoe-llb", {option: value})
