"""A3SMoE: its average by hand, FLAME under the settings at which both are one, and the edges."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.core.accounting import bytes_by_part
from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.payload import ROUTING, Payload
from fedguild.methods import build_method
from fedguild.methods.a3smoe import A3Smoe, A3SmoeSettings
from fedguild.methods.flame import Flame, FlameSettings
from fedguild.model.adapters.output_scale import OutputScale
from fedguild.model.backbone import Backbone
from fedguild.model.info import LinearInfo, ModelInfo, MoeInfo
from fedguild.server.aggregation import activation_weights, weights_by_name
from fedguild.server.method import Upload
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles import flame as oracle
from tests.oracles.aggregation import weighted_mean

EVERYTHING = ("attention", "router", "experts")
PATHS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]


def a3smoe(**options: object) -> A3Smoe:
    return A3Smoe(A3SmoeSettings(**{"rank": 2, **options}))


def sent_by(index: int, examples: int, adapter: dict[str, Tensor], frequency: Tensor) -> Upload:
    """An upload with a_c / n_c [L, M]."""
    return upload(client(index, LARGE, examples), adapter=adapter, routing=dict(zip(PATHS, frequency, strict=False)))


def test_two_clients_by_hand() -> None:
    """n = 10 and 30, f = (1/2, 1, 0) and (1/2, 1/3, 0): weights (5, 10, 0) and (15, 10, 0).

    Experts (4, 8, 1) and (8, 1, 2): (5 · 4 + 15 · 8) / 20 = 7, (10 · 8 + 10 · 1) / 20 = 4.5, and the third stays.
    Attention, 2 and 6: (10 · 2 + 30 · 6) / 40 = 5.
    """
    expert, query = f"{PATHS[0]}.up_proj.lora_A", "model.layers.0.self_attn.q_proj.lora_A"
    sent = [
        sent_by(
            index,
            examples,
            {expert: torch.tensor(values).view(3, 1, 1), query: torch.tensor([[attention]])},
            torch.tensor([frequency]),
        )
        for index, examples, values, attention, frequency in (
            (0, 10, [4.0, 8.0, 1.0], 2.0, [0.5, 1.0, 0.0]),
            (1, 30, [8.0, 1.0, 2.0], 6.0, [0.5, 1 / 3, 0.0]),
        )
    ]
    before = Payload.of({"adapter": {expert: torch.full((3, 1, 1), -3.0), query: torch.zeros(1, 1)}})
    found = a3smoe().aggregate(before, iter(sent)).part("adapter")
    torch.testing.assert_close(found[expert].flatten(), torch.tensor([7.0, 4.5, -3.0]))
    torch.testing.assert_close(found[query], torch.tensor([[5.0]]))


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


@pytest.mark.parametrize("targets", [("attention", "experts"), EVERYTHING], ids=len)
def test_it_is_flame_without_rescaler_at_temperature_one(
    targets: tuple[str, ...], olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Bit by bit: uploads, and the global model after two rounds of clients with 4, 1 and 2 active experts."""
    flame = FlameSettings(rank=2, alpha=20.0, targets=targets, rescaler="none", temperature=1.0)
    runs: list[tuple[list[Upload], dict[str, Tensor]]] = []
    for method in (a3smoe(targets=targets), Flame(flame)):
        who = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, MIDDLE, 3)]
        federation = Federation(olmoe_backbone, method, who, tmp_path / method.name)
        state = federation.start()
        for number in (1, 2):
            uploads = federation.train(state, number)
            state = method.aggregate(state, iter(uploads))
        adapter = state.part("adapter")
        runs.append((uploads, adapter))
    for ours, theirs in zip(runs[0][0], runs[1][0], strict=True):
        assert ours.payload.tensors.keys() == theirs.payload.tensors.keys()
        assert all(torch.equal(ours.payload.tensors[name], value) for name, value in theirs.payload.tensors.items())
        assert ours.payload.part(ROUTING).keys() == set(PATHS)
    assert runs[0][1].keys() == runs[1][1].keys()
    assert all(torch.equal(runs[0][1][name], value) for name, value in runs[1][1].items())


