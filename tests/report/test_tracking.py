from __future__ import annotations

import sys
from pathlib import Path

import pytest

from fedguild.errors import ConfigError
from fedguild.report.tracking import Tracker
from fedguild.server.run_log import ClientRecord, EvaluationRecord, RoundRecord, RunLog
from tests.report.runs import write_run


def read_events(folder: Path) -> dict[str, dict[int, float]]:
    """Returns tag -> round -> value, as TensorBoard shows them."""
    accumulators = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulators.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    found = {tag: [(event.step, event.value) for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}
    assert all(len(dict(points)) == len(points) for points in found.values())
    return {tag: dict(points) for tag, points in found.items()}


def test_every_score_loss_and_cost_is_an_event(tmp_path: Path) -> None:
    records = RunLog(write_run(tmp_path, rounds=2, clients=3, own_scores=True)).read()
    with Tracker(tmp_path, enabled=True) as tracker:
        for number in range(3):
            tracker.add([record for record in records if record.round == number])
    expected: dict[str, dict[int, float]] = {}
    for record in records:
        if isinstance(record, EvaluationRecord):
            expected.setdefault(f"score/{record.scope}/{record.name}", {})[record.round] = record.score
        elif isinstance(record, RoundRecord):
            expected.setdefault("round_seconds", {})[record.round] = record.seconds
        elif isinstance(record, ClientRecord):
            name = f"client-{record.client:03d}"
            expected.setdefault(f"loss/{name}", {})[record.round] = record.train_loss
            expected.setdefault(f"upload_bytes/{name}", {})[record.round] = record.upload_bytes
            expected.setdefault(f"download_bytes/{name}", {})[record.round] = record.download_bytes
    found = read_events(tmp_path)
    assert found.keys() == expected.keys()
    for tag, values in expected.items():
        assert found[tag] == pytest.approx(values, rel=1e-6)
    assert {"score/budget/b4", "score/client/client-002", "loss/client-000"} <= found.keys()


def test_figures_without_columns_are_events(tmp_path: Path) -> None:
    records = RunLog(write_run(tmp_path, rounds=1, clients=2, layers=2, personal=True)).read()
    with Tracker(tmp_path, enabled=True) as tracker:
        tracker.add(records)
    found = read_events(tmp_path)
    assert found["observed/utilisation entropy/layer 1"] == pytest.approx({1: 1.92})
    assert not [tag for tag in found if tag.startswith("observed/relevance")]
    assert {"score/received/client-001", "score/summary/mtal", "score/summary/received"} <= found.keys()


def test_a_round_that_is_run_again_replaces_the_abandoned_one(tmp_path: Path) -> None:
    def score(number: int, value: float) -> list[EvaluationRecord]:
        return [EvaluationRecord(round=number, scope="budget", name="b1", split="test", score=value)]

    with Tracker(tmp_path, enabled=True) as tracker:
        for number in (1, 2, 3):
            tracker.add(score(number, 0.1 * number))
    with Tracker(tmp_path, enabled=True, first_round=3) as tracker:
        tracker.add(score(3, 0.75))
    found = read_events(tmp_path)["score/budget/b1"]
    assert found == pytest.approx({1: 0.1, 2: 0.2, 3: 0.75})


def test_nothing_is_written_unless_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with Tracker(tmp_path, enabled=False) as tracker:
        tracker.add([RoundRecord(round=1, seconds=1.0, participants=[0])])
    assert list(tmp_path.iterdir()) == []


def test_without_tensorboard_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ConfigError, match=r"tracking\.tensorboard needs TensorBoard") as caught:
        Tracker(tmp_path, enabled=True)
    assert "pip install 'fedguild[track]'" in caught.value.hint
