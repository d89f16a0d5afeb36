from collections import Counter

import pytest

from fedguild.config.data import SplitSettings
from fedguild.core.errors import DataError
from fedguild.data.example import Corpus, Example
from fedguild.data.split import ClientData, split_clients


def examples(labels: str, prefix: str = "") -> tuple[Example, ...]:
    return tuple(Example(f"{prefix}{i}", "y", label, "t") for i, label in enumerate(labels))


CORPUS = Corpus("made", examples("a" * 60 + "b" * 40), examples("a" * 30 + "b" * 20 + "c" * 10, "test "))
HALVES = [list(range(50)), list(range(50, 100))]


def sizes(data: ClientData) -> tuple[int, int, int]:
    return len(data.train), len(data.validation), len(data.test)


def test_fractions_cut_a_share_without_overlap():
    first, second = split_clients(CORPUS, HALVES, seed=0)
    assert sizes(first) == sizes(second) == (40, 5, 5)
    assert set(first.train + first.validation + first.test) == set(CORPUS.train[:50])


def test_the_seed_and_the_client_decide():
    first = split_clients(CORPUS, HALVES, seed=0)
    assert first == split_clients(CORPUS, HALVES, seed=0)
    assert first != split_clients(CORPUS, HALVES, seed=1)
    assert split_clients(CORPUS, [HALVES[0], HALVES[1][:10]], seed=0)[0] == first[0]
    same_share = split_clients(CORPUS, [HALVES[0]] * 2, seed=0)
    assert same_share[0].test != same_share[1].test


def test_caps_cut_each_split_but_not_the_others():
    (data,) = split_clients(
        CORPUS,
        HALVES[:1],
        SplitSettings(validation=0.2, test=0.2, max_train_samples=7, max_validation_samples=3, max_test_samples=2),
        seed=0,
    )
    assert sizes(data) == (7, 3, 2)
    (free,) = split_clients(CORPUS, HALVES[:1], SplitSettings(validation=0.2, test=0.2), seed=0)
    assert set(data.train) <= set(free.train)
    assert set(data.test) <= set(free.test)


def test_small_shares_get_one_of_each():
    (data,) = split_clients(CORPUS, [[0, 1, 2]], seed=0)
    assert sizes(data) == (1, 1, 1)
    (data,) = split_clients(CORPUS, [[0, 1]], SplitSettings(validation=0.9, test=0), seed=0)
    assert sizes(data) == (1, 1, 0)
    (data,) = split_clients(CORPUS, [[0]], SplitSettings(validation=0, test=0), seed=0)
    assert sizes(data) == (1, 0, 0)


def test_a_client_with_too_little_is_named_with_what_to_change():
    message = r"Client 1 has 2 example\(s\), but needs at least 3 for training, validation, testing\.\nRaise .* minimum"
    with pytest.raises(DataError, match=message):
        split_clients(CORPUS, [[0, 1, 2], [3, 4]], seed=0)
    with pytest.raises(DataError, match=r"Client 0 has 0 example\(s\), but needs at least 1 for training\."):
        split_clients(CORPUS, [[]], SplitSettings(validation=0, test=0), seed=0)


def test_the_corpus_tests_a_client_in_the_proportions_of_its_labels():
    three_to_one = [*range(30), *range(60, 70)]
    rule = SplitSettings(test_source="corpus")
    (data,) = split_clients(CORPUS, [three_to_one], rule, seed=0)
    assert sizes(data) == (36, 4, 40)  # all 30 of a, and a third as many of b
    assert Counter(example.label for example in data.test) == {"a": 30, "b": 10}
    assert len(set(data.test)) == 40
    assert set(data.test) <= set(CORPUS.test)
    assert {example.label for example in data.test[:8]} == {"a", "b"}, "whoever scores the first has all labels"
    (capped,) = split_clients(CORPUS, [three_to_one], SplitSettings(test_source="corpus", max_test_samples=8), seed=0)
    assert len(capped.test) == 8
    (only_b,) = split_clients(CORPUS, [[60, 61]], rule, seed=0)
    assert Counter(example.label for example in only_b.test) == {"b": 20}


def test_the_corpus_tests_a_client_with_all_of_its_rarest_label():
    two_to_one = [*range(26), *range(60, 73)]  # 39 * (30 / 26) is 44.99… in floating point
    (data,) = split_clients(CORPUS, [two_to_one], SplitSettings(test_source="corpus"), seed=0)
    assert Counter(example.label for example in data.test) == {"a": 30, "b": 15}


def test_labels_without_test_examples():
    corpus = Corpus("made", examples("zzza"), examples("aa"))
    (data,) = split_clients(corpus, [[0, 1, 2, 3]], SplitSettings(test_source="corpus"), seed=0)
    assert len(data.test) == 2
    with pytest.raises(DataError, match="None of client 0's labels"):
        split_clients(corpus, [[0, 1, 2]], SplitSettings(test_source="corpus"), seed=0)
    with pytest.raises(DataError, match="'made' has no test examples of its own"):
        split_clients(Corpus("made", CORPUS.train), HALVES, SplitSettings(test_source="corpus"), seed=0)
