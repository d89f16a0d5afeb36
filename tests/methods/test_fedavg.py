"""FedAvg: the mean by size and index, what trains, and the methods that it equals under some settings."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.methods.fedavg import FedAvg, FedAvgSettings
from fedguild.model.backbone import Backbone
from fedguild.model.plan import trainable_shapes
from fedguild.server.validation import check_upload
from tests.methods.fedalign_moe.federation import fedalign
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client

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


# What it equals


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
        check_upload(sent.payload, method.schema(federation.model, sent.client, Payload()))
        trained = sent.payload.part("adapter")
        assert trained.keys() == names
        changes = [name for name in names if not torch.equal(trained[name], state.part("adapter")[name])]
        assert all(any(name.endswith(kind) for name in changes) for kind in kinds)


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
