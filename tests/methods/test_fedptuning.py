"""FedPTuning: the mean of embedding and MLP, the prompt that is deployed, FedPTuning-FT, and what travels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.data.batches import collate
from fedguild.methods.fedptuning import FedPTuning, FedPTuningSettings
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.method import client_model
from fedguild.server.validation import check_upload
from tests.backbones import PAD
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors
from tests.oracles import soft_prompt as oracle

EMBEDDING = "prompt_encoder.embedding"


def fedptuning(**options: object) -> FedPTuning:
    return FedPTuning(FedPTuningSettings(**{"tokens": 3, "width": 5, **options}))


def prompt_of(tensors: dict[str, Tensor]) -> Tensor:
    """MLP(E) by the equation."""
    layers = [
        (tensors[f"prompt_encoder.layers.{k}.weight"], tensors[f"prompt_encoder.layers.{k}.bias"]) for k in range(3)
    ]
    return oracle.encode(tensors[EMBEDDING], layers)


def test_the_mlp_is_dropped_at_inference(olmoe_backbone: Backbone) -> None:
    """The deployed prompt alone gives the losses that embedding and MLP give."""
    method, model = fedptuning(), olmoe_backbone.info
    state = Payload.of({"adapter": random_tensors(model, method.plan(model, LARGE), 3)})
    deployment = method.deploy(state, model, SMALL)
    assert deployment.tensors.keys() == {"soft_prompt"}
    torch.testing.assert_close(
        deployment.tensors["soft_prompt"], prompt_of(state.part("adapter")), rtol=1e-5, atol=1e-5
    )
    losses = []
    rows = Federation(olmoe_backbone, method, [client(0, LARGE)], Path()).examples[0]
    for plan, tensors in (
        (method.plan(model, LARGE), state.part("adapter")),
        (deployment.plan, deployment.tensors),
    ):
        with SlotModel(olmoe_backbone, [plan]) as slots:
            slots.load(0, tensors)
            losses.append(slots.token_losses(collate([rows], PAD)).detach())
    torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("personal", [False, True])
def test_rounds(personal: bool, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    clients = [client(0, LARGE, 4), client(1, SMALL, 3), client(2, MIDDLE, 5)]
    federation = Federation(olmoe_backbone, fedptuning(personal=personal), clients, tmp_path)
    method, start, fingerprint = federation.method, federation.start(), olmoe_backbone.fingerprint()
    sent = federation.train(start, who=(0, 1))
    for part in sent:
        check_upload(part.payload, method.schema(federation.model, part.client, Payload()))
        assert all(
            not torch.equal(part.payload.tensors[f"adapter/{name}"], old) for name, old in start.part("adapter").items()
        )
    state = method.aggregate(start, sent)
    assert olmoe_backbone.fingerprint() == fingerprint
    assert len(list(tmp_path.rglob("*.memory"))) == 2 * personal
    down = method.download(state, federation.model, clients[0])
    assert all(torch.equal(down.part("adapter")[name], value) for name, value in state.part("adapter").items())
    for who in clients:
        own = client_model(method, state, federation.model, who, federation.memory.load(who.name, 2))
        trained = personal and who.index < 2
        source = sent[who.index].payload.part("adapter") if trained else state.part("adapter")
        torch.testing.assert_close(own.tensors["soft_prompt"], prompt_of(source), rtol=1e-5, atol=1e-5)
    alone = federation.train(start, who=(1,))[0].payload
    for name, value in sent[1].payload.part("adapter").items():
        torch.testing.assert_close(alone.part("adapter")[name], value, rtol=1e-3, atol=1e-4)
