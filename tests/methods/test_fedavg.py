"""FedAvg: the mean by size and index, what trains, and the methods that it equals under some settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedavg import FedAvg, FedAvgSettings
from fedguild.methods.fedit import FedIT
from fedguild.model.backbone import Backbone
from fedguild.model.plan import trainable_shapes
from fedguild.server.validation import check_upload
from tests.backbones import tiny_backbone
from tests.methods.fedalign_moe.federation import fedalign
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.oracles.aggregation import weighted_mean

GATE = "model.layers.0.mlp.gate"
UP = "model.layers.0.mlp.experts.up_proj"
QUERY = "model.layers.0.self_attn.q_proj"
WHAT_TRAINS = (
    ({}, ("gate.delta", "experts.up_proj.lora_A")),
    ({"gate": "lora", "experts": "none"}, ("gate.lora_B",)),
    ({"gate": "none", "experts": "full"}, ("experts.down_proj.delta",)),
    ({"gate": "none", "experts": "none", "targets": ("q_proj",)}, ("q_proj.lora_A",)),
    (
        {"gate": "full", "experts": "full", "targets": ("attention",)},
        ("gate.delta", "experts.gate_proj.delta", "q_proj.lora_A"),
    ),
)


def fedavg(**options: object) -> FedAvg:
    return FedAvg(FedAvgSettings(**{"rank": 2, **options}))


def clients() -> list:
    return [client(0, LARGE, 4), client(1, SMALL, 7), client(2, MIDDLE, 3)]


def after_rounds(federation: Federation, rounds: int = 2) -> Payload:
    state = federation.start()
    for number in range(1, rounds + 1):
        state = federation.method.aggregate(state, iter(federation.train(state, number)))
    return state


# The mean


def test_two_clients_by_hand() -> None:
    """n = 10 and 30. A gate's entry, 2 and 6: (10 · 2 + 30 · 6) / 40 = 5; experts, 4 and 8: 7, 1 and -3: -2."""
    sent = [
        upload(
            client(index, LARGE, examples),
            adapter={f"{GATE}.delta": torch.tensor([[gate]]), f"{UP}.lora_A": torch.tensor(experts).view(2, 1, 1)},
        )
        for index, examples, gate, experts in ((0, 10, 2.0, [4.0, 1.0]), (1, 30, 6.0, [8.0, -3.0]))
    ]
    before = {f"{GATE}.delta": torch.zeros(1, 1), f"{UP}.lora_A": torch.zeros(2, 1, 1)}
    found = fedavg().aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    assert found[f"{GATE}.delta"].item() == 5.0
    assert found[f"{UP}.lora_A"].flatten().tolist() == [7.0, -2.0]


@pytest.mark.parametrize("count", [1, 2, 5])
@pytest.mark.parametrize("options", [{}, {"experts": "full", "gate": "lora", "targets": ("attention",)}], ids=str)
def test_aggregation(options: dict[str, object], count: int, olmoe_backbone: Backbone) -> None:
    method, model = fedavg(**options), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    sent = [upload(client(i, LARGE, 2 + 3 * i), adapter=random_tensors(model, plan, i)) for i in range(count)]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    sizes = [torch.tensor(float(part.client.examples)) for part in sent]
    assert found.keys() == before.keys()
    for name, global_value in before.items():
        if global_value.numel() > 300:
            values = [part.payload.tensors[f"adapter/{name}"][:1] for part in sent]
            expected = weighted_mean(values, sizes, global_value[:1])
        else:
            values = [part.payload.tensors[f"adapter/{name}"] for part in sent]
            expected = weighted_mean(values, sizes, global_value)
        torch.testing.assert_close(found[name][: len(expected)], expected, rtol=1e-5, atol=1e-6)


def test_clients_without_weight_and_rounds_without_uploads(olmoe_backbone: Backbone) -> None:
    method, model = fedavg(), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before, one, other = (random_tensors(model, plan, seed) for seed in (9, 1, 2))
    weightless, heavy = upload(client(0, LARGE, 0), adapter=one), upload(client(1, LARGE, 3), adapter=other)
    for sent, expected in (((weightless, heavy), other), ((weightless,), before), ((), before)):
        found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
        assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_expert_that_nobody_activated_stays(tmp_path: Path) -> None:
    """Without weight decay; the round's routing says which they are."""
    backbone = tiny_backbone("olmoe", num_experts=32, num_experts_per_tok=2)
    federation = Federation(backbone, fedavg(), [client(0, LARGE, 2), client(1, LARGE, 1)], tmp_path)
    state = federation.start()
    sent = federation.train(state)
    after = federation.method.aggregate(state, iter(sent)).part("adapter")
    names = [name for name in after if name.endswith("experts.up_proj.lora_B")]
    moved = torch.stack([after[name].flatten(1).any(dim=1) for name in names])
    touched = [part.payload.part("adapter")[name].flatten(1).any(dim=1) for name in names for part in sent]
    assert 0 < int(moved.sum()) < 64
    assert torch.equal(moved, torch.stack(touched).view(2, 2, 32).any(dim=1))


# What it equals


