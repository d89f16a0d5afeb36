"""HFedMoE: importance and choice against the equations, averages by hand, FedIT where nothing is left out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.client.budget import Budget
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.methods.hfedmoe import PREFERENCE, USAGE, HFedMoe, HFedMoeSettings
from fedguild.methods.hfedmoe.importance import Importance, within_budget
from fedguild.model.backbone import Backbone
from fedguild.model.moe.view import Routing
from fedguild.server.method import Roster
from tests.methods.federation import LARGE, SMALL, Federation, client, upload
from tests.oracles import hfedmoe as oracle

PATHS = [f"model.layers.{layer}.mlp.experts" for layer in (0, 1)]
ROUTERS = [f"model.layers.{layer}.mlp.gate" for layer in (0, 1)]


def hfedmoe(**options: Any) -> HFedMoe:
    return HFedMoe(HFedMoeSettings(**{"rank": 2, **options}))


def routing(layer: int, logits: Tensor, top_k: int, slot: Tensor, keep: Tensor | None) -> Routing:
    p = logits.softmax(dim=1)
    return Routing(layer, logits, logits, p.topk(top_k).values, p.topk(top_k).indices, slot, keep)


@pytest.mark.parametrize("rank_by", ["information", "importance"])
@pytest.mark.parametrize(("scope", "shares"), [("model", [0.3, 1.0]), ("layer", [0.4, 0.2])])
def test_scores_and_choice_are_those_of_the_equations(
    olmoe_backbone: Backbone, rank_by: Any, scope: Any, shares: Any
) -> None:
    """Two slots, two layers of 8 experts, two passes and padding in one batch, then a second batch."""
    layers, rng = olmoe_backbone.info.moe, torch.Generator().manual_seed(1)
    found = Importance(layers, 2, 0.3, 0.4, rank_by)
    slot = torch.tensor([0, 0, 0, 1, 1])
    keep = torch.tensor([True, True, False, True, True])
    scores: list[list[list[float]]] = []
    gates: dict[tuple[int, int], list[list[float]]] = {(s, i): [] for s in (0, 1) for i in (0, 1)}
    for _batch in range(2):
        batch: dict[tuple[int, int], list[list[float]]] = {key: [] for key in gates}
        union: dict[tuple[int, int], set[int]] = {key: set() for key in gates}
        for _pass in range(2):
            for index in (0, 1):
                logits = 2 * torch.randn(5, 8, generator=rng)
                seen = routing(index, logits, 2, slot, keep)
                found.observe(seen)
                for token in keep.nonzero().flatten().tolist():
                    key = (int(slot[token]), index)
                    batch[key].append(logits[token].double().softmax(dim=0).tolist())
                    union[key] |= set(seen.indices[token].tolist())
        chosen = found.close_step(shares, scope)
        for which, share in enumerate(shares):
            values, allowed = [], []
            for index in (0, 1):
                of_layer = batch[which, index]
                for expert in range(8):
                    value = oracle.information(of_layer, expert, 0.3, 0.4)
                    values.append(value if rank_by == "information" else oracle.importance(of_layer, expert, 0.3))
                    if expert in union[which, index]:
                        allowed.append(8 * index + expert)
            picked = {
                8 * index + expert for index in (0, 1) for expert in chosen[index][which].nonzero().flatten().tolist()
            }
            if scope == "model":
                assert picked == oracle.best_set(values, allowed, int(share * 16))
            else:
                for index in (0, 1):
                    own = [one for one in allowed if one // 8 == index]
                    assert {one for one in picked if one // 8 == index} == oracle.best_set(values, own, int(share * 8))
        scores.append([[oracle.importance(batch[0, index], e, 0.3) for e in range(8)] for index in (0, 1)])
        for key, seen_gates in batch.items():
            gates[key] += seen_gates
    for index in (0, 1):
        expected = [oracle.usage(gates[1, index], expert) for expert in range(8)]
        torch.testing.assert_close(found.usage(1)[index], torch.tensor(expected))
        means = [(scores[0][index][expert] + scores[1][index][expert]) / 2 for expert in range(8)]
        torch.testing.assert_close(found.mean_score(0)[index], torch.tensor(means))


def test_a_slot_without_tokens_and_a_router_that_is_certain(olmoe_backbone: Backbone) -> None:
    """G = 0 and 1 give 0 log 0 = 0, no NaN; whoever has finished chooses nothing and counts no batch."""
    found = Importance(olmoe_backbone.info.moe, 2, 0.5, 0.1)
    certain = torch.full((3, 8), -200.0)
    certain[:, 5] = 200.0
    for index in (0, 1):
        found.observe(routing(index, certain, 1, torch.zeros(3, dtype=torch.int64), None))
    chosen = found.close_step([0.5, 0.5], "model")
    assert [one.nonzero().tolist() for one in chosen] == [[[0, 5]], [[0, 5]]]
    assert not any(bool(one.any()) for one in (*found.usage(1), *found.mean_score(1)))
    assert found.usage(0)[0].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]


def test_an_expert_of_negative_information_is_left_out_and_ties_go_to_the_first() -> None:
    values = torch.tensor([[0.3, -0.1, 0.3, float("-inf")], [0.2, 0.1, 0.4, 0.3]])
    assert within_budget(values, [1.0, 0.5]).tolist() == [[True, False, True, False], [False, False, True, True]]
    assert within_budget(values[:1], [0.1]).tolist() == [[True, False, False, False]]
    assert within_budget(values[:1], [0.49]).tolist() == [[True, False, False, False]], "no more than the budget"


def test_aggregation_is_that_of_the_equations(olmoe_backbone: Backbone) -> None:
    """Three clients of unequal sizes, one without examples; every number of an expert and of a router."""
    method, rng, sizes = (
        hfedmoe(targets=["experts", "router"], threshold=1.0),
        torch.Generator().manual_seed(5),
        (3, 0, 8),
    )
    before = method.start(olmoe_backbone.info, Roster([LARGE]), rng).part(ADAPTER)
    usages, scores, sent = [], [], []
    for index, size in enumerate(sizes):
        used = [torch.rand(8, generator=rng).softmax(dim=0) for _ in PATHS]
        score = [torch.rand(8, generator=rng) for _ in PATHS]
        preferred = [u * s * method.counts(u) for u, s in zip(used, score, strict=True)]
        tensors = {name: torch.randn(value.shape, generator=rng) for name, value in before.items()}
        usages.append([one.tolist() for one in used])
        scores.append([one.tolist() for one in score])
        parts = {USAGE: dict(zip(PATHS, used, strict=True)), PREFERENCE: dict(zip(ROUTERS, preferred, strict=True))}
        sent.append(upload(client(index, LARGE, size), adapter=tensors, **parts))
    found = method.aggregate(Payload.of({ADAPTER: before}), iter(sent)).part(ADAPTER)
    alphas = [
        sum(oracle.router_weight(u, s, 1 / 8) for u, s in zip(used, score, strict=True)) if size else 0.0
        for used, score, size in zip(usages, scores, sizes, strict=True)
    ]
    for name, value in before.items():
        trained, layer = [one.payload.part(ADAPTER)[name] for one in sent], int(name.split(".")[2])
        if ".experts." in name:
            for expert in range(8):
                used = [one[layer][expert] for one in usages]
                numbers = [one[expert, 0, 0].item() for one in trained]
                expected = oracle.expert_mean(numbers, used, sizes, 1 / 8, value[expert, 0, 0].item())
                assert found[name][expert, 0, 0].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)
        else:
            expected = sum(a * x[0, 0].item() for a, x in zip(alphas, trained, strict=True)) / sum(alphas)
            assert found[name][0, 0].item() == pytest.approx(expected, rel=1e-5)


def test_a_step_moves_no_more_experts_than_the_budget_allows(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Weight decay and Adam included: a client whose share is a quarter of 16 experts, and one with all."""
    method = hfedmoe(experts={"small": 0.25})
    federation = Federation(olmoe_backbone, method, [client(0, SMALL, 3), client(1, LARGE, 3)], tmp_path)
    settings = TrainingSettings(optimizer="adamw", weight_decay=0.1, learning_rate=0.1, batch_size=3, steps=1)
    state, moved = federation.start(), {}
    for sent in federation.train(state, settings=settings):
        before, after = state.part(ADAPTER), sent.payload.part(ADAPTER)
        moved[sent.client.index] = {
            (name.rsplit(".", 2)[0], expert)
            for name in before
            if ".experts." in name
            for expert in range(8)
            if not torch.equal(before[name][expert], after[name][expert])
        }
    assert len(moved[0]) == 4
    assert len(moved[1]) > 8


def test_a_budgets_share() -> None:
    """Its active experts over the model's 4, unless `experts` says otherwise; unknown names are refused."""

    class Model:
        top_k = 4

    method: Any = hfedmoe(experts={"large": 0.5})
    assert [method.share(Model(), budget) for budget in (LARGE, SMALL)] == [0.5, 0.25]
    assert method.share(Model(), Budget("middle", 2, 2)) == 0.5


def test_an_unknown_budget_is_refused(olmoe_backbone: Backbone) -> None:
    with pytest.raises(ConfigError, match="no budget is called tiny"):
        hfedmoe(experts={"tiny": 0.5}).start(olmoe_backbone.info, Roster([LARGE]), torch.Generator())
