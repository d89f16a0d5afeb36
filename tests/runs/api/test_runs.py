"""`fedguild.run` and `fedguild.resume`: data, partitions, metrics and callbacks given in Python."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedguild
from fedguild.config import load_config
from fedguild.core.errors import CheckpointError, ConfigError, DataError, FedGuildError
from fedguild.measuring.log.records import EvaluationRecord, RoundRecord
from fedguild.runs.api import launch
from fedguild.runs.callbacks import Event, Finished, Recorded, RoundStarted, Saved
from tests.runs.api.conftest import BASE, ROWS
from tests.runs.runs import Killed, assert_same, ended, kill_at

UNEVEN = [0] * 24 + [1] * 12 + [2] * 6 + [3] * 6


def length(prediction: str, reference: str) -> float:
    return float(len(prediction) + 10 * len(reference))


@pytest.fixture(scope="module")
def events() -> list[Event]:
    return []


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory, own_data: list[str], events: list[Event]) -> fedguild.RunResult:
    """A run of two rounds whose data, partition, metric and callback were given in Python."""
    return fedguild.run(
        BASE,
        *own_data,
        "federation.rounds=2",
        output=tmp_path_factory.mktemp("runs") / "given",
        dataset={"train": ROWS, "test": ROWS[:6]},
        partition=UNEVEN,
        metrics={"length": length},
        callbacks=[events.append],
    )


def test_the_given_data_and_partition_are_trained_on(given: fedguild.RunResult) -> None:
    partition = json.loads((given.folder / "partition.json").read_text())
    assert [sum(row) for row in partition["counts"]] == [24, 12, 6, 6]
    assert partition["labels"] == ["kind 0", "kind 1"]


def test_the_given_metric_is_recorded_beside_the_corpus_own(given: fedguild.RunResult) -> None:
    frame = given.frame()
    scored = frame[frame.scope == "budget"]
    assert (scored["length"] >= 10).all()
    assert scored["rouge_l"].notna().all()
    assert sorted(scored.name.unique()) == ["large", "small"]
    assert list(frame["round"].unique()) == [0, 1, 2]


def test_events_come_in_order_and_with_their_history(given: fedguild.RunResult, events: list[Event]) -> None:
    kinds = [(type(event), event.round) for event in events]
    per_round = [(kind, number) for number in (1, 2) for kind in (RoundStarted, Recorded, Saved)]
    assert kinds == [*per_round, (Finished, 2)]
    started, recorded, *_, finished = events
    assert {score.round for score in started.history} == {0}
    assert isinstance(recorded, Recorded)
    assert any(isinstance(record, RoundRecord) for record in recorded.records)
    assert {score.round for score in recorded.history} == {0, 1}
    assert isinstance(finished, Finished)
    assert finished.result == given
    assert (started.folder, started.rounds) == (given.folder, 2)


def test_a_run_from_its_folder(given: fedguild.RunResult) -> None:
    assert fedguild.load_run(given.folder) == given
    with pytest.raises(CheckpointError, match="is not the folder of a run"):
        fedguild.load_run(given.folder / "data")


def test_a_run_goes_on_with_what_its_folder_keeps_but_needs_its_metric(given: fedguild.RunResult) -> None:
    before = ended(given.folder)
    with pytest.raises(ConfigError, match=r"there is no metric 'length'(.|\n)*given again"):
        fedguild.resume(given.folder, round=1)
    again = fedguild.resume(given.folder, round=1, metrics={"length": length})
    assert again == given
    assert_same(ended(given.folder), before)


def test_the_same_data_elsewhere_is_the_same_config(given: fedguild.RunResult, own_data: list[str]) -> None:
    from fedguild.runs.api.inputs import gather

    config = load_config(str(given.folder / "config.yaml"))
    overrides = [*own_data, "federation.rounds=2"]
    test = {"train": ROWS, "test": ROWS[:6]}
    same = gather(test, UNEVEN, {"length": length}).config(BASE, overrides)
    assert same.fingerprint() == config.fingerprint()
    other = gather({**test, "train": ROWS[1:]}, UNEVEN, {"length": length}).config(BASE, overrides)
    assert other.fingerprint() != config.fingerprint()


def test_changed_data_is_refused(given: fedguild.RunResult, tmp_path: Path) -> None:
    from fedguild.data.given import source

    setting = load_config(str(given.folder / "config.yaml")).data.train
    assert setting is not None
    found = Path(str(source(setting, given.folder)))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / found.name).write_text(found.read_text() + "\n")
    with pytest.raises(DataError, match="its checksum differs"):
        source(setting, tmp_path)
    with pytest.raises(DataError, match="was given in Python"):
        source(setting, None)


class Enough:
    """A callback with a method for each event that it wants; it is asked what scores it needs, too."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def require(self, scores: object) -> None:
        self.seen.append("require")

    def on_record(self, event: Recorded) -> None:
        if event.round == 1:
            event.stop("enough")

    def on_round_end(self, event: Saved) -> None:
        self.seen.append(f"saved {event.round}")

    def on_run_end(self, event: Finished) -> None:
        self.seen.append(f"mean {event.result.mean}")


