from collections import Counter

import numpy as np
import pytest

from fedguild.core.errors import DataError
from fedguild.core.seeding import numpy_rng
from fedguild.data.example import Example
from fedguild.data.partition import SCHEMES, partition


def make(labels: str, documents: str = "") -> list[Example]:
    """Returns an example per letter; its document is the letter in the same place, or its label."""
    return [
        Example(f"{i}", "y", label, "t", document=d)
        for i, (label, d) in enumerate(zip(labels, documents or labels, strict=True))
    ]


def deal(scheme: str, examples: list[Example], clients: int, seed: int = 0, **options: float) -> list[list[int]]:
    return partition(scheme, examples, clients, rng=numpy_rng(seed, "partition"), **options)  # type: ignore[arg-type]


EXAMPLES = make("a" * 40 + "b" * 30 + "c" * 20 + "d" * 10 + "e" * 5 + "f" * 2)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_example_is_used_once_and_the_seed_decides(scheme: str):
    parts = deal(scheme, EXAMPLES, 5, minimum=2)
    assert sorted(index for part in parts for index in part) == list(range(len(EXAMPLES)))
    assert len(parts) == 5
    assert min(map(len, parts)) >= 2
    assert all(part == sorted(part) for part in parts)
    assert parts == deal(scheme, EXAMPLES, 5, minimum=2)


@pytest.mark.parametrize("scheme", sorted(set(SCHEMES) - {"label", "document"}))
def test_another_seed_gives_another_partition(scheme: str):
    assert deal(scheme, EXAMPLES, 5, seed=0) != deal(scheme, EXAMPLES, 5, seed=1)


def test_iid_sizes_differ_by_one_at_most():
    assert sorted(map(len, deal("iid", EXAMPLES, 5))) == [21, 21, 21, 22, 22]


def skew(parts: list[list[int]], examples: list[Example]) -> float:
    return float(np.mean([max(Counter(examples[i].label for i in part).values()) / len(part) for part in parts]))


def test_dirichlet_skew_falls_with_alpha():
    examples = make("abcdefgh" * 100)
    by_alpha = [np.mean([skew(deal("dirichlet", examples, 8, seed, alpha=alpha), examples) for seed in range(5)])
                for alpha in (0.1, 1.0, 100.0)]  # fmt: skip
    assert by_alpha[0] > 0.5 > by_alpha[1] > 0.2 > by_alpha[2]
    assert by_alpha[2] == pytest.approx(1 / 8, abs=0.03)


def test_dirichlet_gives_a_label_in_the_proportions_of_a_dirichlet_draw():
    part_sizes = np.array(
        [[len(p) for p in deal("dirichlet", make("a" * 100), 4, seed, alpha=2.0)] for seed in range(400)]
    )
    shares = part_sizes / 100
    assert shares.mean(axis=0) == pytest.approx(np.full(4, 0.25), abs=0.03)
    assert shares.var(axis=0) == pytest.approx(np.full(4, 0.25 * 0.75 / (4 * 2.0 + 1)), rel=0.25)


def test_dirichlet_lifts_every_client_to_the_minimum_from_the_largest():
    examples = make("a" * 60 + "b" * 40)
    for seed in range(5):
        free = [len(part) for part in deal("dirichlet", examples, 10, seed, alpha=0.3)]
        lifted = [len(part) for part in deal("dirichlet", examples, 10, seed, alpha=0.3, minimum=5)]
        assert min(free) < 5
        assert min(lifted) == 5
        assert [after for before, after in zip(free, lifted, strict=True) if before < 5] == [5] * sum(
            n < 5 for n in free
        )
        shrunk = [after for before, after in zip(free, lifted, strict=True) if after < before]
        assert min(shrunk) >= max(lifted) - 1


def test_one_task_per_client_and_round_robin():
    parts = deal("label", EXAMPLES, 6)
    assert [{EXAMPLES[i].label for i in part} for part in parts] == [{"a"}, {"b"}, {"c"}, {"d"}, {"e"}, {"f"}]
    parts = deal("label", EXAMPLES, 4)
    assert [{EXAMPLES[i].label for i in part} for part in parts] == [{"a", "e"}, {"b", "f"}, {"c"}, {"d"}]


def test_fewer_labels_than_clients():
    with pytest.raises(DataError, match=r"7 clients share 6 label\(s\): a, b, c, d, e, f\.\nUse at most 6 clients"):
        deal("label", EXAMPLES, 7)


def test_documents_stay_whole_and_balance():
    examples = make("x" * 20, "p" * 8 + "q" * 5 + "r" * 4 + "s" * 2 + "t")
    parts = deal("document", examples, 2)
    assert [len(part) for part in parts] == [10, 10]
    for part in parts:
        for document in {examples[i].document for i in part}:
            assert all(i in part for i, example in enumerate(examples) if example.document == document)


def test_names_of_documents_are_kept_as_they_are():
    names = ["a\0", "a", "b", "c\0"]  # an array of NumPy would lose the last letter of two
    examples = [Example("x", "y", "z", "t", document=name) for name in names]
    assert sorted(index for part in deal("document", examples, 2) for index in part) == [0, 1, 2, 3]


def test_documents_that_are_missing_or_too_few():
    with pytest.raises(DataError, match="the document of every example"):
        deal("document", [Example("x", "y", "a", "t")] * 4, 2)
    with pytest.raises(DataError, match="3 clients one of 2 documents"):
        deal("document", make("aabb"), 3)
    with pytest.raises(DataError, match=r"leaves client 1 with 1 of at least 2 examples"):
        deal("document", make("aaab"), 2, minimum=2)


def test_power_law_sizes():
    sizes = [len(part) for part in deal("power_law", make("a" * 110), 4, alpha=1.0, minimum=5)]
    assert sizes == [5 + 43, 5 + 22, 5 + 14, 5 + 11]  # 90 in proportion to 1, 1/2, 1/3, 1/4
    assert [len(part) for part in deal("power_law", make("a" * 40), 4, alpha=1e-9)] == [10] * 4


def test_quantity_keeps_labels_mixed_and_skews_sizes():
    examples = make("ab" * 500)
    parts = deal("quantity", examples, 5, alpha=0.5, minimum=20)
    assert max(map(len, parts)) > 2 * min(map(len, parts))
    assert skew(parts, examples) < 0.65


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scheme": "dirichlett"}, r"'dirichlett'\.\nDid you mean 'dirichlet'\? Known: dirichlet, document, iid"),
        ({"clients": 0}, "at least 1, but is 0"),
        ({"alpha": 0.0}, "alpha must be positive, but is 0.0"),
        ({"alpha": float("nan")}, "alpha must be positive, but is nan"),
        ({"minimum": 0}, "minimum per client must be at least 1"),
        ({"clients": 20, "minimum": 6}, "107 examples cannot give each of 20 clients its minimum of 6"),
    ],
)
def test_bad_settings(options: dict[str, float], message: str):
    settings = {"scheme": "dirichlet", "clients": 4, **options}
    with pytest.raises(DataError, match=message):
        deal(examples=EXAMPLES, **settings)  # type: ignore[arg-type]
