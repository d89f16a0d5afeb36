"""Records of a run: scores of budgets and clients, costs, and an untouched backbone."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from fedguild.config import Config
from fedguild.core.errors import CheckpointError
from fedguild.measuring.costs.flops import cost
from fedguild.measuring.log.activity import ActivityLog
from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    Record,
    RoundRecord,
    RoutingRecord,
    RunLog,
)
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from fedguild.runs.experiment import RunResult, restore
from fedguild.runs.scoring import evaluate_state
from tests.runs.runs import comparable, small_config

FEDIT = "method={name: fedit, rank: 3, targets: [q_proj, experts]}"


def run(config: Config, folder: Path) -> tuple[RunResult, list[Record]]:
    """Runs a config; returns its result and its records."""
    return experiment.run(config, folder), RunLog(folder).read()


def of_kind(records: list[Any], kind: type, **facts: object) -> list[Any]:
    return [r for r in records if isinstance(r, kind) and all(getattr(r, key) == value for key, value in facts.items())]


@pytest.fixture(scope="module")
def personal(olmoe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two rounds, half of the clients in each, that scores every client on its validation split."""
    folder = tmp_path_factory.mktemp("personal")
    config = small_config(
        olmoe_folder,
        "federation.rounds=2",
        "federation.client_fraction=0.5",
        "training.learning_rate=0.05",
        "evaluation.clients=true",
        "evaluation.split=validation",
        "evaluation.perplexity=true",
    )
    run(config, folder)
    return folder


@pytest.fixture
def scored(personal: Path) -> list[Record]:
    return RunLog(personal).read()


def test_mtal_is_the_mean_over_the_clients_and_mean_that_over_the_budgets(personal: Path, scored: list[Record]) -> None:
    state = restore(personal)[0]
    sizes = [len(client.validation) for client in state.data.clients]
    for number in range(3):
        clients = of_kind(scored, EvaluationRecord, scope="client", round=number)
        budgets = of_kind(scored, EvaluationRecord, scope="budget", round=number)
        summary = {r.name: r.score for r in of_kind(scored, EvaluationRecord, scope="summary", round=number)}
        assert [record.name for record in clients] == [f"client-00{index}" for index in range(4)]
        assert [record.examples for record in clients] == sizes
        assert [record.examples for record in budgets] == [sum(sizes)] * 2
        assert {record.split for record in clients + budgets} == {"validation"}
        assert [record.active_experts for record in clients] == [4, 1, 4, 1]
        assert summary == {
            "mtal": pytest.approx(fmean(record.score for record in clients)),
            "mean": pytest.approx(fmean(record.score for record in budgets)),
        }
        assert all(record.metrics["perplexity"] > 1 for record in clients + budgets)


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, torch.Tensor]]:
    """Every adapter that is loaded into a slot from now on."""
    seen: list[dict[str, torch.Tensor]] = []
    original = SlotModel.load

    def load(self: SlotModel, slot: int, tensors: dict[str, torch.Tensor]) -> None:
        seen.append(dict(tensors))
        original(self, slot, tensors)

    monkeypatch.setattr(SlotModel, "load", load)
    return seen


def test_a_client_is_scored_with_its_own_rescaler(personal: Path, loaded: list[dict[str, torch.Tensor]]) -> None:
    done, state, number = restore(personal)
    evaluate_state(done, state, number)
    budgets, clients = loaded[:2], loaded[2:]
    for client, adapter in zip(done.clients, clients, strict=True):
        kept = done.memory.load(client.name, number + 1).tensors
        mean = budgets[[budget.name for budget in done.budgets].index(client.budget.name)]
        scales = {name: value for name, value in adapter.items() if name.endswith("output_scale")}
        assert len(scales) == 2
        for name, value in scales.items():
            assert torch.equal(value, kept.get(name, mean[name]))
        assert all(torch.equal(adapter[name], mean[name]) for name in adapter.keys() - scales.keys())
    asked = {i for record in of_kind(RunLog(personal).read(), RoundRecord) for i in record.participants}
    assert {client.index for client in done.clients if done.memory.load(client.name, 9).tensors} == asked
    assert len(asked) > 1


@pytest.mark.parametrize("active", ["budget", "method"])
@pytest.mark.parametrize("method", ["flame", "fedit"])
def test_budgets_are_scored_at_their_own_active_experts_or_at_the_methods(olmoe_folder, tmp_path, method, active):
    overrides = ["federation.rounds=1", f"evaluation.active_experts={active}", *([FEDIT] if method == "fedit" else [])]
    _, records = run(small_config(olmoe_folder, *overrides), tmp_path)
    large, small = of_kind(records, EvaluationRecord, scope="budget", round=1)
    as_trained = (4, 4) if method == "fedit" and active == "method" else (4, 1)
    assert (large.active_experts, small.active_experts) == as_trained
    info = restore(tmp_path)[0].backbone.info
    saved = 3 * sum(3 * layer.hidden * layer.width for layer in info.moe)
    gap = large.inference_flops_per_token - small.inference_flops_per_token
    assert gap == (0 if as_trained == (4, 4) else 2 * saved)


