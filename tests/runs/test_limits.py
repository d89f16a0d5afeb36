"""Early ends of a run: the bytes that it may move, and training that diverges; and what is said of the data."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import LocalReport
from fedguild.core.errors import ConfigError, DivergedError
from fedguild.core.layout import CHECKPOINTS
from fedguild.core.payload import Payload
from fedguild.measuring.log.records import EvaluationRecord, RunLog, TrafficRecord
from fedguild.model.plan import AdapterPlan
from fedguild.runs import experiment
from fedguild.runs.byte_budget import ByteBudget
from fedguild.runs.callbacks import Event
from fedguild.runs.results import divergence, load_run
from fedguild.server import checkpoint
from fedguild.server.divergence import require_learning
from fedguild.server.engine import Delivery, Task
from fedguild.server.round import Outcome
from tests.data.writing import write_jsonl
from tests.runs.conftest import Command
from tests.runs.runs import says, small_config, small_settings
from tests.runs.tracking.runs import Memory, offer

TASKS = "flame/tiny-tasks"
ONE = ClientInfo(0, Budget("all", 1, 1), 4)


def traffic(folder: Path) -> list[TrafficRecord]:
    return [record for record in RunLog(folder).read() if isinstance(record, TrafficRecord)]


def test_a_run_ends_before_the_round_that_could_pass_its_limit_on_bytes(
    olmoe_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its last round is scored although it was not due; the scores reach trackers and callbacks."""
    offer(monkeypatch, Memory)
    settings = ["method={name: fedit, rank: 3}", "training.steps=1", "evaluation.every=3", "evaluation.max_examples=2"]
    plenty, scarce = tmp_path / "plenty", tmp_path / "scarce"
    experiment.run(small_config(olmoe_folder, *settings, "federation.byte_limit=1000000000"), plenty)
    counted = traffic(plenty)
    assert [one.total_bytes for one in counted] == [sum(o.round_bytes for o in counted[: n + 1]) for n in range(3)]
    assert all(one.round_bytes == one.planned_bytes for one in counted)  # FedIT's messages have one size
    limit = counted[1].total_bytes + counted[2].round_bytes - 1
    seen: list[Event] = []
    config = small_config(olmoe_folder, *settings, f"federation.byte_limit={limit}", "tracking.trackers=[memory]")
    result = experiment.run(config, scarce, callbacks=[seen.append])
    assert (result.rounds, checkpoint.latest(scarce / CHECKPOINTS)) == (2, 2)
    says(result.stopped, "round 3 could move", f"{limit:,}", f"{counted[2].round_bytes - 1:,} are left", "byte_limit")
    assert traffic(scarce)[-1].total_bytes <= limit
    scored = [record.round for record in RunLog(scarce).read() if isinstance(record, EvaluationRecord)]
    assert max(scored) == 2
    assert max(record.round for record in seen[-1].history) == 2
    (values,) = Memory.runs.values()
    assert {number for name, series in values.items() if name.startswith("score") for number in series} == set(scored)
    again = experiment.resume(scarce)
    assert (again.rounds, again.stopped) == (2, result.stopped)
    assert load_run(scarce).stopped == result.stopped
    fits = experiment.run(
        small_config(olmoe_folder, *settings, f"federation.byte_limit={limit + 1}"), tmp_path / "fits"
    )
    assert (fits.rounds, fits.stopped) == (3, "")


def outcome(
    *losses: float, withheld: bool = False, steps: int = 1, round: int = 2, first: float | None = None
) -> Outcome:
    """A round whose clients report these losses."""
    clients = [ClientInfo(index, ONE.budget, 4) for index in range(len(losses))]
    deliveries = [
        Delivery(
            Task(round, client, Payload()),
            Payload(),
            AdapterPlan(()),
            LocalReport(steps, loss=loss, withheld=withheld, first_loss=first),
        )
        for client, loss in zip(clients, losses, strict=True)
    ]
    return Outcome(round, Payload(), clients, deliveries, accepted=[client.index for client in clients])


@pytest.mark.parametrize("losses", [(30.0, 30.0), (1.0, 11.0, 11.0), (float("nan"),) * 2, (float("inf"), 2.0, 99.0)])
def test_a_round_that_is_worse_than_guessing_has_diverged(losses: tuple[float, ...]) -> None:
    with pytest.raises(DivergedError, match="The training of round 2 diverged: the median client's loss is"):
        require_learning(outcome(*losses), "auto", 200)  # ln 200 is 5.3


def test_a_round_that_learns_has_not_diverged() -> None:
    require_learning(outcome(10.5, 9.0), "auto", 200)
    require_learning(outcome(1.0, 1.0, 500.0, float("nan")), "auto", 200)  # a minority reports what it likes
    require_learning(outcome(500.0, 500.0), None, 200)
    require_learning(outcome(500.0, withheld=True), "auto", 200)
    require_learning(outcome(500.0, steps=0), "auto", 200)
    require_learning(outcome(500.0), 501.0, 200)
    require_learning(outcome(5.2), "auto", 200, untrained=3.6)  # hardly worse than before
    require_learning(outcome(4.4), "auto", 200, untrained=1.0)  # better than guessing


def test_losing_all_that_was_known_is_divergence() -> None:
    """A model whose values overflow predicts every token alike."""
    with pytest.raises(DivergedError, match=r"is 5.298 nats .*, above the limit of 4.504 .*without training 1.5"):
        require_learning(outcome(5.298), "auto", 200, untrained=1.5)


