"""RoLoRA: B and A train in turn, so that the average of a factor is the average of the updates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core.accounting import bytes_by_part
from fedguild.core.payload import ADAPTER, Payload
from fedguild.core.seeding import torch_rng
from fedguild.engines.local import LocalEngine
from fedguild.methods import build_method
from fedguild.methods.ffa_lora import shared_factors
from fedguild.methods.rolora import RoLoRA
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.server.engine import Task
from fedguild.server.method import Upload
from fedguild.server.validation import check_upload
from tests.backbones import tiny_backbone, tiny_model
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.methods.test_matrix import train
from tests.oracles.lora import MergedModel
from tests.oracles.rolora import Loss, mean_product, rounds

TARGETS = ["attention", "router", "experts"]
WHOLE_BATCH = TrainingSettings(optimizer="sgd", learning_rate=0.1, batch_size=64, steps=1, max_grad_norm=None)
"""One step on all examples of a client."""
A, B = "lora_A", "lora_B"


def rolora(**options: object) -> RoLoRA:
    method = build_method("rolora", {"rank": 2, "targets": TARGETS, **options})
    assert isinstance(method, RoLoRA)
    return method


def started(method: RoLoRA, model: ModelInfo) -> Payload:
    return method.start(model, [LARGE], torch_rng(0, "start"))


def at_round(round: int, method: RoLoRA, model: ModelInfo, seed: int = 9) -> Payload:
    """A state before some round, A and B random."""
    return Payload.of({ADAPTER: random_tensors(model, method.plan(model, LARGE), seed)}, {"round": round})


def ending(tensors: dict[str, Tensor], kind: str) -> dict[str, Tensor]:
    return {name: value for name, value in tensors.items() if name.endswith(kind)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def trained(federation: Federation, state: Payload, round: int, who: Sequence[int]) -> list[Upload]:
    """The uploads of some clients, which take one step on all of their examples."""
    everybody = federation.clients
    federation.clients = [known for known in everybody if known.index in who]
    try:
        return train(federation, state, round, WHOLE_BATCH)
    finally:
        federation.clients = everybody


# By hand, and against the equations


@pytest.mark.parametrize(("weights", "expected"), [("size", 5.0), ("uniform", 4.0)])
@pytest.mark.parametrize(("round", "trains"), [(1, B), (2, A), (7, B), (8, A)])
def test_two_clients_by_hand(round: int, trains: str, weights: str, expected: float) -> None:
    """|D_1| = 10, |D_2| = 30 and 2, 6: (10 · 2 + 30 · 6) / 40 = 5, and (2 + 6) / 2 = 4; the other factor stays 7."""
    module = "model.layers.0.self_attn.q_proj"
    state = Payload.of({ADAPTER: {f"{module}.{kind}": torch.full((1, 1), 7.0) for kind in (A, B)}}, {"round": round})
    sent = [
        upload(client(i, LARGE, n), adapter={f"{module}.{trains}": torch.tensor([[x]])})
        for i, n, x in ((0, 10, 2.0), (1, 30, 6.0))
    ]
    after = rolora(weights=weights).aggregate(state, iter(sent))
    values = {name.rpartition(".")[2]: value.item() for name, value in after.part(ADAPTER).items()}
    assert values == {A: 7.0, B: 7.0, trains: expected}
    assert after.scalars == {"round": round + 1}


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
        state = federation.method.aggregate(state, iter(trained(federation, state, round, who)))
        for name, value in {**next_down, **next_up}.items():
            torch.testing.assert_close(state.part(ADAPTER)[name].double(), value, rtol=1e-5, atol=1e-7)
        assert_equal(ending(state.part(ADAPTER), (B, A)[round % 2]), ending(before, (B, A)[round % 2]))


@pytest.mark.parametrize("round", [1, 2])
def test_the_average_is_that_of_the_updates(round: int, olmoe_backbone: Backbone) -> None:
    """Of linear layers, routers and every expert, in rounds of B and of A."""
    method, model = rolora(), olmoe_backbone.info
    state, examples = at_round(round, method, model), (2, 7, 4)
    trains, frozen = (B, A) if round == 1 else (A, B)
    sent = [
        upload(client(i, LARGE, n), adapter=ending(at_round(round, method, model, i).part(ADAPTER), trains))
        for i, n in enumerate(examples)
    ]
    found, before = method.aggregate(state, iter(sent)).part(ADAPTER), state.part(ADAPTER)
    for name in ending(before, B):
        other = name.replace(B, A)
        for expert in range(before[name].shape[0]) if before[name].dim() == 3 else (...,):
            pairs = {
                kind: [(before[key] if kind == frozen else one.payload.part(ADAPTER)[key])[expert] for one in sent]
                for kind, key in ((A, other), (B, name))
            }
            expected = mean_product(pairs[A], pairs[B], [float(n) for n in examples])
            product = found[name][expert].double() @ found[other][expert].double()
            torch.testing.assert_close(product, expected, rtol=1e-5, atol=1e-5)


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


def test_one_factor_goes_up_and_both_go_down(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    clients = [client(0, LARGE), client(1, SMALL)]
    federation = Federation(olmoe_backbone, rolora(), clients, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    sizes, whole = [], bytes_by_part(Payload(state.tensors))["adapter"]
    for round, trains in ((1, B), (2, A), (3, B)):
        uploads = federation.train(state, round)
        for sent in uploads:
            download = method.download(state, model, sent.client)
            assert download.tensors.keys() == state.tensors.keys()
            check_upload(sent.payload, method.expected_upload(model, sent.client, download), client="c")
            assert sent.payload.part(ADAPTER).keys() == ending(state.part(ADAPTER), trains).keys()
        sizes.append(bytes_by_part(uploads[0].payload)["adapter"])
        state = method.aggregate(state, iter(uploads))
    assert sizes[0] + sizes[1] == whole
    assert sizes[2] == sizes[0]
    assert not list(tmp_path.rglob("*.memory"))


def test_a_round_is_counted_once(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Steps, examples and tokens are those of FedIT, though the slots are opened anew."""
    reports = []
    for method in (rolora(), build_method("fedit", {"rank": 2, "targets": TARGETS, "active_experts": "budget"})):
        federation = Federation(olmoe_backbone, method, [client(0, LARGE, 5)], tmp_path / method.name)
        engine = LocalEngine(olmoe_backbone, federation.examples, WHOLE_BATCH, federation.memory, seed=1)
        download = method.download(federation.start(), federation.model, federation.clients[0])
        (delivery,) = engine.train(method, federation.model, [Task(1, federation.clients[0], download)])
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