def test_an_expert_that_nobody_activated_keeps_its_global_value(olmoe_backbone: Backbone) -> None:
    """Nor does a client without examples count."""
    method, model = a3smoe(), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    quiet = torch.ones(2, 8)
    quiet[1, 6] = 0.0
    sent = [sent_by(i, n, random_tensors(model, plan, i), quiet) for i, n in enumerate((5, 0, 2))]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    without = method.aggregate(Payload.of({"adapter": before}), iter([sent[0], sent[2]])).part("adapter")
    for name, value in before.items():
        assert torch.equal(found[name], without[name])
        if ".experts." in name:
            same = [expert for expert in range(8) if torch.equal(found[name][expert], value[expert])]
            assert same == ([6] if ".layers.1." in name else [])


def test_the_weights_of_experts_and_of_the_rest() -> None:
    """gamma = (a / S)^t |D|: .5^2 · 8 = 2; 0^0 = 1. A name outside these experts has the size."""
    gamma = activation_weights({PATHS[0]: torch.tensor([0.5, 0.0])}, 8.0, 2.0)
    assert gamma[PATHS[0]].tolist() == [2.0, 0.0]
    assert activation_weights({PATHS[0]: torch.tensor([0.5, 0.0])}, 8.0, 0.0)[PATHS[0]].tolist() == [8.0, 8.0]
    names = [f"{PATHS[0]}.up_proj.lora_A", f"{PATHS[1]}.up_proj.lora_A", "model.layers.0.mlp.gate.lora_A"]
    weights = weights_by_name(names, gamma, 8.0)
    assert torch.equal(torch.as_tensor(weights[names[0]]), gamma[PATHS[0]])
    assert [weights[name] for name in names[1:]] == [8.0, 8.0]


def test_budgets_run_their_active_experts(olmoe_backbone: Backbone) -> None:
    method, model = a3smoe(), olmoe_backbone.info
    state = method.start(model, [LARGE, SMALL], torch.Generator().manual_seed(0))
    for budget, active in ((LARGE, 4), (SMALL, 1)):
        for model_of in (
            method.deploy(state, model, budget),
            method.personalize(method.excerpt(state, model, client(0, budget)), model, client(0, budget), Payload()),
        ):
            assert (model_of.plan.active_experts, model_of.plan.part(OutputScale)) == (active, None)
            assert all(model_of.tensors[name] is value for name, value in state.part("adapter").items())
    assert not any(".gate.lora_" in name for name in state.part("adapter"))


def test_bad_input(olmoe_backbone: Backbone, llama_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="'x' has active_experts 9"):
        a3smoe().start(olmoe_backbone.info, [LARGE, Budget("x", 9, 2)], torch.Generator())
    with pytest.raises(ModelError, match=r"A3SMoE needs a mixture-of-experts model, but tiny llama"):
        a3smoe().plan(llama_backbone.info, LARGE)
    with pytest.raises(ConfigError, match=r"method\.temperature: a3smoe has no such option"):
        build_method("a3smoe", {"temperature": 2})


def test_the_traffic_of_a_round_is_the_papers() -> None:
    """UB-SMoE, Table 15: 370 MB up and down at r = 20 on OLMoE-1B-7B, in bf16; the frequencies are 2 KiB more."""
    names = [f"model.layers.{layer}" for layer in range(16)]
    model = ModelInfo(
        name="OLMoE-1B-7B",
        family="olmoe",
        hidden=2048,
        layers=16,
        vocabulary=50304,
        parameters=6_900_000_000,
        linears=tuple(
            LinearInfo(f"{name}.self_attn.{part}_proj", "attention", 2048, 2048) for name in names for part in "qkvo"
        ),
        moe=tuple(
            MoeInfo(f"{name}.mlp", f"{name}.mlp.gate", f"{name}.mlp.experts", 64, 8, 2048, 1024) for name in names
        ),
    )
    method = a3smoe(rank=20)
    shapes = method.expected_upload(model, client(0, Budget("b1", 1, 6)), Payload())
    sent = {name: torch.empty(shape, device="meta", dtype=torch.bfloat16) for name, shape in shapes.items()}
    parts = bytes_by_part(Payload(sent))
    assert parts["adapter"] / 2**20 == pytest.approx(370, abs=0.5)
    assert parts[ROUTING] == 2 * 16 * 64
