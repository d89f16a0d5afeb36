"""The gate between two frozen models: its loss and gradients against loops, and how it trains."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.methods.pfl_moe import gate
from fedguild.methods.pfl_moe.gate import GateSettings, LogitGates, train_gates
from fedguild.methods.pfl_moe.logit_mixture import BIAS, WEIGHT
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.methods.federation import LARGE, client
from tests.oracles import pfl_moe as oracle
from tests.oracles.lora import MergedModel

PLAN = AdapterPlan((Lora(2, 0.5, ("q_proj", "v_proj")),))
TRAINING = TrainingSettings(batch_size=2, steps=1, max_grad_norm=None)
HOW = GateSettings("hidden", 3.0, 0.1, 0.01)


def rows_of(client: int, lengths: list[int]) -> list[Encoded]:
    return [Encoded(tuple(row), 2 + at % 2) for at, row in enumerate(random_rows(lengths, 40 + client))]


def cohort_of(model: SlotModel, clients: list[int]) -> Cohort:
    work = [LocalWork(client(index, LARGE), [], Payload(), Payload()) for index in clients]
    return Cohort(model, work, TRAINING, round_index=2, seed=3, pad_id=PAD)


def sides(backbone: Backbone, clients: list[int]) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    first, second = ([random_adapter(backbone.info, PLAN, 10 * c + i) for c in clients] for i in (1, 2))
    return first, second


@pytest.mark.parametrize("features", ["hidden", "embedding"])
def test_loss_and_gradients_are_those_of_the_mixture(features: str) -> None:
    """Two clients with rows of other lengths and a third without any, in fp64, at gates off 1/2."""
    backbone = tiny_backbone("llama", dtype=torch.float64)
    first, second = sides(backbone, [0, 1, 2])
    rows = [rows_of(0, [7, 4]), rows_of(1, [6]), []]
    rng = torch.Generator().manual_seed(1)
    start = {
        WEIGHT: torch.randn(3, backbone.info.hidden, generator=rng, dtype=torch.float64) * 0.3,
        BIAS: torch.tensor([0.4, -0.7, 0.1], dtype=torch.float64),
    }
    with SlotModel(backbone, [PLAN] * 3) as model:
        gates = LogitGates(cohort_of(model, [0, 1, 2]), features)  # type: ignore[arg-type]
        for name, tensor in gates.trainables.items():
            tensor.stored.detach().copy_(start[name])
        losses = gates.losses(gates.outputs(collate(rows, PAD), first, second))
        losses.sum().backward()
        found = {name: tensor.stored.grad for name, tensor in gates.trainables.items()}
    plain = tiny_model("llama", dtype=torch.float64)
    for slot in (0, 1):
        leaves = {name: value[slot].clone().requires_grad_() for name, value in start.items()}
        merged = [MergedModel(plain, backbone.info, PLAN, side[slot]) for side in (first, second)]
        alone = oracle.Mixture(plain, *merged, leaves[WEIGHT], leaves[BIAS], features)
        expected = torch.cat([alone.losses(row.input_ids, row.prompt_length) for row in rows[slot]]).mean()
        torch.testing.assert_close(losses[slot], expected, rtol=1e-9, atol=1e-9)
        for name, grad in zip(leaves, torch.autograd.grad(expected, list(leaves.values())), strict=True):
            torch.testing.assert_close(found[name][slot], grad, rtol=1e-7, atol=1e-9)
            assert grad.abs().max() > 1e-4
    assert losses[2] == 0
    assert not found[WEIGHT][2].any()
    assert not found[BIAS][2].any()


@pytest.mark.parametrize("kept_bytes", [gate.KEPT_BYTES, 1000], ids=["kept", "computed in every step"])
def test_training_is_adam_from_one_half(kept_bytes: int) -> None:
    """Batches of 2 and 1 over three epochs, step by step against torch's Adam on the loops, in fp64."""
    backbone = tiny_backbone("llama", dtype=torch.float64)
    first, second = sides(backbone, [0])
    rows = rows_of(0, [7, 4, 5])
    with SlotModel(backbone, [PLAN]) as model:
        cohort, order, passes = cohort_of(model, [0]), [], []
        planned, outputs = gate._batches, LogitGates.outputs

        def noting(*args: Any) -> list[list[int]]:
            batches = planned(*args)
            order.extend([rows[index].input_ids for index in batch] for batch in batches)
            return batches

        def counting(self: LogitGates, batch: SlotBatch, *adapters: Any) -> gate.Outputs:
            passes.append(len(batch.input_ids))
            return outputs(self, batch, *adapters)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(gate, "KEPT_BYTES", kept_bytes)
            patch.setattr(gate, "_batches", noting)
            patch.setattr(LogitGates, "outputs", counting)
            (found,) = train_gates(cohort, [rows], first, second, HOW)
    assert passes == ([2, 1] if kept_bytes > 1000 else [2, *[2, 1] * 3]), "it keeps the first, which is too much"
    assert [len(batch) for batch in order] == [2, 1] * 3
    plain = tiny_model("llama", dtype=torch.float64)
    merged = [MergedModel(plain, backbone.info, PLAN, side[0]) for side in (first, second)]
    weight = torch.zeros(backbone.info.hidden, dtype=torch.float64, requires_grad=True)
    bias = torch.zeros((), dtype=torch.float64, requires_grad=True)
    adam = torch.optim.Adam([weight, bias], lr=0.1, weight_decay=0.01)
    prompts = {row.input_ids: row.prompt_length for row in rows}
    for batch in order:
        alone = oracle.Mixture(plain, *merged, weight, bias, "hidden")
        adam.zero_grad()
        torch.cat([alone.losses(ids, prompts[ids]) for ids in batch]).mean().backward()
        adam.step()
    torch.testing.assert_close(found[WEIGHT], weight.detach(), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found[BIAS], bias.detach(), rtol=1e-6, atol=1e-8)
