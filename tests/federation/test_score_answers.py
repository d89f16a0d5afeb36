"""Answers of sites about their scores, and what they may hold."""

from __future__ import annotations

from typing import Any

import pytest

from fedguild.core.errors import UploadError
from fedguild.federation.schema import ScoreAnswer

RECORD = {"round": 1, "scope": "client", "name": "client-000", "split": "test", "score": 0.5}


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ({"metric": "accuracy and rouge_l", "metrics": {"accuracy": 0.5}}, ""),
        ({"metric": "accuracy and a secret"}, "have the metric 'a secret'"),
        ({"task_metrics": {"a": "a secret", "b": "accuracy"}}, "have the metric 'a secret'"),
        (
            {"task_metrics": {"a": "accuracy", "b": "rouge_l", "c": "rouge_l"}},
            "have 3 tasks, but are means over at most 2",
        ),
        ({"metrics": {"beauty": 1.0}}, "have the metric 'beauty'"),
        ({"by_task": {"a": 0.5, "b": 0.5, "c": 0.5}}, "have 3 tasks, but are means over at most 2"),
    ],
)
def test_scores_hold_only_what_the_run_measures(held: dict[str, Any], problem: str) -> None:
    answer = ScoreAnswer.model_validate({"records": [{**RECORD, **held}]})
    if not problem:
        answer.require_of_run(["accuracy", "rouge_l"], 2)
        return
    with pytest.raises(UploadError, match=problem):
        answer.require_of_run(["accuracy", "rouge_l"], 2)