def test_scoring_again_gives_the_recorded_scores(personal: Path, scored: list[Record]) -> None:
    again = experiment.evaluate(personal, split="validation")
    last = of_kind(scored, EvaluationRecord, scope="budget", round=2)
    assert again.scores == {record.name: record.score for record in last}
    assert (again.folder, again.report) == (personal, personal / "report.html")
    assert experiment.evaluate(personal, round=1, split="validation").rounds == 1
    with pytest.raises(CheckpointError, match="holds no checkpoint of round 7"):
        experiment.evaluate(personal, round=7)
    done, state, number = restore(personal, 1)
    assert comparable(evaluate_state(done, state, number)) == comparable(of_kind(scored, EvaluationRecord, round=1))


def test_a_run_without_a_complete_round_says_so(personal: Path, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_bytes((personal / "config.yaml").read_bytes())
    with pytest.raises(CheckpointError, match="has no complete round yet") as caught:
        restore(tmp_path)
    assert f"fedguild resume {tmp_path}" in caught.value.hint


def test_costs_follow_from_what_each_client_did(personal: Path, scored: list[Record]) -> None:
    done = restore(personal)[0]
    info = done.backbone.info
    for record in of_kind(scored, ClientRecord):
        client = done.clients[record.client]
        plan = done.method.plan(info, client.budget)
        assert (record.budget, record.active_experts, record.rank) == (client.budget.name, plan.active_experts, 3)
        assert (record.steps, record.examples) == (2, len(done.data.clients[record.client].train))
        context = max(1, round(record.tokens / (2 * done.config.training.batch_size)))
        assert record.training_flops == cost(info, plan).training_flops(record.tokens, context)
        assert record.upload_bytes > record.download_bytes > 0
        assert record.upload_parts.keys() == {"adapter", "header", "rescaler", "routing"}
        assert sum(record.upload_parts.values()) == record.upload_bytes


@pytest.mark.parametrize("checkpointing", [False, True])
def test_costs_have_the_passes_beside_the_training(olmoe_folder: Path, tmp_path: Path, checkpointing: bool) -> None:
    """FedAlign-MoE measures its routing in one more pass over a client's examples, few as they are here."""
    overrides = ("federation.rounds=1", f"model.gradient_checkpointing={str(checkpointing).lower()}")
    config = small_config(olmoe_folder, *overrides, "method={name: fedalign-moe, rank: 3}")
    records = of_kind(run(config, tmp_path)[1], ClientRecord)
    done = restore(tmp_path)[0]
    encoded = done.encoded
    for record in records:
        costs = cost(done.backbone.info, done.method.plan(done.backbone.info, done.clients[record.client].budget))
        context = max(1, round(record.tokens / (2 * config.training.batch_size)))
        read = sum(len(example.input_ids) for example in encoded[record.client])
        trained = costs.training_flops(record.tokens, context, checkpointing=checkpointing)
        expected = trained + costs.forward_flops(read, context)
        assert record.training_flops == expected


def test_routing_is_recorded_for_the_clients_that_trained(scored: list[Record]) -> None:
    for record in of_kind(scored, RoutingRecord):
        (asked,) = [r.participants for r in of_kind(scored, RoundRecord, round=record.round)]
        assert record.clients == asked
        for client, layers in zip(record.clients, record.frequency, strict=True):
            assert [sum(layer) for layer in layers] == pytest.approx([(4, 1)[client % 2]] * 2, abs=1e-4)


def test_what_the_run_did_is_in_its_activity(personal: Path, scored: list[Record]) -> None:
    events = [json.loads(line) for line in (personal / ActivityLog.FILE).read_text().splitlines()]
    assert (events[0]["event"], events[-1]["event"]) == ("begun", "ended")
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert [event["round"] for event in events if event["event"] == "checkpoint"] == [1, 2]
    for number in (1, 2):
        (round,) = of_kind(scored, RoundRecord, round=number)
        begin = next(place for place, event in enumerate(events) if event.get("round") == number)
        inside = events[begin:]
        asked = next(event for event in inside if event["event"] == "asked")
        assert asked["clients"] == round.participants
        ended = next(place for place, event in enumerate(inside) if event.get("phase") == "evaluate")
        trained = [client for event in inside[:ended] if event["event"] == "training" for client in event["clients"]]
        assert sorted(trained) == round.participants
        delivered = [event for event in inside[:ended] if event["event"] == "delivered"]
        assert [event["client"] for event in delivered] == round.participants
        assert {(event["reason"], event["needed"]) for event in delivered} == {("", True)}
        assert all(event["upload_bytes"] > 0 for event in delivered)
        assert any(event["event"] == "step" for event in inside[:ended])


def test_a_limit_on_the_validation_examples_draws_from_all_clients(personal: Path) -> None:
    data = restore(personal)[0].data
    drawn = data.pooled("validation", 4, seed=0)
    assert len(drawn) == 4
    assert drawn == data.pooled("validation", 4, seed=0)
    draws = {example.prompt for seed in range(20) for example in data.pooled("validation", 4, seed)}
    everybody = [{example.prompt for example in client.validation} for client in data.clients]
    assert all(own & draws for own in everybody)
    assert len(data.pooled("validation", None, seed=0)) == sum(len(client.validation) for client in data.clients)
    assert data.pooled("test", 5, seed=0) != data.pooled("test", 5, seed=1)
