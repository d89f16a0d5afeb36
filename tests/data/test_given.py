"""Data and partitions that are given in Python."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from datasets import Dataset, DatasetDict

from fedguild.core.errors import DataError
from fedguild.data.given import rows_of
from fedguild.data.partition import as_parts

ROWS: list[dict[str, Any]] = [{"instruction": "a", "response": "1"}, {"instruction": "b", "response": None}]


@pytest.mark.parametrize(
    "dataset",
    [ROWS, Dataset.from_list(ROWS), pd.DataFrame(ROWS), tuple(ROWS)],
    ids=["list", "Dataset", "frame", "tuple"],
)
def test_rows_of_every_kind(dataset: Any) -> None:
    assert rows_of(dataset) == {"train": ROWS}


def test_rows_by_split() -> None:
    splits = DatasetDict({"train": Dataset.from_list(ROWS), "validation": Dataset.from_list(ROWS[:1])})
    assert rows_of(splits) == {"train": ROWS, "test": ROWS[:1]}
    assert rows_of({"train": pd.DataFrame(ROWS), "test": ROWS[1:]}) == {"train": ROWS, "test": ROWS[1:]}


def test_numbers_of_numpy_are_plain() -> None:
    frame = pd.DataFrame({"choices": [np.array(["x", "y"])], "answer": [np.int64(1)], "weight": [float("nan")]})
    assert rows_of(frame) == {"train": [{"choices": ["x", "y"], "answer": 1, "weight": None}]}


@pytest.mark.parametrize(
    ("dataset", "message"),
    [
        ({"test": ROWS}, "no split named train; it has: test"),
        ([], "has no rows"),
        (["a"], "A row of the dataset is a str"),
        (7, "A dataset cannot be a int"),
    ],
)
def test_what_is_no_dataset(dataset: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        rows_of(dataset)


def test_an_assignment_in_both_forms() -> None:
    assert as_parts([1, 0, 1], 3, 2) == [[1], [0, 2]]
    assert as_parts(np.array([1, 0, 1]), 3, 2) == [[1], [0, 2]]
    assert as_parts([[2, 0], [1]], 4, 2) == [[0, 2], [1]]
    assert as_parts([np.array([2, 0], dtype=np.int32), (np.uint8(1),)], 4, 2) == [[0, 2], [1]]
    assert as_parts(torch.tensor([1, 0, 1]), 3, 2) == [[1], [0, 2]]
    assert all(type(index) is int for part in as_parts([np.array([2, 0]), {np.int64(1)}], 4, 2) for index in part)


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ([0, 1], "a client for 2 examples, but there are 3"),
        ([0, 1, 2], "names client 2, but clients count from 0 to 1"),
        ([0, 0, 0], "leaves client 1 without an example"),
        ([[0], [1], [2]], "has 3 parts, but there are 2 clients"),
        ([[0, 1], [1]], "uses example 1 twice"),
        ([[0], [3]], "names example 3, but they count from 0 to 2"),
        ([[0, 1, 2], []], "leaves client 1 without an example"),
        ([0, 1.7, 1], r"has an entry that is no whole number: 1\.7\.\nGive a client .* as integers \(3, not 3\.0\)\."),
        (np.array([0.0, 1.0, 1.0]), r"has an entry that is no whole number: .*0\.0"),
        (["0", "1", "1"], "has an entry that is no whole number: '0'"),
        ([[0, 1.5], [2]], r"has an entry that is no whole number: 1\.5"),
        (["01", "2"], "has an entry that is no whole number: '01'"),
        ([[0, 2], 1], "has 1 beside lists of indices"),
        (np.array(1), "is array"),
        (1, "is 1"),
    ],
)
def test_what_is_no_assignment(assignment: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        as_parts(assignment, 3, 2)
