"""The gradients of frozen weights and their sketches, against a plain model whose weights take gradients."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded
from fedguild.methods.fed_sb.gradient import full_weight_plan, mean_gradients
from fedguild.methods.fed_sb.sketch import probes, rows_of_psi, sketch_of, sketch_plan, sketching_factors
from fedguild.model.adapters.lora import Lora
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.model.targets import targeted_shapes
from tests.backbones import random_rows, tiny_backbone
from tests.client.clients import Client, make_cohort
from tests.methods.federation import LARGE, client

TARGETS = {"olmoe": ("attention", "router", "experts"), "llama": ("attention", "mlp")}
SETTINGS = TrainingSettings(optimizer="adam", batch_size=2, gradient_accumulation_steps=2, epochs=1, max_grad_norm=None)
SIZE = 3


def clients(plan: AdapterPlan) -> list[Client]:
    """Two clients with other numbers of examples and of active experts."""
    found = []
    for index, (count, active) in enumerate([(4, 2), (11, 1)]):
        rows = [Encoded(tuple(ids), 2) for ids in random_rows([4 + (index + i) % 5 for i in range(count)], index)]
        own = replace(plan, active_experts=active if "experts" in plan.lora.targets else None)
        found.append(Client(client(index, LARGE, count), own, tuple(rows), {}))
    return found


def gradients(family: str, sample: float, sketched: bool, who: slice = slice(None)):
    """Each client's gradients, or sketches, and how many steps they are of; fp64."""
    backbone = tiny_backbone(family, dtype=torch.float64)
    members = clients(AdapterPlan((Lora(2, 1.0, TARGETS[family]),)))[who]
    plans = [sketch_plan(each.plan, SIZE) if sketched else full_weight_plan(each.plan) for each in members]
    with SlotModel(backbone, plans) as model:
        before = {name: tensor.stored.detach().clone() for name, tensor in model.trainables.items()}
        cohort = make_cohort(model, members, SETTINGS)
        if sketched:
            for slot, each in enumerate(members):
                cohort.load(slot, sketching_factors(targeted_shapes(backbone.info, each.plan.lora.targets), 9, SIZE))
            before = {name: tensor.stored.detach().clone() for name, tensor in model.trainables.items()}
        found = mean_gradients(cohort, sample)
        assert all(torch.equal(tensor.stored, before[name]) for name, tensor in model.trainables.items())
        return found, [report.steps for report in cohort.reports]


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("sample", [0.001, 0.5, 1.0])
def test_sketches_are_those_of_the_gradients(family, sample):
    """G Omega and Psi G, the mean over as many steps as a part of the examples makes."""
    whole, steps = gradients(family, sample, sketched=False)
    found, again = gradients(family, sample, sketched=True)
    assert steps == again == {0.001: [1, 1], 0.5: [1, 2], 1.0: [1, 3]}[sample]
    shapes = targeted_shapes(tiny_backbone(family).info, TARGETS[family])
    for own, dense in zip(found, whole, strict=True):
        sketch = sketch_of(own, SIZE)
        assert len(sketch) == 2 * len(shapes)
        for module, shape in shapes.items():
            omega, psi = probes(9, module, *shape[-2:], SIZE)
            gradient = dense[f"{module}.delta"]
            limit = 1e-4 * float(gradient.abs().max() + 1)
            assert gradient.any()
            torch.testing.assert_close(sketch[f"{module}.lora_B"], gradient @ omega, rtol=1e-4, atol=limit)
            torch.testing.assert_close(sketch[f"{module}.lora_A"], psi @ gradient, rtol=1e-4, atol=limit)


def test_probes_are_signs_of_their_module():
    omega, psi = probes(3, "layer.q_proj", 5, 7, 2)
    assert omega.shape == (7, 2)
    assert psi.shape == (rows_of_psi(2), 5)
    assert {*omega.flatten().tolist(), *psi.flatten().tolist()} == {-1.0, 1.0}
    assert torch.equal(probes(3, "layer.q_proj", 5, 7, 2)[0], omega)
    assert not torch.equal(probes(3, "layer.k_proj", 5, 7, 2)[0], omega)
