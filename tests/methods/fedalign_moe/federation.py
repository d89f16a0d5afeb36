"""Clients of FedAlign-MoE and rounds of random uploads."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.methods.fedalign_moe import FedAlignMoe, FedAlignMoeSettings
from fedguild.model.backbone import Backbone
from fedguild.server.method import Upload
from tests.methods.federation import LARGE, Federation, client, random_tensors, upload

LAYERS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
GATES = [f"model.layers.{layer}.mlp.gate.delta" for layer in (0, 1)]
EXPERTS, HIDDEN = 8, 16


def fedalign(**options: object) -> FedAlignMoe:
    return FedAlignMoe(FedAlignMoeSettings(**{"rank": 2, **options}))


def federation_of(backbone: Backbone, folder: Path, clients: int = 3, **options: object) -> Federation:
    return Federation(backbone, fedalign(**options), [client(i, LARGE, 3 + i) for i in range(clients)], folder)


def own_experts(state: Payload, layer: str) -> dict[str, Tensor]:
    """A layer's trainables of its experts."""
    return {name: value for name, value in state.part("experts").items() if name.startswith(layer)}


def vector(tensors: dict[str, Tensor], expert: int) -> Tensor:
    """One expert's parameters in one row, by name."""
    return torch.cat([tensors[name][expert].flatten() for name in sorted(tensors)])


def random_round(
    method: FedAlignMoe, backbone: Backbone, clients: int, awkward: bool = True
) -> tuple[Payload, list[Upload]]:
    """A random global state and random uploads.

    Awkward: nobody activated expert 2; client 0 had no token in layer 1 and an update of zeros for expert 3;
    all margins of expert 4 are zero; only the last client activated expert 5; nothing chose expert 6's region.
    """
    model, plan = backbone.info, method.plan(backbone.info, LARGE)
    rng = torch.Generator().manual_seed(5)
    trained = random_tensors(model, plan, 99)
    experts = {name: value for name, value in trained.items() if ".experts." in name}
    state = Payload(upload(client(0, LARGE), experts=experts).payload.tensors)
    uploads = []
    for index in range(clients):
        routing, margin, regions, updates = {}, {}, {}, {}
        for layer in LAYERS:
            size = sum(value[0].numel() for name, value in experts.items() if name.startswith(layer))
            routing[layer] = (torch.randn(EXPERTS, generator=rng) * 2).softmax(-1)
            margin[layer] = torch.rand(EXPERTS, generator=rng) * 0.3
            chosen = set(range(EXPERTS))
            if awkward:
                margin[layer][4] = 0.0
                chosen -= {2} if index == clients - 1 else {2, 5}
                if index == 0 and layer == LAYERS[1]:
                    routing[layer], margin[layer], chosen = torch.zeros(EXPERTS), torch.zeros(EXPERTS), set()
            for expert in sorted(chosen):
                updates[f"{layer}/{expert}"] = torch.randn(size, generator=rng)
                regions[f"{layer}/{expert}"] = torch.randn(HIDDEN, generator=rng)
                if awkward and (index, expert) == (0, 3):
                    updates[f"{layer}/{expert}"].zero_()
                if awkward and expert == 6:
                    regions[f"{layer}/{expert}"].zero_()
        who = client(index, LARGE, 3 + 5 * index)
        uploads.append(upload(who, routing=routing, margin=margin, region=regions, update=updates))
    return state, uploads
