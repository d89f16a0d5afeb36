"""HetLoRA: the penalty, the pruning and the average, and that ranks beyond a client's own stay zero."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.core.payload import Payload, with_part
from fedguild.methods.hetlora import (
    HetLoRA,
    HetLoRASettings,
    rank_name,
    rank_of,
    ranks_of,
    tail_products,
    tail_start,
    whole_adapter,
)
from fedguild.model.adapters.storage import SlotTensor
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.slots import SlotModel
from fedguild.server.aggregation import rank_axis
from fedguild.server.method import client_model, excerpt_of
from fedguild.server.validation import check_upload
from tests.methods.federation import LARGE, MIDDLE, SETTINGS, SMALL, Federation, client, random_tensors, upload
from tests.oracles.hetlora import norm_of_products, padded_average, tail_penalty

EVERYTHING = ("attention", "router", "experts")
QUERY, EXPERT = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.down_proj"


def hetlora(**options: object) -> HetLoRA:
    return HetLoRA(HetLoRASettings(**{"rank": 3, "alpha": 6.0, "targets": EVERYTHING, **options}))


def adapter_of(model: ModelInfo, rank: int, seed: int) -> dict[str, Tensor]:
    return random_tensors(model, hetlora().plan(model, replace(LARGE, rank=rank)), seed)


def state_of(adapter: Mapping[str, Tensor], clients: list[ClientInfo]) -> Payload:
    return Payload(
        {**with_part("adapter", adapter), **{rank_name(who): torch.tensor(who.budget.rank) for who in clients}}
    )


def matrices(adapter: Mapping[str, Tensor]) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Module -> (A, B) of every matrix of an adapter: one, or one for each expert."""
    found = {}
    for module in sorted(name.removesuffix(".lora_A") for name in adapter if name.endswith("lora_A")):
        down, up = adapter[f"{module}.lora_A"], adapter[f"{module}.lora_B"]
        found[module] = list(zip(down, up, strict=True)) if down.dim() == 3 else [(down, up)]
    return found


