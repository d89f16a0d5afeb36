"""A3SMoE: its average against the equation; test_equalities.py has it beside FLAME."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedguild.core.payload import Payload
from fedguild.methods.a3smoe import A3Smoe, A3SmoeSettings
from fedguild.model.backbone import Backbone
from fedguild.server.method import Upload
from tests.methods.federation import LARGE, client, random_tensors, upload
from tests.oracles import flame as oracle
from tests.oracles.aggregation import weighted_mean

EVERYTHING = ("attention", "router", "experts")
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]


def a3smoe(**options: object) -> A3Smoe:
    return A3Smoe(A3SmoeSettings(**{"rank": 2, **options}))


def sent_by(index: int, examples: int, adapter: dict[str, Tensor], frequency: Tensor) -> Upload:
    """An upload with a_c / n_c [L, M]."""
    return upload(client(index, LARGE, examples), adapter=adapter, routing=dict(zip(PATHS, frequency, strict=False)))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_aggregation(count: int, olmoe_backbone: Backbone) -> None:
    method, model = a3smoe(targets=EVERYTHING), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    frequencies = [oracle.random_frequency(2, 8, seed=index) for index in range(count)]
    sent = [sent_by(i, 3 + 5 * i, random_tensors(model, plan, i), f) for i, f in enumerate(frequencies)]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    sizes = [float(part.client.examples) for part in sent]
    for name, value in before.items():
        values, layer = [part.payload.tensors[f"adapter/{name}"] for part in sent], int(name.split(".")[2])
        if ".experts." in name:
            weights = [
                [share * size for share in f[layer].tolist()] for f, size in zip(frequencies, sizes, strict=True)
            ]
            expected = oracle.mean_of_experts(values, weights, value)
        else:
            expected = weighted_mean(values, [torch.tensor(size) for size in sizes], value)
        torch.testing.assert_close(found[name].double(), expected.double(), rtol=1e-5, atol=1e-6)
