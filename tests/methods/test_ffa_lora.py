"""FFA-LoRA: one A for all that never travels, and an average that is exact."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.methods import build_method
from fedguild.methods.ffa_lora import FFALoRA, shared_factors
from fedguild.model.adapters.lora import kaiming_uniform
from fedguild.server.method import Roster
from tests.methods.federation import LARGE, client, upload
from tests.oracles.ffa_lora import dense_mean

TARGETS = ["attention", "router", "experts"]


def ffa(**options) -> FFALoRA:
    method = build_method("ffa-lora", {"rank": 2, "targets": TARGETS, **options})
    assert isinstance(method, FFALoRA)
    return method


def started(method: FFALoRA, model) -> Payload:
    return method.start(model, Roster([LARGE]), torch_rng(0, "start"))


def random_ups(state: Payload, seed: int) -> dict[str, torch.Tensor]:
    rng = torch_rng(seed, "B")
    return {name: torch.randn(value.shape, generator=rng) for name, value in state.part("adapter").items()}


# Line 1


def test_a_client_draws_the_servers_a_bit_by_bit(olmoe_backbone):
    """From the number in the download, after the wire; each module's own, whatever else is adapted."""
    method, model = ffa(), olmoe_backbone.info
    state = started(method, model)
    sent = method.download(state, model, client(0, LARGE))
    travelled = Payload(*unpack(pack(sent.tensors, sent.scalars)))
    assert not any("lora_A" in name for name in travelled.tensors)
    plan = method.plan(model, LARGE)
    mine = shared_factors(model, plan, int(travelled.scalars["seed"]))
    theirs = method.deploy(state, model, LARGE).tensors
    fewer = shared_factors(model, ffa(targets=["v_proj"]).plan(model, LARGE), int(travelled.scalars["seed"]))
    assert set(fewer) < set(mine)
    for name, value in {**mine, **fewer}.items():
        assert torch.equal(theirs[name], value)
    values = list(mine.values())
    assert not torch.equal(values[0], values[1])
    name = "model.layers.0.self_attn.q_proj.lora_A"
    assert torch.equal(mine[name], kaiming_uniform((2, 16), torch_rng(int(sent.scalars["seed"]), "shared A", name)))


def test_runs_of_other_seeds_have_another_a(olmoe_backbone):
    method, model = ffa(), olmoe_backbone.info
    seeds = [method.start(model, Roster([LARGE]), torch_rng(seed, "start")).scalars["seed"] for seed in (0, 1)]
    assert seeds[0] != seeds[1]


# Line 5


@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_the_aggregate_is_the_mean_of_the_dense_updates(weights, olmoe_backbone):
    """Of linear layers, routers and every expert: mean_c(B_c A) = (mean_c B_c) A."""
    method, model = ffa(weights=weights), olmoe_backbone.info
    state, examples = started(method, model), (2, 7, 4)
    trained = [random_ups(state, index) for index in range(3)]
    sent = [upload(client(i, LARGE, n), adapter=own) for i, (n, own) in enumerate(zip(examples, trained, strict=True))]
    found = method.deploy(method.aggregate(state, iter(sent)), model, LARGE).tensors
    shares = [float(n) if weights == "size" else 1.0 for n in examples]
    for name in state.part("adapter"):
        up, down = found[name], found[name.replace("lora_B", "lora_A")]
        for expert in range(up.shape[0]) if up.dim() == 3 else (...,):
            expected = dense_mean([own[name][expert] for own in trained], down[expert], shares)
            product = up[expert].double() @ down[expert].double()
            torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-6)
