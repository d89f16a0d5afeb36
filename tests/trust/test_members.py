"""Weights are the operator's: claims are capped or replaced, and do not change unseen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.config import Config
from fedguild.federation.flower.client_registry import RegisteredClient
from fedguild.federation.members import Members, admitted_sizes
from fedguild.federation.site import ServerSettings
from fedguild.federation.testing import HostileClient, Message, drive
from fedguild.measuring.log.records import ClientRecord
from tests.trust.test_attacks import changed


def settings(**values: object) -> ServerSettings:
    return ServerSettings.model_validate(values)


def client(index: int, examples: int) -> RegisteredClient:
    sizes = {"train": examples, "validation": 0, "test": 0}
    return RegisteredClient(100 + index, index, {"budget": "all", "sizes": sizes})


@pytest.mark.parametrize(
    ("claims", "given", "expected"),
    [
        ({0: 50, 1: 60, 2: 10**9}, {}, {0: 50, 1: 60, 2: 600}),
        ({0: 50, 1: 60, 2: 10**9}, {"examples_factor": None}, {0: 50, 1: 60, 2: 10**9}),
        ({0: 50, 1: 60, 2: 10**9}, {"examples_factor": None, "max_examples": 55}, {0: 50, 1: 55, 2: 55}),
        ({0: 50, 1: 60, 2: 10**9}, {"sizes": {2: 40}}, {0: 50, 1: 60, 2: 40}),
        ({0: 50, 1: 60, 2: 70}, {"sizes": {0: 9000}}, {0: 9000, 1: 60, 2: 70}),
        ({0: 50, 1: 10**9}, {}, {0: 50, 1: 500}),
        ({0: 10**9}, {}, {0: 10**9}),
        ({0: 50, 1: 60, 2: 70}, {}, {0: 50, 1: 60, 2: 70}),
    ],
)
def test_sizes_are_capped_or_pinned(claims: dict[int, int], given: dict[str, object], expected: dict[int, int]) -> None:
    assert admitted_sizes(claims, settings(**given)) == expected


def test_a_size_that_changes_is_reported_and_changes_nothing(tmp_path: Path) -> None:
    lines: list[str] = []
    members = Members(tmp_path / "members.json", settings(), lines.append)
    assert members.admit({0: client(0, 50)}) == [0]
    assert members.admit({0: client(0, 5000)}) == []
    assert lines == ["client-000 now says that it has 5000 training examples, and said 50 before; its weight stays 50."]
    members.admit({0: client(0, 5000)})
    assert len(lines) == 1
    again = Members(tmp_path / "members.json", settings(), lines.append)
    assert again.examples(0) == 50
    assert again.examples(1) == 0


def test_who_joined_early_is_weighed_once_more_when_others_have_come(tmp_path: Path) -> None:
    """A run begins with its quorum; a claim that nobody could be compared with then does not stay."""
    lines: list[str] = []
    members = Members(tmp_path / "members.json", settings(), lines.append)
    members.admit({0: client(0, 10**9), 1: client(1, 50)})
    assert [members.examples(index) for index in range(2)] == [500, 50]
    members.admit({0: client(0, 10**9), 1: client(1, 50), 2: client(2, 30)})
    assert [members.examples(index) for index in range(3)] == [500, 50, 30]
    alone = Members(tmp_path / "alone.json", settings(), lines.append)
    alone.admit({0: client(0, 10**9)})
    assert alone.examples(0) == 10**9, "alone, its weight cancels"
    alone = Members(tmp_path / "alone.json", settings(), lines.append)
    alone.admit({0: client(0, 70), 1: client(1, 50), 2: client(2, 30)})
    assert [alone.examples(index) for index in range(3)] == [500, 50, 30], "what it claimed first counts"
    assert "client-000 weighs as much as 500 examples, and 1000000000 before others joined." in lines
    alone.admit({index: client(index, 5) for index in range(4)})
    assert alone.examples(0) == 500, "with three members a weight is fixed"


def test_in_a_secure_run_nobody_takes_part_whose_weight_is_not_its_own(tmp_path: Path) -> None:
    """Its site would upload by its own number, and the sums of the round would not be those that the server knows."""
    turned_away: dict[int, str] = {}
    members = Members(tmp_path / "members.json", settings(), refuse=turned_away.__setitem__)
    assert members.admit({0: client(0, 1), 1: client(1, 50)}) == [0, 1], "two say nothing about each other"
    sizes = {0: 45, 1: 50, 2: 60, 3: 5000}
    members = Members(tmp_path / "more.json", settings(), refuse=turned_away.__setitem__)
    assert members.admit({index: client(index, size) for index, size in sizes.items()}) == [0, 1, 2]
    assert turned_away.keys() == {3}
    assert "by 5000 examples, but here it counts as 550" in turned_away[3]
    assert "sizes: {3: 5000} admits it as it is" in turned_away[3]
    agreed = Members(tmp_path / "more.json", settings(sizes={3: 5000}), refuse=turned_away.__setitem__)
    assert agreed.admit({index: client(index, size) for index, size in sizes.items()}) == [3]
    turned_away.clear()
    assert agreed.admit({0: client(0, 44), 1: client(1, 50)}) == []
    assert "it weighs itself by 44 examples now and has weighed 45" in turned_away[0]


def test_a_large_client_does_not_end_a_secure_run(config: Config, tmp_path: Path) -> None:
    secure = changed(config, "federation", secure=True, clients=4, rounds=1)
    driven = drive(secure, tmp_path, [HostileClient(2, claiming(10**8))], server_evaluation=True)
    assert driven.error is None
    assert driven.accepted == {1: [0, 1, 3]}
    assert any("client-002 cannot take part: it would weigh itself by 100000000" in line for line in driven.lines)


def claiming(examples: int) -> Callable[[Message, Callable[[], Message]], Message]:
    def answer(request: Message, honest: Callable[[], Message]) -> Message:
        true = honest()
        if request.kind != "hello":
            return true
        sizes = {**true.metadata["sizes"], "train": examples}
        return replace(true, metadata={**true.metadata, "sizes": sizes})

    return answer


def test_a_claim_of_10_to_the_8_examples_does_not_make_the_aggregate_its_own(config: Config, tmp_path: Path) -> None:
    """Its upload weighs at most ten times the median's, and what the operator pinned if so."""
    one = changed(config, "federation", rounds=1)
    hostile = HostileClient(2, claiming(10**8))
    driven = drive(one, tmp_path / "capped", [hostile], server_evaluation=True)
    weights = [record.examples for record in driven.records if isinstance(record, ClientRecord)]
    assert weights[2] == 10 * sorted(weights)[1]
    assert any("client-002 says that it has 100000000 training examples" in line for line in driven.lines)
    honest = drive(one, tmp_path / "honest", server_evaluation=True)
    true = [record.examples for record in honest.records if isinstance(record, ClientRecord)]
    pinned = drive(one, tmp_path / "pinned", [hostile], server_evaluation=True, sizes={2: true[2]})
    assert honest.state is not None
    assert pinned.state is not None
    for name, value in honest.state.tensors.items():
        assert torch.equal(pinned.state.tensors[name], value)
