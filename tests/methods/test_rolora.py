"""RoLoRA: B and A train in turn, so that the average of a factor is the average of the updates."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods import build_method
from fedguild.methods.ffa_lora import shared_factors
from fedguild.methods.rolora import RoLoRA
from fedguild.model.backbone import Backbone
from tests.backbones import tiny_backbone, tiny_model
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors
from tests.oracles.lora import MergedModel
from tests.oracles.rolora import Loss, rounds

TARGETS = ["attention", "router", "experts"]
WHOLE_BATCH = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=64, steps=1, max_grad_norm=None)
"""One step on all examples of a client."""
A, B = "lora_A", "lora_B"


def rolora(**options: object) -> RoLoRA:
    method = build_method("rolora", {"rank": 2, "targets": TARGETS, **options})
    assert isinstance(method, RoLoRA)
    return method


def ending(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.endswith(kind)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


# By hand, and against the equations


def test_four_rounds_follow_the_equations(tmp_path: Path) -> None:
    """Clients of other sizes, some absent, against gradient descent on each client's merged weights."""
    clients = [client(0, LARGE, 3), client(1, LARGE, 5), client(2, LARGE, 2)]
    backbone, method = tiny_backbone("llama", dtype=torch.float64), rolora(targets=["q_proj", "mlp"])
    federation = Federation(backbone, method, clients, tmp_path)
    model, plan = federation.model, federation.method.plan(federation.model, LARGE)
    plain = tiny_model("llama", dtype=torch.float64)

    def loss_of(index: int) -> Loss:
        rows = federation.examples[index]

        def loss(adapter: Mapping[str, Tensor]) -> Tensor:
            merged = MergedModel(plain, model, plan, adapter)
            return torch.cat([merged.losses(row.input_ids, row.prompt_length) for row in rows]).mean()

        return loss

    state = federation.start()
    down, up = ({n: v.double() for n, v in ending(state.part(ADAPTER), kind).items()} for kind in (A, B))
    present = ((0, 1), (1, 2), (2,), (0, 1, 2))
    expected = rounds(down, up, [loss_of(i) for i in range(3)], [3, 5, 2], present, rate=0.1)
    for round, (who, (next_down, next_up)) in enumerate(zip(present, expected, strict=True), start=1):
        before = state.part(ADAPTER)
        state = federation.method.aggregate(state, iter(federation.train(state, round, who, settings=WHOLE_BATCH)))
        for name, value in {**next_down, **next_up}.items():
            torch.testing.assert_close(state.part(ADAPTER)[name].double(), value, rtol=1e-5, atol=1e-7)
        assert_equal(ending(state.part(ADAPTER), (B, A)[round % 2]), ending(before, (B, A)[round % 2]))


# A known method


@pytest.mark.parametrize("round", [1, 3])
def test_an_odd_round_is_ffa_loras(round: int, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Bit by bit, dropout too, given the same A and B: from B = 0, and from a B that has trained."""
    clients = [client(0, LARGE, 4), client(1, SMALL, 3), client(2, MIDDLE, 5)]
    theirs = Federation(
        olmoe_backbone, build_method("ffa-lora", {"rank": 2, "targets": TARGETS, "dropout": 0.3}), clients, tmp_path
    )
    ours = Federation(olmoe_backbone, rolora(dropout=0.3), clients, tmp_path)
    model, state = theirs.model, theirs.start()
    if round > 1:
        ups = ending(random_tensors(model, ours.method.plan(model, LARGE), 3), B)
        state = Payload.of({ADAPTER: ups}, state.scalars)
    shared = shared_factors(model, theirs.method.plan(model, LARGE), int(state.scalars["seed"]))
    same = Payload.of({ADAPTER: {**shared, **state.part(ADAPTER)}}, {"round": round})
    pairs = list(zip(ours.train(same, round), theirs.train(state, round), strict=True))
    for mine, other in pairs:
        assert_equal(dict(mine.payload.tensors), dict(other.payload.tensors))
    after = ours.method.aggregate(same, iter([mine for mine, _ in pairs])).part(ADAPTER)
    expected = theirs.method.aggregate(state, iter([other for _, other in pairs])).part(ADAPTER)
    assert_equal(ending(after, B), expected)
    assert_equal(ending(after, A), shared)


def test_b_comes_first_because_a_has_no_gradient_at_b_zero(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    federation = Federation(olmoe_backbone, rolora(), [client(0, LARGE)], tmp_path)
    state = federation.start()
    assert state.scalars == {"round": 1}
    turned = Payload(state.tensors, {"round": 2})
    (sent,) = federation.train(turned)
    assert_equal(sent.payload.part(ADAPTER), ending(state.part(ADAPTER), A))
    (sent,) = federation.train(state)
    assert sum(bool(value.any()) for value in sent.payload.tensors.values()) > len(sent.payload.tensors) / 2


# What travels, and what a client's training counts


def test_a_round_is_counted_once(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Steps, examples and tokens are those of FedIT, though the slots are opened anew."""
    reports = []
    for method in (rolora(), build_method("fedit", {"rank": 2, "targets": TARGETS, "active_experts": "budget"})):
        federation = Federation(olmoe_backbone, method, [client(0, LARGE, 5)], tmp_path / method.name)
        (delivery,) = federation.deliver(federation.start(), settings=WHOLE_BATCH)
        reports.append(delivery.report)
    ours, theirs = reports
    assert (ours.steps, ours.examples, ours.tokens, ours.loss) == (1, 5, theirs.tokens, theirs.loss)


# Edges


def test_a_late_upload_of_the_other_factor_counts_for_nothing(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Neither behind the others' nor alone: B of round 1 was not trained against what round 2 leads to."""
    federation = Federation(olmoe_backbone, rolora(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    method, start = federation.method, federation.start()
    late, own = federation.train(start, 1)
    state = method.aggregate(start, iter([own]))
    (present,) = federation.train(state, 2, (1,))
    expected = method.aggregate(state, iter([present]))
    found = method.aggregate(state, iter([present, late]))
    assert found.scalars == expected.scalars == {"round": 3}
    assert_equal(dict(found.tensors), dict(expected.tensors))
    alone = method.aggregate(state, iter([late]))
    assert alone.scalars == {"round": 3}
    assert_equal(dict(alone.tensors), dict(state.tensors))
