"""The values that every tracker gets."""

from __future__ import annotations

import math

import pytest

from fedguild.measuring.log.records import (
    ClientRecord,
    EvaluationRecord,
    ObservationRecord,
    PrivacyRecord,
    Rejection,
    RoundRecord,
    RoutingRecord,
)
from fedguild.runs.tracking.points import points


def client(index: int, *, loss: float | None = 0.5, upload: int = 10) -> ClientRecord:
    return ClientRecord(
        round=3,
        client=index,
        budget="b1",
        active_experts=2,
        rank=4,
        examples=None,
        steps=None,
        tokens=None,
        train_loss=loss,
        upload_bytes=upload,
        download_bytes=2 * upload,
        training_flops=None,
        seconds=None,
    )


RECORDS = (
    client(0, loss=0.5, upload=10),
    client(12, loss=None, upload=32),
    PrivacyRecord(
        round=3, unit="client", delta=1e-5, clients=[0, 12], epsilon=[1.5, 2.25], noise_multiplier=[1.0, 1.0]
    ),
    RoutingRecord(
        round=3,
        layers=2,
        experts=2,
        clients=[0],
        frequency=[[[0.5, 0.5], [1.0, 0.0]]],
        entropy=[0.7, 0.0],
        normalised_entropy=[1.0, 0.0],
        gini=[0.0, 0.5],
    ),
    ObservationRecord(round=3, name="θ of (A·B)", rows=["layer 1"], values=[[1.92]]),
    ObservationRecord(round=3, name="a table", rows=["x"], columns=["y"], values=[[1.0]]),
    EvaluationRecord(
        round=3, scope="budget", name="b1", split="test", score=0.25, metrics={"rouge_l": 0.5, "perplexity": math.inf}
    ),
    EvaluationRecord(round=3, scope="client", name="client-012", split="test", score=0.75),
    RoundRecord(
        round=3,
        seconds=4.5,
        phase_seconds={"train": 3.0},
        participants=[0, 12],
        rejected=[Rejection(client=12, reason="late")],
    ),
)
OF_THE_ROUND = {
    "routing/normalised_entropy/layer 0": 1.0,
    "routing/gini/layer 0": 0.0,
    "routing/normalised_entropy/layer 1": 0.0,
    "routing/gini/layer 1": 0.5,
    "observed/_ of _A_B_/layer 1": 1.92,
    "score/budget/b1": 0.25,
    "metric/budget/b1/rouge_l": 0.5,
    "metric/budget/b1/perplexity": math.inf,
    "participants": 2.0,
    "rejected": 1.0,
    "phase_seconds/train": 3.0,
    "loss/mean": 0.5,
    "upload_bytes/total": 42.0,
    "download_bytes/total": 84.0,
    "epsilon/max": 2.25,
    "round_seconds": 4.5,
}
OF_THE_CLIENTS = {
    "loss/client-000": 0.5,
    "upload_bytes/client-000": 10.0,
    "download_bytes/client-000": 20.0,
    "upload_bytes/client-012": 32.0,
    "download_bytes/client-012": 64.0,
    "epsilon/client-000": 1.5,
    "epsilon/client-012": 2.25,
    "score/client/client-012": 0.75,
}


@pytest.mark.parametrize(("clients", "expected"), [(True, OF_THE_ROUND | OF_THE_CLIENTS), (False, OF_THE_ROUND)])
def test_every_record_has_its_values_and_what_is_withheld_has_none(clients: bool, expected: dict[str, float]) -> None:
    found = points(RECORDS, clients=clients)
    assert {point.name: point.value for point in found} == expected
    assert len(found) == len(expected)
    assert {point.round for point in found} == {3}
    assert found[-1].name == "round_seconds"
