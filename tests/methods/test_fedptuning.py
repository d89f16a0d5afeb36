"""FedPTuning: the mean of embedding and MLP, the prompt that is deployed, FedPTuning-FT, and what travels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.core.accounting import bytes_by_part
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.data.batches import collate
from fedguild.methods import build_method
from fedguild.methods.fedptuning import FedPTuning, FedPTuningSettings
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.validation import check_upload
from tests.backbones import PAD
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.methods.llama import llama_1b
from tests.oracles import soft_prompt as oracle
from tests.oracles.aggregation import weighted_mean

EMBEDDING = "prompt_encoder.embedding"


def fedptuning(**options: object) -> FedPTuning:
    return FedPTuning(FedPTuningSettings(**{"tokens": 3, "width": 5, **options}))


def prompt_of(tensors: dict[str, Tensor]) -> Tensor:
    """MLP(E) by the equation."""
    layers = [
        (tensors[f"prompt_encoder.layers.{k}.weight"], tensors[f"prompt_encoder.layers.{k}.bias"]) for k in range(3)
    ]
    return oracle.encode(tensors[EMBEDDING], layers)


def test_two_clients_by_hand() -> None:
    """With n_v = d = w = 1, E = 2 and 4, every weight 1 and 3, every bias 0: E = 3, weights 2, P = 2 · 2 · 2 · 3 = 24.

    The mean of the clients' own prompts, (1 · 2 + 27 · 4) / 2 = 55, is something else.
    """

    def encoder(embedding: float, weight: float) -> dict[str, Tensor]:
        tensors = {EMBEDDING: torch.tensor([[embedding]])}
        for layer in range(3):
            tensors[f"prompt_encoder.layers.{layer}.weight"] = torch.tensor([[weight]])
            tensors[f"prompt_encoder.layers.{layer}.bias"] = torch.zeros(1)
        return tensors

    method = fedptuning(tokens=1, width=1)
    sent = [upload(client(0, LARGE, 10), adapter=encoder(2, 1)), upload(client(1, LARGE, 30), adapter=encoder(4, 3))]
    state = method.aggregate(Payload.of({"adapter": encoder(0, 0)}), iter(sent))
    assert state.part("adapter")[EMBEDDING].item() == 3.0
    assert method.deploy(state, llama_1b(), LARGE).tensors["soft_prompt"].item() == 24.0


@pytest.mark.parametrize("clients", [1, 2, 5])
def test_aggregation(clients: int, llama_backbone: Backbone) -> None:
    method, model = fedptuning(), llama_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    sent = [upload(client(i, LARGE, 2 + 3 * i), adapter=random_tensors(model, plan, i)) for i in range(clients)]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    for name, kept in before.items():
        values = [part.payload.tensors[f"adapter/{name}"] for part in sent]
        expected = weighted_mean(values, [torch.tensor(1.0)] * clients, kept)
        torch.testing.assert_close(found[name], expected, rtol=1e-5, atol=1e-6)


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
        check_upload(part.payload, method.expected_upload(federation.model, part.client, Payload()), client="c")
        assert all(
            not torch.equal(part.payload.tensors[f"adapter/{name}"], old) for name, old in start.part("adapter").items()
        )
    state = method.aggregate(start, sent)
    assert olmoe_backbone.fingerprint() == fingerprint
    assert len(list(tmp_path.rglob("*.memory"))) == 2 * personal
    down = method.download(state, federation.model, clients[0])
    assert all(torch.equal(down.part("adapter")[name], value) for name, value in state.part("adapter").items())
    for who in clients:
        own = method.personalize(state, federation.model, who, federation.memory.load(who.name, 2))
        trained = personal and who.index < 2
        source = sent[who.index].payload.part("adapter") if trained else state.part("adapter")
        torch.testing.assert_close(own.tensors["soft_prompt"], prompt_of(source), rtol=1e-5, atol=1e-5)
    alone = federation.train(start, who=(1,))[0].payload
    for name, value in sent[1].payload.part("adapter").items():
        torch.testing.assert_close(alone.part("adapter")[name], value, rtol=1e-3, atol=1e-4)


def test_the_traffic_of_a_round_on_llama() -> None:
    """E and MLP are 5,287,936 values; FedAMoLE's 0.16 MB (Table 4) is the prompt alone, 20 · 2048 in fp32."""
    method, model = FedPTuning(FedPTuningSettings()), llama_1b()
    shapes = method.expected_upload(model, client(0, LARGE), Payload())
    sent = Payload({name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    layers = (2048 * 1024 + 1024) + (1024 * 1024 + 1024) + (1024 * 2048 + 2048)
    assert bytes_by_part(sent)["adapter"] == 4 * (20 * 2048 + layers) == 4 * 5_287_936
    assert round(20 * 2048 * 4 / 2**20, 2) == 0.16


@pytest.mark.parametrize("option", ["tokens", "width"])
def test_options_out_of_range(option: str) -> None:
    with pytest.raises(ConfigError, match=rf"method\.{option}: .*greater than or equal to 1, got 0"):
        build_method("fedptuning", {option: 0})