def test_an_upload_is_checked_by_the_round_of_its_download(olmoe_backbone: Backbone) -> None:
    method, model = rolora(), olmoe_backbone.info
    for round, trains in ((1, B), (2, A)):
        download = method.download(at_round(round, method, model), model, client(0, LARGE))
        expected = method.expected_upload(model, client(0, LARGE), download)
        assert expected
        assert all(name.endswith(trains) for name in expected)


def test_a_client_that_was_absent_needs_nothing_else(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """It trains in round 2 as it would had it taken part in round 1."""
    clients = [client(0, LARGE), client(1, SMALL)]
    absent, present = (Federation(olmoe_backbone, rolora(), clients, tmp_path / name) for name in ("a", "p"))
    uploads = present.train(present.start())
    state = present.method.aggregate(present.start(), iter(uploads[:1]))
    (found,), (expected,) = absent.train(state, 2, (1,)), present.train(state, 2, (1,))
    assert_equal(dict(found.payload.tensors), dict(expected.payload.tensors))


@pytest.mark.parametrize("round", [1, 2])
def test_nobody_and_a_client_without_examples_change_nothing_but_the_round(
    round: int, olmoe_backbone: Backbone
) -> None:
    method, model = rolora(), olmoe_backbone.info
    state = at_round(round, method, model)
    empty = upload(
        client(0, LARGE, 0), adapter=ending(at_round(round, method, model, 1).part(ADAPTER), (A, B)[round % 2])
    )
    for sent in ([], [empty]):
        after = method.aggregate(state, iter(sent))
        assert after.scalars == {"round": round + 1}
        assert_equal(dict(after.tensors), dict(state.tensors))


def test_the_deployed_model_has_both_factors(olmoe_backbone: Backbone) -> None:
    method, model = rolora(), olmoe_backbone.info
    for budget, active in ((LARGE, 4), (SMALL, 1)):
        state = started(method, model)
        deployment = method.deploy(state, model, budget)
        assert deployment is not None
        assert deployment.plan.active_experts == active
        assert_equal(dict(deployment.tensors), state.part(ADAPTER))