def every_matrix(adapter: Mapping[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    return [pair for pairs in matrices(adapter).values() for pair in pairs]


# Lines 4 and 5: the penalty and the pruning


@pytest.mark.parametrize("starts", [(2, 1, 0), (0, 0, 0), (3, 2, 1), (1, 1, 0)])
def test_the_penalty_and_its_gradients(starts: tuple[int, ...], olmoe_backbone: Backbone) -> None:
    """Clients of rank 3, 2 and 1 in one cohort; one has a zero B, as in the first round."""
    model = olmoe_backbone.info
    plans = [hetlora().plan(model, budget) for budget in (LARGE, MIDDLE, SMALL)]
    own = [adapter_of(model, plan.rank, seed) for seed, plan in enumerate(plans)]
    own[2] = {name: value * (not name.endswith("lora_B")) for name, value in own[2].items()}
    with SlotModel(olmoe_backbone, plans) as slots:
        for slot, adapter in enumerate(own):
            slots.load(slot, adapter)
        found = tail_products(slots.trainables, starts)
        (found * torch.tensor([1.0, 2.0, 3.0])).sum().backward()
        graded = {name: (tensor, tensor.stored.grad) for name, tensor in slots.trainables.items()}
        for slot, adapter in enumerate(own):
            leaves = {name: value.double().requires_grad_() for name, value in adapter.items()}
            expected = tail_penalty(every_matrix(leaves), starts[slot])
            torch.testing.assert_close(found[slot].double(), expected.detach(), rtol=1e-5, atol=1e-6)
            if expected.requires_grad:
                (expected * (slot + 1)).backward()
            for name, (tensor, grad) in graded.items():
                wanted = torch.zeros_like(leaves[name]) if leaves[name].grad is None else leaves[name].grad
                assert grad is not None
                torch.testing.assert_close(tensor.own(slot, grad).double(), wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("gamma", "rank", "expected"),
    [(0.99, 20, 19), (0.99, 1, 0), (0.7, 10, 7), (0.29, 100, 29), (1.0, 8, 8), (0.5, 5, 2)],
)
def test_the_start_of_the_tail(gamma: float, rank: int, expected: int) -> None:
    """⌊γ r⌋, also where γ r is whole but its float is not: 0.29 · 100."""
    assert tail_start(gamma, rank) == expected


@pytest.mark.parametrize(
    ("options", "rank", "expected"),
    [
        ({}, 20, 19),
        ({"gamma": 0.5}, 20, 10),
        ({"gamma": 0.5, "minimum_rank": 12}, 20, 12),
        ({"gamma": 0.5, "minimum_rank": 12}, 12, 12),
        ({"gamma": 0.5, "minimum_rank": 12}, 6, 6),
        ({}, 1, 1),
        ({"pruning": False}, 20, 20),
    ],
)
def test_the_rank_after_pruning(options: dict[str, object], rank: int, expected: int) -> None:
    assert hetlora(**options).pruned(rank) == expected


def test_a_penalised_client_prunes_for_good(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Rank 3 becomes 2 and, pruned again, 1, where it stays; a client without pruning keeps its 3."""
    clients = [client(0, LARGE), client(1, MIDDLE)]
    method = hetlora(penalty_weight=100.0, gamma=0.7)
    federation = Federation(olmoe_backbone, method, clients, tmp_path)
    state, seen = Payload({**federation.start().tensors}), []
    tensors = with_part("adapter", adapter_of(olmoe_backbone.info, 3, 5))
    for round in (1, 2, 3, 4):
        state = Payload({**state.tensors, **tensors})  # a global model with something to shrink
        down = [whole_adapter(method.download(state, federation.model, who)) for who in clients]
        assert [rank_of(adapter) for adapter in down] == [*ranks_of(state).values()]
        uploads = federation.train(state, round, learning_rate=1e-3)
        state = method.aggregate(state, iter(uploads))
        seen.append([*ranks_of(state).values()])
    assert seen == [[2, 1], [1, 1], [1, 1], [1, 1]]
    assert [rank_of(sent.payload.part("adapter")) for sent in uploads] == [1, 1]
    excerpt = excerpt_of(method, state, federation.model, clients[0])
    assert client_model(method, excerpt, federation.model, clients[0], Payload()).plan.rank == 1
    assert method.deploy(state, federation.model, LARGE).plan.rank == 3
    whole = Federation(olmoe_backbone, hetlora(penalty_weight=100.0, gamma=0.7, pruning=False), clients, tmp_path)
    assert [
        rank_of(sent.payload.part("adapter")) for sent in whole.train(state_of(adapter_of(whole.model, 3, 5), clients))
    ] == [3, 2]


def test_a_pruned_upload_is_the_head_of_what_was_trained(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    clients, sent = [client(0, LARGE)], {}
    for pruning in (True, False):
        method = hetlora(penalty_weight=100.0, gamma=0.7, pruning=pruning)
        federation = Federation(olmoe_backbone, method, clients, tmp_path)
        state = state_of(adapter_of(federation.model, 3, 5), clients)
        (found,) = federation.train(state, learning_rate=1e-3)
        download = method.download(state, federation.model, clients[0])
        check_upload(found.payload, method.schema(federation.model, clients[0], download))
        sent[pruning] = found.payload.part("adapter")
        assert not found.payload.part("tail")
    for name, value in sent[False].items():
        assert torch.equal(sent[True][name], value.narrow(rank_axis(name), 0, 2))


def test_a_product_that_stayed_is_not_pruned(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Strictly below: nothing moves at a rate of zero, and in the first round B = 0."""
    clients = [client(0, LARGE), client(1, SMALL)]
    federation = Federation(olmoe_backbone, hetlora(gamma=0.7), clients, tmp_path)
    for state in (state_of(adapter_of(federation.model, 3, 5), clients), federation.start()):
        uploads = federation.train(state, learning_rate=0.0)
        assert [*ranks_of(federation.method.aggregate(state, iter(uploads))).values()] == [3, 1]
        whole = [{**sent.payload.part("adapter")} for sent in uploads]
        assert [rank_of(adapter) for adapter in whole] == [2, 1]
        assert [bool(sent.payload.part("tail")) for sent in uploads] == [True, False]


OPTIMIZERS = {
    "adam": {"optimizer": "adam"},
    "adamw": {"optimizer": "adamw", "weight_decay": 0.1},
    "sgd": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.1},
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_ranks_beyond_a_clients_own_stay_zero(
    kind: str, olmoe_backbone: Backbone, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of current ranks 3, 2 and 1, all with a budget of 3, in one cohort, penalty and training together."""
    clients = [client(index, LARGE) for index in range(3)]
    federation = Federation(olmoe_backbone, hetlora(penalty_weight=0.1), clients, tmp_path)
    state = state_of(adapter_of(federation.model, 3, 5), clients)
    state = Payload({**state.tensors, **{rank_name(who): torch.tensor(3 - who.index) for who in clients}})
    stored: dict[int, list[tuple[SlotTensor, Tensor]]] = {}
    read = Cohort.read

    def spy(cohort: Cohort, slot: int) -> dict[str, Tensor]:
        stored[slot] = [(tensor, tensor.view(slot).clone()) for tensor in cohort.trainables.values()]
        return read(cohort, slot)

    monkeypatch.setattr(Cohort, "read", spy)
    settings = SETTINGS.model_copy(update={**OPTIMIZERS[kind], "steps": 4})
    uploads = federation.train(state, settings=settings, cohort=3)
    assert len(uploads) == len(stored) == 3
    for slot, rank in enumerate((3, 2, 1)):
        for tensor, value in stored[slot]:
            axis = rank_axis(tensor.name)
            own, beyond = value.narrow(axis, 0, rank), value.narrow(axis, rank, value.shape[axis] - rank)
            received = whole_adapter(uploads[slot].download)[tensor.name]
            assert (beyond == 0).all()
            assert not torch.equal(own.cpu(), received)


# Lines 6 and 7: the average


def assert_averaged(
    found: Mapping[str, Tensor],
    sent: list[dict[str, Tensor]],
    weights: Mapping[str, list[list[float]]],
    otherwise: Mapping[str, Tensor],
) -> None:
    """Asserts that every matrix is the padded average; `weights[module][matrix][client]`."""
    for name, value in found.items():
        module, axis = name.rpartition(".")[0], rank_axis(name)
        assert axis is not None
        per_matrix = value.dim() == 3
        for index in range(len(value) if per_matrix else 1):
            of = (lambda whole, at=index: whole[at]) if per_matrix else (lambda whole: whole)
            rows = [of(adapter[name]).movedim(axis, 0).tolist() for adapter in sent]
            old = of(otherwise[name]).movedim(axis, 0)
            means = padded_average(rows, weights[module][index], value.shape[axis])
            expected = torch.stack(
                [kept if row is None else torch.tensor(row) for kept, row in zip(old, means, strict=True)]
            )
            torch.testing.assert_close(of(value).movedim(axis, 0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("weighing", ["size", "client", "module"])
@pytest.mark.parametrize("ranks", [(3, 2, 1), (2, 2), (1,), (1, 3, 1)])
def test_aggregation(weighing: str, ranks: tuple[int, ...], olmoe_backbone: Backbone) -> None:
    """A rank that nobody holds keeps its global value."""
    model = olmoe_backbone.info
    options = {"weights": "size"} if weighing == "size" else {"norm_scope": weighing}
    clients = [client(index, replace(LARGE, rank=rank), 2 + 3 * index) for index, rank in enumerate(ranks)]
    sent = [adapter_of(model, rank, seed) for seed, rank in enumerate(ranks)]
    before = adapter_of(model, 3, 99)
    uploads = [upload(who, adapter=adapter) for who, adapter in zip(clients, sent, strict=True)]
    after = Payload(hetlora(**options).aggregate(state_of(before, clients), iter(uploads)).tensors).part("adapter")
    weights: dict[str, list[list[float]]] = {}
    for module, pairs in matrices(before).items():
        by_matrix = [
            [norm_of_products([matrices(adapter)[module][index]]) for adapter in sent] for index in range(len(pairs))
        ]
        whole = [norm_of_products(every_matrix(adapter)) for adapter in sent]
        sizes = [float(who.examples) for who in clients]
        weights[module] = {"module": by_matrix, "client": [whole] * len(pairs), "size": [sizes] * len(pairs)}[weighing]
    assert_averaged(after, sent, weights, before)


@pytest.mark.parametrize("scope", ["client", "module"])
def test_clients_without_a_norm_move_nothing(scope: str, olmoe_backbone: Backbone) -> None:
    """B = 0 everywhere, as if nobody had trained: no division by zero, and the same in a secure round."""
    model, clients = olmoe_backbone.info, [client(0, LARGE), client(1, MIDDLE, 9)]
    sent = [adapter_of(model, who.budget.rank, who.index) for who in clients]
    for adapter in sent:
        for name in adapter:
            adapter[name] *= not name.endswith("lora_B")
    before = adapter_of(model, 3, 99)
    uploads = [upload(who, adapter=adapter) for who, adapter in zip(clients, sent, strict=True)]
    after = hetlora(norm_scope=scope).aggregate(state_of(before, clients), iter(uploads)).part("adapter")
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_an_expert_that_one_client_trained(olmoe_backbone: Backbone) -> None:
    """By module it alone weighs there; the ranks that only the other holds keep their value and are not zeroed."""
    model, clients = olmoe_backbone.info, [client(0, LARGE), client(1, SMALL)]
    sent = [adapter_of(model, who.budget.rank, who.index) for who in clients]
    sent[0][f"{EXPERT}.lora_B"][2] = 0
    before = adapter_of(model, 3, 99)
    uploads = [upload(who, adapter=adapter) for who, adapter in zip(clients, sent, strict=True)]
    after = hetlora(norm_scope="module").aggregate(state_of(before, clients), iter(uploads)).tensors
    down = after[f"adapter/{EXPERT}.lora_A"][2]
    torch.testing.assert_close(down[:1], sent[1][f"{EXPERT}.lora_A"][2], rtol=1e-5, atol=1e-6)
    assert torch.equal(down[1:], before[f"{EXPERT}.lora_A"][2, 1:])


def test_a_tail_that_is_not_whole_counts_as_pruned(olmoe_backbone: Backbone) -> None:
    model, who = olmoe_backbone.info, client(0, LARGE)
    head, tail = adapter_of(model, 2, 0), adapter_of(model, 1, 1)
    before = state_of(adapter_of(model, 3, 99), [who])
    tail.pop(f"{QUERY}.lora_A")
    sent = upload(who, adapter=head, tail=tail)
    method = hetlora(gamma=0.7)
    expected = method.schema(model, who, method.download(before, model, who))
    check_upload(sent.payload, expected)
    after = method.aggregate(before, iter([sent])).tensors
    assert after[rank_name(who)] == 2
    torch.testing.assert_close(after[f"adapter/{QUERY}.lora_A"][:2], head[f"{QUERY}.lora_A"])
    assert torch.equal(after[f"adapter/{QUERY}.lora_A"][2], before.tensors[f"adapter/{QUERY}.lora_A"][2])


@pytest.mark.parametrize("scope", ["client", "module"])
def test_the_norm_of_an_adapter_beyond_the_range_of_fp32(scope: str, olmoe_backbone: Backbone) -> None:
    """A client that went far astray, its values finite, weighs what it weighs and stops nobody's round."""
    model, who = olmoe_backbone.info, [client(0, LARGE), client(1, LARGE)]
    sent = [{name: value * size for name, value in adapter_of(model, 3, 0).items()} for size in (1e13, 3e13)]
    uploads = [upload(one, adapter=adapter) for one, adapter in zip(who, sent, strict=True)]
    found = hetlora(norm_scope=scope).aggregate(state_of(adapter_of(model, 3, 99), who), iter(uploads)).tensors
    for name, value in adapter_of(model, 3, 0).items():
        torch.testing.assert_close(
            found[f"adapter/{name}"] / 1e13, (1 * value + 9 * 3 * value) / 10, rtol=1e-4, atol=1e-5
        )


# What it equals, and what it costs


def test_the_ranks_are_observed(olmoe_backbone: Backbone) -> None:
    state = Payload({f"client/{index}/rank": torch.tensor(rank) for index, rank in ((10, 1), (2, 3))})
    (seen,) = hetlora().observe(state, olmoe_backbone.info)
    assert (seen.name, seen.values.tolist(), list(seen.rows)) == ("rank", [3.0, 1.0], ["client 2", "client 10"])
