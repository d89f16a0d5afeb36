"""Estimates of memory against the most bytes of tensors that are alive in a training on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.data.batches import Encoded
from fedguild.engines import cohorts
from fedguild.engines.cohorts import Trainer
from fedguild.measuring.costs.memory import Memory, largest_cohort, memory
from fedguild.methods import build_method
from fedguild.model import kernels
from fedguild.model.backbone import Backbone
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise
from fedguild.server.method import Roster
from tests.backbones import random_rows, tiny_backbone
from tests.measuring.costs.live_bytes import LiveBytes

DP = DpSgd(clip=0.3, noise_multiplier=0.2, probability=1.0, steps=2, divisor=4.0, noise=Noise(b"key"))
FULL = ("fedavg", {"experts": "full", "gate": "lora"})
LORA = ("fedit", {"rank": 16, "targets": ["attention", "experts"]})
EQUAL, UNEQUAL, SHORT = [[64] * 8] * 4, [[8] * 4, [8] * 8, [8] * 12, [8] * 16], [[8] * 8] * 4
RAGGED = [[512] + [24] * 7] * 2


@pytest.fixture(autouse=True)
def _by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch takes the steps, whatever kernels there are: it needs more."""
    monkeypatch.setattr(kernels, "runs", lambda *_: False)


def backbone_of(dtype: torch.dtype, **changes: Any) -> Backbone:
    return tiny_backbone(
        "olmoe",
        dtype=dtype,
        hidden_size=128,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=4,
        **{"max_position_embeddings": 512, **changes},
    )


def estimated_and_measured(
    backbone: Backbone,
    named: tuple[str, dict[str, object]],
    lengths: Sequence[Sequence[int]],
    settings: TrainingSettings,
    monkeypatch: pytest.MonkeyPatch,
    *,
    private: bool = False,
) -> tuple[Memory, int]:
    """Returns the estimate for a cohort, without weights, and the peak of its training."""
    method = build_method(*named)
    clients = [ClientInfo(index, Budget("all", 4, 16), len(own)) for index, own in enumerate(lengths)]
    state = method.start(backbone.info, Roster([client.budget for client in clients]), torch_rng(0, "start"))
    work = [
        LocalWork(
            client,
            [Encoded(tuple(ids), 1) for ids in random_rows(own, client.index)],
            method.download(state, backbone.info, client),
            Payload(),
        )
        for client, own in zip(clients, lengths, strict=True)
    ]
    trainer = Trainer(backbone, settings, seed=1, private=(lambda *_: DP) if private else None)
    plans = [method.plan(backbone.info, client.budget) for client in clients]
    asked: list[Memory] = []

    def estimate(model, plan, tokens, count, free, **how):
        asked.append(memory(model, plan, tokens, slots=count, **how))
        return largest_cohort(model, plan, tokens, count, free, **how)

    monkeypatch.setattr(cohorts, "largest_cohort", estimate)
    trainer.cohort_size(plans, lengths, 2**40, 1)
    with LiveBytes() as live:
        trainer.train(method, plans, work, 1)
    return asked[0], live.peak


@pytest.mark.parametrize(
    ("dtype", "named", "lengths", "settings"),
    [
        (torch.float32, FULL, EQUAL, {}),
        (torch.float32, FULL, UNEQUAL, {}),
        (torch.bfloat16, FULL, SHORT, {"gradient_accumulation_steps": 2}),
        (torch.float32, LORA, RAGGED, {"batch_size": 8}),
    ],
    ids=["dense changes", "at rates of their own", "in bf16 and accumulated", "packed"],
)
def test_a_cohort_holds_what_is_estimated(dtype, named, lengths, settings, monkeypatch):
    given = {"batch_size": 2, "epochs": 1, "lr_scheduler": "linear", "max_grad_norm": 1.0, **settings}
    backbone = backbone_of(dtype)
    estimate, peak = estimated_and_measured(backbone, named, lengths, TrainingSettings(**given), monkeypatch)
    assert 0.7 < peak / estimate.cohort_bytes < 1.1
    if named is FULL and lengths is not EQUAL:
        assert peak > estimate.cohort_bytes - estimate.scratch_bytes


def test_dp_sgd_holds_what_is_estimated(monkeypatch):
    settings = TrainingSettings(batch_size=4, epochs=1, max_grad_norm=None)
    backbone = backbone_of(torch.float32)
    estimate, peak = estimated_and_measured(backbone, FULL, [[24] * 4] * 2, settings, monkeypatch, private=True)
    assert 0.75 < peak / estimate.cohort_bytes < 1.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_eager_attention_holds_what_is_estimated(dtype, checkpointing, monkeypatch):
    settings = TrainingSettings(batch_size=2, epochs=1, max_grad_norm=None)
    backbone = backbone_of(
        dtype, attn_implementation="eager", num_hidden_layers=4, gradient_checkpointing=checkpointing
    )
    estimate, peak = estimated_and_measured(backbone, LORA, [[512] * 2], settings, monkeypatch)
    assert 0.75 < peak / estimate.cohort_bytes < 1.1
