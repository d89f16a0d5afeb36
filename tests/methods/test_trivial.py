"""Trivial: each budget's federation is the FedIT run of its rank, and they do not meet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget
from fedguild.core.accounting import bytes_by_part
from fedguild.core.payload import Payload
from fedguild.methods.fedit import FedIT
from fedguild.methods.trivial import Trivial, TrivialSettings, ranks
from fedguild.model.backbone import Backbone
from fedguild.server.method import Method, Roster, client_model, excerpt_of
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client

CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 7), client(2, MIDDLE, 3), client(3, SMALL, 1)]
TARGETS = ("attention", "router", "experts")
QUERY = "model.layers.0.self_attn.q_proj.lora_A"


def trivial(**options: object) -> Trivial:
    return Trivial(TrivialSettings(**options))


def fedit(rank: int, **options: object) -> FedIT:
    return FedIT(FedIT.Settings(**{"rank": rank, "alpha": 16.0, "targets": TARGETS, **options}))


def delivered(method: Method, backbone: Backbone, state: Payload, folder: Path) -> list:
    return Federation(backbone, method, CLIENTS, folder).deliver(state)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("budget", [LARGE, MIDDLE, SMALL], ids=lambda budget: budget.name)
def test_a_budgets_federation_is_fedit_at_its_rank(
    budget: Budget, dropout: float, olmoe_backbone: Backbone, tmp_path: Path
) -> None:
    """Bit by bit, over two rounds, from the same start: uploads, and the global model."""
    ours = Federation(olmoe_backbone, trivial(dropout=dropout), CLIENTS, tmp_path / "ours")
    method = fedit(budget.rank, dropout=dropout)
    theirs = Federation(olmoe_backbone, method, CLIENTS, tmp_path / "theirs")
    state = ours.start()
    other = Payload.of({"adapter": state.part(f"adapter/{budget.name}")})
    for number in (1, 2):
        sent, expected = ours.train(state, number), theirs.train(other, number)
        for mine, plain in zip(sent, expected, strict=True):
            own, tensors = mine.payload.part(f"adapter/{budget.name}"), plain.payload.part("adapter")
            assert own.keys() == tensors.keys()
            assert all(torch.equal(own[name], value) for name, value in tensors.items())
        state, other = ours.method.aggregate(state, sent), method.aggregate(other, expected)
    deployed, plain = ours.method.deploy(state, ours.model, budget), method.deploy(other, theirs.model, budget)
    assert deployed.plan == plain.plan
    assert deployed.tensors.keys() == plain.tensors.keys()
    assert all(torch.equal(deployed.tensors[name], value) for name, value in plain.tensors.items())


def test_every_budget_is_deployed_with_its_own_adapter(olmoe_backbone: Backbone) -> None:
    method, model = trivial(), olmoe_backbone.info
    state = method.start(model, Roster([LARGE, MIDDLE, SMALL, SMALL]), torch.Generator().manual_seed(0))
    assert ranks(state.part("adapter")) == {"large": 3, "middle": 2, "small": 1}
    for budget in (LARGE, MIDDLE, SMALL):
        for model_of in (
            method.deploy(state, model, budget),
            client_model(
                method, excerpt_of(method, state, model, client(0, budget)), model, client(0, budget), Payload()
            ),
        ):
            assert (model_of.plan.rank, model_of.plan.lora.scale) == (budget.rank, 16.0 / budget.rank)
            assert model_of.plan.active_experts is None
            assert all(
                value is state.part("adapter")[f"{budget.name}/{name}"] for name, value in model_of.tensors.items()
            )
    first = [state.part(f"adapter/{name}")[QUERY][0] for name in ("large", "middle")]
    assert not torch.equal(*first)


def test_what_a_client_does_is_counted_for_all_budgets(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Steps, tokens, examples and bytes are those of the three FedIT runs together, the loss is their mean."""
    method, model = trivial(), olmoe_backbone.info
    state = method.start(model, Roster([LARGE, MIDDLE, SMALL]), torch.Generator().manual_seed(0))
    mine = delivered(method, olmoe_backbone, state, tmp_path / "all")
    single = [
        delivered(
            fedit(budget.rank),
            olmoe_backbone,
            Payload.of({"adapter": state.part(f"adapter/{budget.name}")}),
            tmp_path / budget.name,
        )
        for budget in (LARGE, MIDDLE, SMALL)
    ]
    for index, delivery in enumerate(mine):
        reports = [runs[index].report for runs in single]
        assert delivery.report.steps == sum(report.steps for report in reports) == 6
        assert delivery.report.tokens == sum(report.tokens for report in reports)
        assert delivery.report.examples == sum(report.examples for report in reports)
        assert delivery.report.loss == pytest.approx(sum(report.loss for report in reports) / 3)
        assert delivery.report.seconds > 0
        mean = torch.stack([runs[index].frequency for runs in single]).mean(dim=0)
        torch.testing.assert_close(delivery.frequency, mean)
        sent = [bytes_by_part(runs[index].upload)["adapter"] for runs in single]
        assert bytes_by_part(delivery.upload)["adapter"] == sum(sent)
    assert olmoe_backbone.runtime.current is None
