"""FedIT: the averages of Eq. 3-4, and LoRA with a rank by budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.core.accounting import bytes_by_part
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedit import FedIT, FedITSettings
from fedguild.model.backbone import Backbone
from fedguild.server.aggregation import rank_axis
from fedguild.server.validation import check_upload
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.methods.llama import llama_1b
from tests.oracles.aggregation import mean_over_holders, weighted_mean


def fedit(**options: object) -> FedIT:
    return FedIT(FedITSettings(**{"rank": 3, "alpha": 6.0, **options}))


@pytest.mark.parametrize(("weights", "expected"), [("size", 5.0), ("uniform", 4.0)])
def test_two_clients_by_hand(weights: str, expected: float) -> None:
    """|D_1| = 10, |D_2| = 30, A_1 = 2, A_2 = 6: (10 · 2 + 30 · 6) / 40 = 5, and (2 + 6) / 2 = 4."""
    name = "model.layers.0.self_attn.q_proj.lora_A"
    sent = [
        upload(client(i, LARGE, n), adapter={name: torch.tensor([[a]])}) for i, n, a in ((0, 10, 2.0), (1, 30, 6.0))
    ]
    method = fedit(rank=1, weights=weights)
    assert (
        method.aggregate(Payload.of({"adapter": {name: torch.zeros(1, 1)}}), iter(sent)).part("adapter")[name].item()
        == expected
    )


@pytest.mark.parametrize("clients", [1, 2, 5])
@pytest.mark.parametrize("weights", ["size", "uniform"])
def test_aggregation(weights: str, clients: int, olmoe_backbone: Backbone) -> None:
    method, model = fedit(weights=weights), olmoe_backbone.info
    plan = method.plan(model, LARGE)
    before = random_tensors(model, plan, 99)
    sent = [upload(client(i, LARGE, 2 + 3 * i), adapter=random_tensors(model, plan, i)) for i in range(clients)]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    factors = [torch.tensor(float(s.client.examples) if weights == "size" else 1.0) for s in sent]
    for name, global_value in before.items():
        values = [s.payload.tensors[f"adapter/{name}"] for s in sent]
        torch.testing.assert_close(found[name], weighted_mean(values, factors, global_value), rtol=1e-5, atol=1e-6)


def test_every_budget_trains_the_same_without_ranks(olmoe_backbone: Backbone) -> None:
    plans = [fedit().plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE, SMALL)]
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0].lora.rank, plans[0].lora.scale) == (3, 2.0)
    assert (plans[0].active_experts, len(plans[0].parts)) == (None, 1)


def test_ranks_by_budget_share_one_scale(olmoe_backbone: Backbone) -> None:
    own = [fedit(active_experts="budget").plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE, SMALL)]
    assert [plan.active_experts for plan in own] == [4, 2, 1]
    plans = [fedit(rank_by_budget=True).plan(olmoe_backbone.info, budget) for budget in (LARGE, MIDDLE, SMALL)]
    assert [plan.active_experts for plan in plans] == [None, None, None]
    assert [plan.rank for plan in plans] == [3, 2, 1]
    assert [plan.lora.scale for plan in plans] == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("weights", ["size", "uniform"])
@pytest.mark.parametrize("budgets", [(LARGE, MIDDLE, SMALL), (SMALL, SMALL), (MIDDLE,), (SMALL, LARGE, LARGE, MIDDLE)])
def test_each_rank_is_averaged_over_its_holders(
    weights: str, budgets: tuple[Budget, ...], olmoe_backbone: Backbone
) -> None:
    method, model = fedit(rank_by_budget=True, weights=weights), olmoe_backbone.info
    before = random_tensors(model, method.plan(model, LARGE), 99)
    sent = [
        upload(client(i, budget, 2 + 3 * i), adapter=random_tensors(model, method.plan(model, budget), i))
        for i, budget in enumerate(budgets)
    ]
    found = method.aggregate(Payload.of({"adapter": before}), iter(sent)).part("adapter")
    factors = [float(s.client.examples) if weights == "size" else 1.0 for s in sent]
    for name, global_value in before.items():
        axis = rank_axis(name)
        assert axis is not None
        held = [s.payload.tensors[f"adapter/{name}"].movedim(axis, 0).flatten(1).tolist() for s in sent]
        rows = global_value.movedim(axis, 0).flatten(1)
        means = mean_over_holders(held, factors, 3)
        expected = torch.stack(
            [old if row is None else torch.tensor(row) for old, row in zip(rows, means, strict=True)]
        )
        torch.testing.assert_close(found[name].movedim(axis, 0).flatten(1), expected, rtol=1e-5, atol=1e-6)


def test_the_first_ranks_go_down(olmoe_backbone: Backbone) -> None:
    method, model = fedit(rank_by_budget=True), olmoe_backbone.info
    state = Payload.of({"adapter": random_tensors(model, method.plan(model, LARGE), 0)})
    down = method.download(state, model, client(0, MIDDLE)).part("adapter")
    query, expert = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.experts.down_proj"
    assert torch.equal(down[f"{query}.lora_A"], state.part("adapter")[f"{query}.lora_A"][:2])
    assert torch.equal(down[f"{query}.lora_B"], state.part("adapter")[f"{query}.lora_B"][:, :2])
    assert torch.equal(down[f"{expert}.lora_A"], state.part("adapter")[f"{expert}.lora_A"][:, :2])
    assert torch.equal(down[f"{expert}.lora_B"], state.part("adapter")[f"{expert}.lora_B"][:, :, :2])
    assert down.keys() == state.part("adapter").keys()


def test_a_budget_is_deployed_at_its_rank(olmoe_backbone: Backbone) -> None:
    model = olmoe_backbone.info
    for by_budget, rank in ((False, 3), (True, 1)):
        method = fedit(rank_by_budget=by_budget)
        state = method.start(model, [LARGE, SMALL], torch.Generator().manual_seed(0))
        for deployment in (
            method.deploy(state, model, SMALL),
            method.personalize(state, model, client(0, SMALL), Payload()),
        ):
            assert deployment.plan.rank == rank
            assert {value.shape[rank_axis(name)] for name, value in deployment.tensors.items()} == {rank}


@pytest.mark.parametrize("by_budget", [False, True])
def test_a_clients_own_adapter_is_from_before_the_average(
    by_budget: bool, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """FedIT-FT: client 1 sits round 2 out and keeps that of round 1; client 2 never took part."""
    clients = [client(0, LARGE), client(1, SMALL), client(2, MIDDLE), client(3, LARGE)]
    method = fedit(personal=True, rank_by_budget=by_budget)
    federation = Federation(olmoe_backbone, method, clients, tmp_path)
    state, sent = federation.start(), {}
    for round, who in ((1, (0, 1)), (2, (0, 3))):
        uploads = federation.train(state, round, who=who)
        sent |= {part.client.index: part.payload.part("adapter") for part in uploads}
        state = method.aggregate(state, uploads)
    for who in clients:
        own = method.personalize(state, federation.model, who, federation.memory.load(who.name, 3))
        shared = method.deploy(state, federation.model, who.budget)
        expected = sent.get(who.index, shared.tensors)
        assert own.plan == shared.plan
        assert own.tensors.keys() == expected.keys()
        assert all(torch.equal(own.tensors[name], value) for name, value in expected.items())
        received = method.personalize(state, federation.model, who, Payload())
        assert all(torch.equal(received.tensors[name], value) for name, value in shared.tensors.items())
    assert any(not torch.equal(sent[0][name], value) for name, value in state.part("adapter").items())


def test_the_personal_model_changes_nothing_that_travels(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    runs = []
    for personal in (False, True):
        federation = Federation(olmoe_backbone, fedit(personal=personal), [client(0, LARGE)], tmp_path / str(personal))
        runs.append(federation.train(federation.start())[0].payload.tensors)
    assert all(torch.equal(runs[0][name], value) for name, value in runs[1].items())


def test_the_traffic_of_a_round_on_llama() -> None:
    """FedAMoLE, Table 4, r = 8 on q and v: 16 · 8 · (2048 + 2048 + 2048 + 512) values, in bf16 1.625 MiB."""
    method = fedit(rank=8, targets=("q_proj", "v_proj"))
    shapes = method.expected_upload(llama_1b(), client(0, LARGE), Payload())
    sent = {name: torch.empty(shape, device="meta", dtype=torch.bfloat16) for name, shape in shapes.items()}
    assert bytes_by_part(Payload(sent))["adapter"] == 1.625 * 2**20


@pytest.mark.parametrize("by_budget", [False, True])
def test_a_round_of_mixed_budgets(by_budget: bool, olmoe_backbone: Backbone, tmp_path: Path) -> None:
    clients = [client(0, LARGE, 4), client(1, SMALL, 3), client(2, MIDDLE, 5)]
    method = fedit(rank_by_budget=by_budget, targets=("attention", "router", "experts"))
    federation = Federation(olmoe_backbone, method, clients, tmp_path)
    state = federation.start()
    uploads = federation.train(state)
    for sent in uploads:
        check_upload(sent.payload, method.expected_upload(federation.model, sent.client, Payload()), client="c")
        changed = [n for n, v in sent.payload.part("adapter").items() if n.endswith("lora_B") and v.abs().max() > 0]
        assert len(changed) == len([n for n in state.part("adapter") if n.endswith("lora_B")])
    after = method.aggregate(state, uploads).part("adapter")
    assert {name: value.shape for name, value in after.items()} == {
        n: v.shape for n, v in state.part("adapter").items()
    }
    assert not list(tmp_path.rglob("*.memory"))


def test_the_start_changes_nothing(olmoe_backbone: Backbone) -> None:
    state = fedit().start(olmoe_backbone.info, [LARGE], torch.Generator().manual_seed(0))
    for name, value in state.part("adapter").items():
        assert (value.abs().max() == 0) == name.endswith("lora_B")


def test_a_dense_model(llama_backbone: Backbone, tmp_path: Path) -> None:
    method = fedit(targets=("attention", "mlp"))
    federation = Federation(llama_backbone, method, [client(0, LARGE), client(1, SMALL)], tmp_path)
    for sent in federation.train(federation.start()):
        check_upload(sent.payload, method.expected_upload(federation.model, sent.client, Payload()), client="c")


# bad input


@pytest.mark.parametrize("rank", [0, 4])
def test_a_budgets_rank_beyond_the_methods(rank: int, olmoe_backbone: Backbone) -> None:
    method = fedit(rank_by_budget=True)
    told = rf"Budget 'x' has rank {rank}, but the global adapter has rank 3\.(.|\n)*from 1 to 3"
    with pytest.raises(ConfigError, match=told):
        method.start(olmoe_backbone.info, [LARGE, Budget("x", 4, rank)], torch.Generator())
    fedit().plan(olmoe_backbone.info, Budget("x", 4, rank))


def test_experts_on_a_dense_model(llama_backbone: Backbone) -> None:
    with pytest.raises(
        ConfigError, match=r"target\(s\) experts name no layer of tiny llama(.|\n)*Known: attention, mlp"
    ):
        fedit().start(llama_backbone.info, [LARGE], torch.Generator())


@pytest.mark.parametrize(
    ("option", "value", "told"),
    [
        ("rank", 0, r"method\.rank: .*got 0"),
        ("alpha", 0, r"method\.alpha: .*greater than 0, got 0"),
        ("weights", "n", r"method\.weights: .*'size' or 'uniform', got 'n'"),
    ],
)
def test_options_out_of_range(option: str, value: object, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        build_method("fedit", {option: value})
