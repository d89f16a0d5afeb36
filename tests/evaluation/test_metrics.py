from __future__ import annotations

import math

import pytest
import torch

from fedguild.errors import DataError
from fedguild.evaluation.metrics import (
    exact_match,
    expert_utilisation,
    mean_over_budgets,
    mtal,
    paired_difference,
    parse_label,
    rouge_l,
    spread,
)
from tests.oracles import metrics as oracle


@pytest.mark.parametrize(
    ("prediction", "reference"),
    [
        ("the cat sat on the mat", "a cat lay on the red mat"),
        ("The Cat, sat!", "cat sat"),
        ("b a", "a b"),
        ("", "something"),
        ("nothing alike", "other words"),
        ("one two two three", "two one two three three"),
    ],
)
def test_rouge_l_is_the_longest_common_subsequence(prediction, reference):
    assert rouge_l(prediction, reference) == pytest.approx(oracle.rouge_l(prediction, reference), abs=1e-12)


def test_rouge_l_of_a_hand_worked_pair():
    assert rouge_l("police kill the gunman", "police killed the gunman") == pytest.approx(0.75)


def test_rouge_l_counts_equal_texts_without_latin_letters():
    assert rouge_l("東京", "東京 ") == 1.0
    assert rouge_l("東京", "大阪") == 0.0


def test_exact_match_ignores_case_and_white_space_only():
    assert exact_match("  Two\nwords ", "two words") == 1.0
    assert exact_match("two words.", "two words") == 0.0


@pytest.mark.parametrize(
    ("text", "choices", "named"),
    [
        ("Yes", ("Yes", "No"), 0),
        ("the correct answer is Answer2.", ("answer1", "answer2"), 1),
        ("I know nothing", ("Yes", "No"), None),
        ("No, not yes", ("yes", "no"), 1),
        ("New York City", ("New", "New York", "York"), 1),
        ("answer10", ("answer1", "answer10"), 1),
        ("C++ of course", ("C", "C++"), 1),
        ("", ("a",), None),
    ],
)
def test_parse_label(text, choices, named):
    assert parse_label(text, choices) == named


def test_mtal_counts_clients_equally_and_skips_those_without_tests():
    assert mtal([0.5, None, 1.0, 0.0]) == pytest.approx(0.5)
    with pytest.raises(DataError, match="No client has test examples"):
        mtal([None, None])


def test_mean_over_budgets():
    assert mean_over_budgets({"k=1": 0.2, "k=8": 0.8}) == pytest.approx(0.5)
    with pytest.raises(DataError, match="No budget"):
        mean_over_budgets({})


def test_spread_is_the_sample_deviation():
    result = spread([1.0, 2.0, 4.0])
    assert result.mean == pytest.approx(7 / 3)
    assert result.std == pytest.approx(math.sqrt(((4 / 3) ** 2 + (1 / 3) ** 2 + (5 / 3) ** 2) / 2))
    assert result.count == 3
    assert spread([0.25]).std == 0.0
    assert str(spread([0.5, 0.7])) == "0.600 ± 0.141"
    with pytest.raises(DataError, match="at least one seed"):
        spread([])


def test_paired_difference_cancels_the_seed():
    difference = paired_difference({1: 0.9, 0: 0.4}, {0: 0.3, 1: 0.8})
    assert difference.mean == pytest.approx(0.1)
    assert difference.std == pytest.approx(0.0, abs=1e-12)
    with pytest.raises(DataError, match=r"one side has \[0, 1\] and the other \[0, 2\]"):
        paired_difference({0: 1.0, 1: 1.0}, {0: 1.0, 2: 1.0})


def test_expert_utilisation_against_loops():
    counts = torch.tensor([[5, 0, 3, 8], [4, 4, 4, 4], [16, 0, 0, 0], [0, 0, 0, 0]])
    usage = expert_utilisation(counts, tokens=16)
    for layer, row in enumerate(counts.tolist()):
        rates = [count / 16 for count in row]
        shares = [count / sum(row) if sum(row) else 0.0 for count in row]
        assert usage.frequency[layer].tolist() == rates
        assert usage.rate_entropy[layer].item() == pytest.approx(oracle.entropy(rates), abs=1e-12)
        assert usage.entropy[layer].item() == pytest.approx(oracle.entropy(shares), abs=1e-12)
        assert usage.normalised_entropy[layer].item() == pytest.approx(oracle.entropy(shares) / math.log(4), abs=1e-12)
        assert usage.gini[layer].item() == pytest.approx(oracle.gini(rates), abs=1e-12)
    assert usage.gini.tolist()[1:] == pytest.approx([0.0, 0.75, 0.0])
    assert usage.normalised_entropy.tolist()[1:] == pytest.approx([1.0, 0.0, 0.0])


def test_rate_entropy_may_exceed_ln_m():
    usage = expert_utilisation(torch.full((1, 64), 2), tokens=16)
    assert usage.rate_entropy.item() == pytest.approx(8 * math.log(8))
    assert usage.rate_entropy.item() > math.log(64)
    assert usage.entropy.item() == pytest.approx(math.log(64))


def test_utilisation_without_tokens_or_with_one_expert_is_defined():
    unseen = expert_utilisation(torch.zeros(2, 3), tokens=0)
    single = expert_utilisation(torch.tensor([[7]]), tokens=7)
    for usage in (unseen, single):
        assert usage.entropy.abs().max() == usage.normalised_entropy.abs().max() == usage.gini.abs().max() == 0
    assert unseen.frequency.abs().max() == 0
    assert single.frequency.item() == 1.0
