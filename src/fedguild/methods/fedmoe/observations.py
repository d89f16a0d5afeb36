"""Figures of FedMoE's report: the clients' sub-MoEs, their validation, and the clients whose sets are settled."""

from __future__ import annotations

import torch

from fedguild.core.layout import client_name
from fedguild.methods.fedmoe.sub_moes import FROZEN, SubMoes
from fedguild.model.info import ModelInfo
from fedguild.server.method import Observation


def observations(sub_moes: SubMoes, model: ModelInfo) -> list[Observation]:
    """Returns each client's number of experts, their size, its validation, and the number of settled clients."""
    counts = sub_moes.counts()
    clients = [client_name(index) for index in range(len(counts))]
    sizes = torch.tensor([float(layer.expert_parameters) for layer in model.moe])
    layers = [f"layer {index}" for index in range(len(model.moe))]
    return [
        Observation("held experts", counts.float(), clients, layers),
        Observation("held expert parameters", counts.float() @ sizes / 1e6, clients, unit="million"),
        Observation("validation accuracy", sub_moes.accuracy, clients),
        Observation("clients whose experts are settled", (sub_moes.status == FROZEN).sum()[None].float(), ["clients"]),
    ]
