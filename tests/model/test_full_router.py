"""The router trained in full, against routers whose weights were changed in place."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded, collate
from fedguild.model.adapters.full_router import FullRouter
from fedguild.model.plan import AdapterPlan, trainable_shapes
from fedguild.model.slots import SlotModel
from tests.backbones import END, PAD, random_rows, tiny_backbone, tiny_model

PLAN = AdapterPlan((FullRouter(),))
ROUTED = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2 greedy", "deepseek_v3", "switch")


def random_deltas(info, seed: int) -> dict[str, torch.Tensor]:
    rng = torch_rng(seed, "deltas")
    return {name: torch.randn(shape, generator=rng) for name, shape in trainable_shapes(info, PLAN).items()}


def encoded(lengths: list[int], seed: int) -> list[Encoded]:
    return [Encoded(tuple(row), 1) for row in random_rows(lengths, seed)]


@pytest.mark.parametrize("family", ROUTED)
@pytest.mark.parametrize("counts", [(2, 2), (1, 3)])
def test_a_slots_model_is_one_with_other_routers(family, counts):
    backbone = tiny_backbone(family)
    seq2seq = backbone.info.seq2seq
    rows = [encoded([5 + i for i in range(count)], seed) for seed, count in enumerate(counts)]
    deltas = [random_deltas(backbone.info, seed) for seed in range(len(counts))]
    with SlotModel(backbone, [PLAN] * len(counts)) as model:
        for slot, own in enumerate(deltas):
            model.load(slot, own)
        with torch.no_grad():
            found = model.token_losses(collate(rows, PAD, seq2seq)).split(
                [sum(len(row.input_ids) - 1 for row in own) for own in rows]
            )
    for own, delta, losses in zip(rows, deltas, found, strict=True):
        plain = tiny_model(family)
        for name, change in delta.items():
            plain.get_submodule(name.removesuffix(".delta")).weight.data += change
        for row, part in zip(own, losses.split([len(row.input_ids) - 1 for row in own]), strict=True):
            ids = torch.tensor([row.input_ids])
            if seq2seq is None:
                logits = plain(ids).logits[0, :-1]
            else:
                source, decoded = torch.tensor([[*row.input_ids[:1], END]]), torch.tensor([[PAD, *row.input_ids[1:-1]]])
                logits = plain(source, decoder_input_ids=decoded).logits[0]
            torch.testing.assert_close(part, torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="none"))