def test_a_callback_stops_a_run_and_resume_goes_on(
    settings: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enough = Enough()
    stopped = fedguild.run(BASE, *settings, output=tmp_path / "run", callbacks=[enough], progress=True)
    assert (stopped.rounds, stopped.stopped) == (1, "enough")
    assert enough.seen == ["require", "saved 1", f"mean {stopped.mean}"]
    shown = capsys.readouterr()
    assert "round 1/3" in shown.err
    assert not shown.out
    assert fedguild.load_run(stopped.folder).stopped == "enough"
    whole = fedguild.resume(stopped.folder, progress=False)
    assert (whole.rounds, whole.stopped) == (3, "")
    assert not capsys.readouterr().err
    fedguild.run(BASE, *settings, output=tmp_path / "plain")
    assert_same(ended(stopped.folder), ended(tmp_path / "plain"))


PATIENT = "callbacks=[{name: early-stopping, patience: 1, min_delta: 2}]"
"""No score can rise by 2, so the run ends after its first round."""


@pytest.mark.parametrize(
    "at", ["fedguild.runs.callbacks.Delivery.saved", "fedguild.runs.experiment.write_stopping_reason"]
)
def test_a_run_killed_before_it_is_stopped_stops_where_it_would_have(at, settings, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        kill_at(patch, at, 1)
        with pytest.raises(Killed):
            fedguild.run(BASE, *settings, PATIENT, output=tmp_path / "run")
    result = fedguild.resume(tmp_path / "run")
    assert result.rounds == 1
    assert result.stopped == "mean has not improved in 1 evaluations, after round 1"


def scores(*values: float, metric: float | None = None) -> tuple[EvaluationRecord, ...]:
    return tuple(
        EvaluationRecord(
            round=number,
            scope="summary",
            name="mean",
            split="test",
            score=value,
            metrics={} if metric is None else {"perplexity": metric - number},
        )
        for number, value in enumerate(values)
    )


@pytest.mark.parametrize(
    ("values", "options", "stops"),
    [
        ((0.1, 0.2, 0.2), {"patience": 2}, False),
        ((0.1, 0.2, 0.2, 0.2), {"patience": 2}, True),
        ((0.1, 0.2, 0.1, 0.3), {"patience": 2}, False),
        ((0.1, 0.3, 0.35), {"patience": 1, "min_delta": 0.1}, True),
        ((0.5, 0.4, 0.3), {"patience": 1, "mode": "min"}, False),
        ((0.5, 0.4, 0.4), {"patience": 1, "mode": "min"}, True),
        ((0.1, 0.1, 0.1), {"patience": 1, "metric": "perplexity", "mode": "min"}, False),
        ((0.1, 0.1, 0.1), {"patience": 2, "metric": "perplexity"}, True),
    ],
)
def test_early_stopping(values: tuple[float, ...], options: dict[str, Any], stops: bool) -> None:
    event = Saved(folder=Path(), round=len(values) - 1, rounds=9, history=scores(*values, metric=9.0))
    fedguild.EarlyStopping(**options)(event)
    assert bool(event._brake.reason) == stops


def test_early_stopping_names_what_a_run_does_not_have() -> None:
    event = Saved(folder=Path(), round=1, rounds=9, history=scores(0.1, 0.2))
    with pytest.raises(ConfigError, match="has no score 'b9' to monitor"):
        fedguild.EarlyStopping(monitor="b9")(event)
    with pytest.raises(ConfigError, match="'mean' has no metric 'perplexity'"):
        fedguild.EarlyStopping(metric="perplexity")(event)
    with pytest.raises(ValueError, match="patience must be a whole number of at least 1"):
        fedguild.EarlyStopping(patience=0)
    with pytest.raises(ValueError, match="min_delta must be a number of at least 0, got 'x'"):
        fedguild.EarlyStopping(min_delta="x")  # type: ignore[arg-type]


def test_what_cannot_be_given(settings: list[str], own_data: list[str], tmp_path: Path) -> None:
    def run(**given: Any) -> None:
        fedguild.run(BASE, *own_data, output=tmp_path / "run", **given)

    with pytest.raises(ConfigError, match="metric cannot be named 'accuracy'"):
        run(metrics={"accuracy": length})
    with pytest.raises(ConfigError, match="A partition cannot be a str"):
        run(partition="iid")
    with pytest.raises(ConfigError, match=r"early-stopping does not take \{'patiense': 2\}") as caught:
        fedguild.run(BASE, *settings, "callbacks=[{name: early-stopping, patiense: 2}]", output=tmp_path / "run")
    assert "Its options: monitor='auto', patience=3, min_delta=0.0, metric=None, mode='max'." in caught.value.hint
    with pytest.raises(ConfigError, match="patience must be a whole number of at least 1, got 'x'"):
        fedguild.run(BASE, *settings, "callbacks=[{name: early-stopping, patience: x}]", output=tmp_path / "run")
    with pytest.raises(ConfigError, match="callbacks takes a sequence of functions, not <built-in function print>"):
        run(callbacks=print)
    with pytest.raises(ConfigError, match=r"A callback is a function of an event, or an object with on_.*, not 3"):
        run(callbacks=[3])
    with pytest.raises(ConfigError, match=r"metrics takes a mapping of names to functions of two texts, not \['a'\]"):
        run(metrics=["a"])
    for entry in ("a", 0.5, 1.0):
        with pytest.raises(DataError, match=f"The partition given has an entry that is no whole number: {entry!r}"):
            run(partition=[entry] * len(ROWS))
        with pytest.raises(DataError, match=f"The partition .* has an entry that is no whole number: {entry!r}"):
            run(dataset=ROWS, partition=lambda examples, clients, rng, entry=entry: [entry] * len(examples))
    with pytest.raises(DataError, match=r"The partition .* is None."):
        run(dataset=ROWS, partition=lambda examples, clients, rng: None)
    with pytest.raises(DataError, match="A row has text that is not Unicode"):
        run(dataset=[{"instruction": "Say \ud800.", "response": "1"}])
    with pytest.raises(ConfigError, match="the overrides: unknown key 'learning_rate'"):
        fedguild.run(BASE, learning_rate=1e-3)
    with pytest.raises(ConfigError, match=r"\['seed=1'\] is not an override"):
        fedguild.run(BASE, ["seed=1"])  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="There is no callback 'early'"):
        fedguild.run(BASE, *settings, "callbacks=[early]", output=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"must be a partition scheme, got 'idd'. Did you mean 'iid'"):
        fedguild.run(BASE, *settings, "data.partition.scheme=idd", output=tmp_path / "run")
    with pytest.raises(DataError, match="lacks a column for the response"):
        run(dataset=[{"instruction": "Say 1."}])
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_nothing_to_score_on_is_refused_before_training(own_data: list[str], tmp_path: Path) -> None:
    """The rows have no test rows, and none are held out of them."""
    with pytest.raises(ConfigError, match="There is no test example to score on") as caught:
        fedguild.run(BASE, *own_data, "data.split.test=0", dataset=ROWS, output=tmp_path / "run")
    assert caught.value.hint == "Give data.test=FILE, or data.split.test=0.1."
    assert not (tmp_path / "run" / "config.yaml").exists()


def test_a_config_may_be_a_mapping_or_a_config() -> None:
    mapping = load_config({"extends": BASE, "seed": 3, "method": "fedit"}, ["training.steps=1"])
    assert (mapping.seed, mapping.method.name, mapping.training.steps) == (3, "fedit", 1)
    assert mapping.name == "flame-tiny-tasks"
    assert load_config(mapping, ["seed=4"]).seed == 4
    assert load_config(mapping) == mapping
    with pytest.raises(ConfigError, match="the config: unknown key 'sead'"):
        load_config({"extends": BASE, "sead": 3})


def test_a_cell_that_starts_as_another_fails_is_ended_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the command waits for the whole of its run before it says what failed."""
    begins, fails = threading.Event(), threading.Event()

    def command(cell: Any) -> list[str]:
        if cell.title == "fails":
            return [sys.executable, "-c", "raise SystemExit('Error: it fails')"]
        begins.set()
        fails.wait(60)
        return [sys.executable, "-c", f"import time; time.sleep(60); open({str(cell.folder)!r}, 'w')"]

    def settle(cell: Any, problem: str, where: str) -> None:
        begins.wait(60)
        raise FedGuildError(problem)

    stop = threading.Event.set
    monkeypatch.setattr(launch, "command_of", command)
    monkeypatch.setattr(threading.Event, "set", lambda event: (stop(event), event is begins or stop(fails)))
    cells = [SimpleNamespace(title=title, folder=tmp_path / title) for title in ("fails", "other")]
    with pytest.raises(FedGuildError, match="it fails"):
        launch._in_processes(cells, SimpleNamespace(jobs=1, tell=print, settle=settle))
    assert not (tmp_path / "other").exists()
