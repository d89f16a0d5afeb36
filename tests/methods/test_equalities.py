"""Methods that are another under some settings, bit by bit: what is sent, kept and aggregated, over two rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config.training import TrainingSettings
from fedguild.methods import build_method
from fedguild.runs.promises import require_equal
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.methods.test_matrix import train

SETTINGS = TrainingSettings(
    optimizer="sgd",
    weight_decay=0.1,
    learning_rate=0.3,
    batch_size=2,
    gradient_accumulation_steps=2,
    steps=3,
    max_grad_norm=0.5,
)
MIXED = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, MIDDLE, 3)]
ALIKE = [client(0, LARGE, 4), client(1, LARGE, 7), client(2, LARGE, 3)]
EVERYTHING = ["attention", "router", "experts"]
LORA: dict[str, Any] = {"rank": 2, "alpha": 16.0, "gate": "lora", "experts": "lora", "targets": ["attention"]}
PERSONAL: dict[str, Any] = {"rank": 2, "gate": "full", "targets": ["attention"], "personal": True}
QUERY: dict[str, Any] = {"rank": 2, "targets": ["q_proj", "v_proj"]}

Given = tuple[str, dict[str, Any]]
EQUAL: dict[str, tuple[Given, Given, list[Any]]] = {
    "FedAvg of LoRA": (("fedavg", LORA), ("fedit", {"rank": 2, "alpha": 16.0, "targets": EVERYTHING}), MIXED),
    "FedProx without a penalty": (("fedprox", {**PERSONAL, "mu": 0}), ("fedavg", PERSONAL), MIXED),
    "FedProx on full experts": (
        ("fedprox", {**PERSONAL, "experts": "full", "mu": 0}),
        ("fedavg", {**PERSONAL, "experts": "full"}),
        ALIKE[:2],
    ),
    "A3SMoE": (
        ("a3smoe", {"rank": 2, "alpha": 20.0, "targets": EVERYTHING}),
        ("flame", {"rank": 2, "alpha": 20.0, "targets": EVERYTHING, "rescaler": "none", "temperature": 1.0}),
        MIXED,
    ),
    "HetLoRA of one rank": (
        ("hetlora", {"rank": 3, "alpha": 6.0, "penalty_weight": 0.0, "pruning": False, "weights": "size"}),
        ("fedit", {"rank": 3, "alpha": 6.0, "targets": ["attention", "experts"]}),
        ALIKE,
    ),
    "HFedMoE without limits": (
        ("hfedmoe", {"rank": 2, "targets": ["attention", "experts"], "redundancy": 0.0, "threshold": 0.0}),
        ("fedit", {"rank": 2, "targets": ["attention", "experts"]}),
        ALIKE,
    ),
    "PFL-MoE": (("pfl-moe", QUERY), ("fedit", {**QUERY, "weights": "uniform"}), MIXED),
    "SMoE-LLB without losses": (
        ("smoe-llb", {"rank": 2, "alpha": 16.0, "balance_weight": 0, "z_weight": 0}),
        ("fedavg", LORA),
        ALIKE,
    ),
}


@pytest.mark.parametrize("label", EQUAL)
def test_one_is_the_other(label: str, tmp_path: Path) -> None:
    """HFedMoE to rounding: it weighs by experts."""
    *methods, clients = EQUAL[label]
    backbone = tiny_backbone("olmoe")
    ours, theirs = (
        Federation(backbone, build_method(name, options), clients, tmp_path / name) for name, options in methods
    )
    state, expected = ours.start(), theirs.start()
    for round in (1, 2):
        sent, wanted = (train(one, own, round, SETTINGS) for one, own in ((ours, state), (theirs, expected)))
        state, expected = ours.method.aggregate(state, iter(sent)), theirs.method.aggregate(expected, iter(wanted))
        pairs = [(state, expected), *((one.payload, other.payload) for one, other in zip(sent, wanted, strict=True))]
        if ours.method.settings.model_dump().get("personal"):
            kept = [[one.memory.load(who.name, round + 1) for who in clients] for one in (ours, theirs)]
            assert all(memory.tensors for memory in kept[1])
            pairs += zip(*kept, strict=True)
        for found, other in pairs:
            shared = {name: value for name, value in found.tensors.items() if name in other.tensors}
            if label.startswith("HFedMoE"):
                torch.testing.assert_close(shared, dict(other.tensors), rtol=1e-4, atol=1e-5)
            else:
                require_equal(shared, other.tensors)