def test_it_is_fedit_on_the_same_lora(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Bit by bit, over two rounds, with as many active experts for everybody."""
    options = {"rank": 2, "alpha": 16.0}
    fedit = FedIT(FedIT.Settings(**options, targets=("attention", "router", "experts")))
    ours = fedavg(gate="lora", experts="lora", targets=("attention",), alpha=16.0)
    found, expected = (
        after_rounds(Federation(olmoe_backbone, method, clients(), tmp_path / method.name)).part("adapter")
        for method in (ours, fedit)
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


@pytest.mark.parametrize("experts", ["lora", "full"])
def test_it_is_fedalign_moe_with_averaged_gates_and_sizes(
    experts: str, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Which averages changes and not weights: equal up to rounding, which Adam magnifies in the second round."""
    theirs = fedalign(experts=experts, gate="averaged", aggregation="size")
    options = {"experts": experts, "gate": "full"}
    alike = [client(0, LARGE, 4), client(1, LARGE, 7), client(2, LARGE, 3)]  # FedAvg trains with all experts active
    averaged, aligned = (
        after_rounds(Federation(olmoe_backbone, method, alike, tmp_path / method.name))
        for method in (fedavg(**options), theirs)
    )
    found = averaged.part("adapter")
    expected = {name: value for part in ("experts", "gate", "adapter") for name, value in aligned.part(part).items()}
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert float((found[name] - value).norm()) <= 1e-4 * float(value.norm()), name


# What trains, and what a client keeps


@pytest.mark.parametrize(("options", "kinds"), WHAT_TRAINS, ids=str)
def test_what_trains(
    options: dict[str, object], kinds: tuple[str, ...], olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Everything named moves, nothing else is sent."""
    federation = Federation(olmoe_backbone, fedavg(**options), clients(), tmp_path)
    method, state = federation.method, federation.start()
    names = trainable_shapes(federation.model, method.plan(federation.model, LARGE)).keys()
    assert all(any(name.endswith(kind) for name in names) for kind in kinds)
    for sent in federation.train(state):
        check_upload(sent.payload, method.expected_upload(federation.model, sent.client, Payload()), client="c")
        trained = sent.payload.part("adapter")
        assert trained.keys() == names
        changes = [name for name in names if not torch.equal(trained[name], state.part("adapter")[name])]
        assert all(any(name.endswith(kind) for name in changes) for kind in kinds)


def test_a_clients_own_model_is_from_before_the_average(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 2 never took part and has the global model."""
    federation = Federation(olmoe_backbone, fedavg(personal=True), clients(), tmp_path)
    method, state = federation.method, federation.start()
    sent = {part.client.index: part for part in federation.train(state, who=(0, 1))}
    state = method.aggregate(state, iter(sent.values()))
    for who in federation.clients:
        own = method.personalize(state, federation.model, who, federation.memory.load(who.name, 2))
        expected = sent[who.index].payload.part("adapter") if who.index in sent else state.part("adapter")
        assert own.plan == method.plan(federation.model, who.budget)
        assert own.tensors.keys() == expected.keys()
        assert all(torch.equal(own.tensors[name], value) for name, value in expected.items())
        received = method.personalize(state, federation.model, who, Payload())
        assert all(torch.equal(received.tensors[name], value) for name, value in state.part("adapter").items())


def test_nothing_is_kept_unless_asked(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, fedavg(), clients(), tmp_path)
    federation.train(federation.start())
    assert not list(tmp_path.rglob("*.memory"))


def test_the_start_changes_nothing(olmoe_backbone: Backbone) -> None:
    state = fedavg(experts="lora", gate="full").start(olmoe_backbone.info, [LARGE], torch.Generator().manual_seed(0))
    for name, value in state.part("adapter").items():
        assert bool(value.any()) == name.endswith("lora_A")


# Bad input


def test_a_dense_model_has_neither_gate_nor_experts(llama_backbone: Backbone, tmp_path: Path) -> None:
    for options in ({}, {"gate": "none"}, {"experts": "none", "targets": ("attention",)}):
        with pytest.raises(ConfigError, match=r"tiny llama \(llama\) is dense(.|\n)*method\.gate=none"):
            fedavg(**options).plan(llama_backbone.info, LARGE)
    method = fedavg(gate="none", experts="none", targets=("attention", "mlp"))
    federation = Federation(llama_backbone, method, [client(0, LARGE), client(1, SMALL)], tmp_path)
    assert (
        after_rounds(federation, 1).part("adapter").keys()
        == trainable_shapes(federation.model, method.plan(federation.model, LARGE)).keys()
    )


@pytest.mark.parametrize("target", ["router", "experts"])
def test_gate_and_experts_are_not_targets(target: str, olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match=rf"method\.targets: {target} cannot(.|\n)*method\.gate and method\.experts"):
        fedavg(targets=(target,)).plan(olmoe_backbone.info, LARGE)


def test_something_must_train(olmoe_backbone: Backbone, llama_backbone: Backbone) -> None:
    for backbone in (olmoe_backbone, llama_backbone):
        with pytest.raises(ConfigError, match=r"nothing would train(.|\n)*method\.targets"):
            fedavg(gate="none", experts="none").plan(backbone.info, LARGE)


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("rank", 0, r"method\.rank: .*got 0"),
        ("gate", "averaged", r"method\.gate: .*'full', 'lora' or 'none', got 'averaged'"),
        ("experts", True, r"method\.experts: .*got True"),
    ],
)
def test_options_out_of_range(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("fedavg", {option: value})
