"""The validation of a FedMoE client on its held-out examples, against a plain model, example by example."""

from __future__ import annotations

import pytest
import torch

from fedguild.client.cohort import Cohort, LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded
from fedguild.methods.fedmoe.validation import validate
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from tests.backbones import PAD, random_adapter, random_rows, tiny_backbone, tiny_model
from tests.methods.federation import LARGE, client
from tests.oracles.lora import MergedModel

PLAN = AdapterPlan((Lora(2, 0.5, ("attention",)),))


def cohort_of(model: SlotModel, clients: int) -> Cohort:
    work = [LocalWork(client(index, LARGE), [], Payload(), Payload()) for index in range(clients)]
    return Cohort(
        model, work, TrainingSettings(batch_size=2, steps=1, max_grad_norm=None), round_index=1, seed=3, pad_id=PAD
    )


def test_loss_accuracy_and_activations() -> None:
    """Three clients with 3, 1 and no examples in batches of 2; every fourth token is the likeliest one."""
    backbone = tiny_backbone("olmoe", dtype=torch.float64)
    adapters = [random_adapter(backbone.info, PLAN, seed) for seed in range(3)]
    plain = tiny_model("olmoe", dtype=torch.float64)
    merged = [MergedModel(plain, backbone.info, PLAN, adapter) for adapter in adapters]
    examples = []
    for slot, lengths in enumerate(([8, 5, 6], [7], [])):
        rows = random_rows(lengths, 20 + slot)
        for row in rows:
            for at in range(4, len(row), 3):
                row[at] = int(merged[slot].logits(row[:at])[-1].argmax())
        examples.append([Encoded(tuple(row), 2) for row in rows])
    with SlotModel(backbone, [PLAN] * 3) as model:
        for slot, adapter in enumerate(adapters):
            model.load(slot, adapter)
        found = validate(cohort_of(model, 3), examples)
        assert backbone.runtime.statistics is None
    for slot in (0, 1):
        losses = torch.cat([merged[slot].losses(row.input_ids, 2) for row in examples[slot]])
        right = [
            int(merged[slot].logits(row.input_ids)[at - 1].argmax()) == row.input_ids[at]
            for row in examples[slot]
            for at in range(2, len(row.input_ids))
        ]
        assert found[slot].loss == pytest.approx(float(losses.mean()), rel=1e-9)
        assert found[slot].accuracy == pytest.approx(sum(right) / len(right), rel=1e-12)
        assert 0 < sum(right) < len(right)
    assert (found[2].loss, found[2].accuracy) == (0.0, 0.0)
    assert not any(p.any() for p in found[2].activation.values())


def test_p_is_a_share_of_all_activations(olmoe_backbone: Backbone) -> None:
    """Counted by the routers' own choices, one row at a time."""
    rows = [Encoded(tuple(row), 2) for row in random_rows([8, 5, 6], 7)]
    with SlotModel(olmoe_backbone, [PLAN]) as model:
        (found,) = validate(cohort_of(model, 1), [rows])
    counts = {layer.info.experts: [0] * 8 for layer in olmoe_backbone.moe}
    plain = tiny_model("olmoe")
    for row in rows:
        with torch.no_grad():
            out = plain(input_ids=torch.tensor([row.input_ids]), output_router_logits=True)
        for name, logits in zip(counts, out.router_logits, strict=True):
            for token in logits:
                for expert in token.topk(4).indices.tolist():
                    counts[name][expert] += 1
    for name, own in counts.items():
        expected = torch.tensor(own) / (4 * sum(len(row.input_ids) for row in rows))
        torch.testing.assert_close(found.activation[name], expected)
        assert float(found.activation[name].sum()) == pytest.approx(1.0)
