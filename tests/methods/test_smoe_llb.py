"""SMoE-LLB: what a client minimises, against gradients of a slow loss; what is averaged; what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.observing import observing
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.data.batches import collate
from fedguild.methods.smoe_llb import SmoeLlb, SmoeLlbSettings
from fedguild.model.moe.view import Routing
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors
from tests.oracles import smoe_llb as oracle

WHOLE = TrainingSettings(optimizer="sgd", learning_rate=0.5, batch_size=8, steps=1, max_grad_norm=None)
"""One step over all of a client's examples."""
CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3)]


def smoe_llb(**options: object) -> SmoeLlb:
    return SmoeLlb(SmoeLlbSettings(**{"rank": 2, **options}))


@pytest.mark.parametrize("weights", [(0.3, 0.0), (0.0, 0.05), (0.3, 0.05)], ids=str)
@pytest.mark.parametrize("family", ["olmoe", "mixtral"])
def test_a_step_follows_the_slow_loss(family: str, weights: tuple[float, float], tmp_path: Path) -> None:
    """Three clients in a padded pass, in fp64: each moves by the gradient of its own loss, computed alone, slowly."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    method = smoe_llb(balance_weight=weights[0], z_weight=weights[1])
    start = Payload.of({"adapter": random_tensors(backbone.info, method.plan(backbone.info, LARGE), 7)})
    start = Payload.of({"adapter": {name: 0.3 * value.double() for name, value in start.part("adapter").items()}})
    federation = Federation(backbone, method, CLIENTS, tmp_path)
    for sent in federation.train(start, settings=WHOLE):
        who, own = sent.client, sent.payload.part("adapter")
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