@pytest.mark.parametrize(
    ("round", "first", "told"),
    [
        (
            1,
            12.0,
            r"bad before any training: .* first step is 12 nats .*\n.*lower learning rate does not help. Set x=1.",
        ),
        (1, 2.0, r"The training of round 1 diverged"),
        (1, None, r"The training of round 1 diverged"),
        (2, 12.0, r"The training of round 2 diverged"),
    ],
)
def test_a_model_that_starts_badly_is_told_from_one_that_diverges(round: int, first: float | None, told: str) -> None:
    with pytest.raises(DivergedError) as caught:
        require_learning(outcome(13.0, 13.0, round=round, first=first), "auto", 200, 3.0, "Set x=1.")
    assert re.search(told, str(caught.value), re.DOTALL)


def test_a_diverged_run_says_so_and_has_an_exit_code_of_its_own(command: Command) -> None:
    small = ["federation.clients=2", "federation.rounds=2", "training.steps=10", "evaluation.max_examples=1"]
    result = command("run", TASKS, *small, "training.learning_rate=1e6", "--output", "out")
    assert result.exit_code == 3, result.output
    says(result.stderr, "Error: The training of round 1 diverged", "lower training.learning_rate")
    assert checkpoint.latest(Path("out") / CHECKPOINTS) == 0
    assert divergence(Path("out")).startswith("The training of round 1 diverged")


def test_what_is_left_out_and_cut_is_counted_and_said(command: Command, olmoe_folder: Path, tmp_path: Path) -> None:
    rows = [
        {"instruction": f"Say {i}. {'and on ' * 20 * (i % 2)}", "response": "x" if i % 5 else ""} for i in range(40)
    ]
    rows[1]["response"] = "y" * 200
    own = [
        "data.dataset=instructions",
        f"data.train={write_jsonl(tmp_path / 'own.jsonl', rows)}",
        "data.max_samples=30",
    ]
    own += ["data.options={}", "data.max_length=150", "data.partition.scheme=iid", "data.split.max_train_samples=3"]
    own += ["federation.clients=2", "federation.rounds=1", "evaluation.max_examples=1"]
    settings = small_settings(olmoe_folder, *own)
    shown = command("partition", TASKS, *settings)
    assert shown.exit_code == 0, shown.output
    ran = command("run", TASKS, *settings, "--output", "out")
    assert ran.exit_code == 0, ran.output
    record = json.loads((Path("out") / "partition.json").read_text())
    assert record["dropped"] == {
        "training rows without a response": 8,
        "training examples above the limit of 30": 2,
        "examples above data.split.max_*_samples": 16,
    }
    assert record["cut"]["texts"] == 6
    assert 0 < record["cut"]["prompts"] <= 6
    for told in (shown.stderr, ran.stderr):
        says(told, "Left out: 8 training rows without a response.", "2 training examples above the limit of 30.")
        says(told, f"{record['cut']['prompts']} of 6 training texts lose the beginning of their prompt")
        says(told, "(data.max_length is 150)")
    lost = record["cut"]["scored_prompts"]
    assert lost in (0, 1)  # of one example that is scored
    assert ("1 of 1 scored prompts lose their beginning" in ran.stderr) is bool(lost)


def test_a_rate_that_anneals_to_nothing_leaves_the_last_round_without_effect(olmoe_folder, tmp_path):
    """From the config to the clients: the last round's rate is a billionth of the first one's."""
    annealed = ["training.round_schedule=linear", "training.round_final=1e-9", "training.optimizer=sgd"]
    settings = ["method={name: fedit, rank: 3}", "federation.rounds=2", "evaluation.max_examples=1", *annealed]
    config = small_config(olmoe_folder, *settings, "training.learning_rate=1.0", "federation.save_total_limit=3")
    experiment.run(config, tmp_path / "out")
    before, first, last = (
        checkpoint.load(tmp_path / "out" / CHECKPOINTS, number, fingerprint=config.fingerprint()).state.tensors
        for number in (0, 1, 2)
    )

    def moved(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
        return max(float((one[name] - other[name]).abs().max()) for name in one)

    assert moved(before, first) > 1e-4
    assert moved(first, last) < 1e-6


@pytest.mark.parametrize("shapes_tell", [True, False])
def test_a_limit_below_the_first_round_is_refused(shapes_tell, olmoe_folder, tmp_path, monkeypatch):
    """Before a weight is loaded, or where the sizes depend on values, before the first score."""

    def late(*_: object, **__: object) -> None:
        raise AssertionError("too late")

    monkeypatch.setattr("fedguild.runs.experiment.evaluate_state", late)
    if shapes_tell:
        monkeypatch.setattr("fedguild.runs.setup.preparation.load_backbone", late)
    else:
        monkeypatch.setattr("fedguild.runs.setup.method_checks.first_refusal", lambda *_: None)
    with pytest.raises(ConfigError, match="The run cannot begin: round 1 could move") as caught:
        experiment.run(small_config(olmoe_folder, "federation.byte_limit=1000"), tmp_path / "out")
    assert "federation.wire_dtype=bf16" in caught.value.hint


def test_further_attempts_stay_within_the_limit() -> None:
    others = [ClientInfo(index, ONE.budget, 4) for index in range(3)]
    budget = ByteBudget(100, spent_bytes=10, planned={0: 20, 1: 30, 2: 10})
    budget._granted_bytes = budget.round_bytes
    assert not budget.refusal(1)
    assert [one.index for one in budget.again(others)] == [0, 2]
    assert budget.again(others) == []
    assert budget.record(1, 60).total_bytes == 70
    assert budget.refusal(2)
