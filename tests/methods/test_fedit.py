"""FedIT: the averages of Eq. 3-4, and LoRA with a rank by budget."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.methods.fedit import FedIT, FedITSettings
from fedguild.model.backbone import Backbone
from fedguild.runs.promises import require_equal
from fedguild.server.aggregation import rank_axis
from fedguild.server.method import Roster, client_model
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client, random_tensors, upload
from tests.methods.test_matrix import backbone_of
from tests.oracles.aggregation import mean_over_holders


def fedit(**options: object) -> FedIT:
    return FedIT(FedITSettings(**{"rank": 3, "alpha": 6.0, **options}))


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
        state = method.start(model, Roster([LARGE, SMALL]), torch.Generator().manual_seed(0))
        for deployment in (
            method.deploy(state, model, SMALL),
            client_model(method, state, model, client(0, SMALL), Payload()),
        ):
            assert deployment.plan.rank == rank
            assert {value.shape[rank_axis(name)] for name, value in deployment.tensors.items()} == {rank}


PERSONAL = {
    "fedit": {"rank": 3},
    "fedit by rank": {"rank": 3, "rank_by_budget": True},
    "fedavg": {"rank": 2, "gate": "lora"},
    "fedprompt": {"tokens": 3},
}


@pytest.mark.parametrize("label", PERSONAL)
def test_a_clients_own_adapter_is_from_before_the_average(label: str, tmp_path: Path) -> None:
    """Of all methods with `personal`. Client 1 sits round 2 out and keeps that of round 1; client 2 never took part."""
    clients = [client(0, LARGE), client(1, SMALL), client(2, MIDDLE), client(3, LARGE)]
    name = label.partition(" ")[0]
    method = build_method(name, {**PERSONAL[label], "personal": True})
    federation = Federation(backbone_of(name), method, clients, tmp_path)
    state, sent = federation.start(), {}
    for round, who in ((1, (0, 1)), (2, (0, 3))):
        uploads = federation.train(state, round, who=who)
        sent |= {part.client.index: part.payload.part("adapter") for part in uploads}
        state = method.aggregate(state, uploads)
    for who in clients:
        own = client_model(method, state, federation.model, who, federation.memory.load(who.name, 3))
        shared = method.deploy(state, federation.model, who.budget)
        assert own.plan == shared.plan
        require_equal(own.tensors, sent.get(who.index, shared.tensors))
        received = client_model(method, state, federation.model, who, Payload())
        require_equal(received.tensors, shared.tensors)
    assert any(not torch.equal(sent[0][name], value) for name, value in state.part("adapter").items())


# bad input


@pytest.mark.parametrize("rank", [0, 4])
def test_a_budgets_rank_beyond_the_methods(rank: int, olmoe_backbone: Backbone) -> None:
    method = fedit(rank_by_budget=True)
    told = rf"Budget 'x' has rank {rank}, but the global adapter has rank 3\.(.|\n)*from 1 to 3"
    with pytest.raises(ConfigError, match=told):
        method.start(olmoe_backbone.info, Roster([LARGE, Budget("x", 4, rank)]), torch.Generator())
    fedit().plan(olmoe_backbone.info, Budget("x", 4, rank))
