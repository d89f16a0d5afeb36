"""Fixed point: means within the stated bound of exact ones, down to FLAME's smallest weights."""

from __future__ import annotations

import numpy as np
import pytest

from fedguild.core.errors import UploadError
from fedguild.privacy.secure_sum import fixed_point
from fedguild.privacy.secure_sum.fixed_point import LEAST_SHARE, WEIGHT_UNITS, value_words, weight_sums, weight_words
from fedguild.privacy.secure_sum.form import Contribution, Form, LinearMean
from tests.oracles.secure import weighted_means

FORM = Form({"x": LinearMean((4, 30), "gamma", weight_axis=0), "y": LinearMean((9,), "size")}, {"gamma": 4, "size": 1})


def means_of(numbers, left=None, form=FORM, fewest=3):
    left = list(numbers) if left is None else left
    total = sum((weight_words(form, own) for own in numbers.values()), np.uint64(0))
    sums = weight_sums(form, total)
    sent = [value_words(form, numbers[client], sums, len(numbers), fewest) for client in left]
    values, words = (sum(each[1:], each[0]) for each in zip(*sent, strict=True))
    return fixed_point.means(form, sums, values, words, len(numbers), len(left), fewest, None)


def flame_numbers(clients, temperature, tokens, seed=0, scale=0.05):
    """FLAME's Eq. 6: expert 0 always active, 1 seldom, 2 on one token of all, 3 never."""
    rng = np.random.default_rng(seed)
    numbers = {}
    for client in range(clients):
        examples = int(rng.integers(5, 500))
        shares = np.array([1.0, rng.uniform(1e-4, 1e-2), (1 + client % 3) / tokens, 0.0])
        numbers[client] = Contribution(
            {"x": rng.normal(scale=scale, size=(4, 30)), "y": rng.normal(size=9)},
            {"gamma": shares**temperature * examples, "size": np.array([float(examples)])},
        )
    return numbers


@pytest.mark.parametrize("clients", [3, 8, 64])
@pytest.mark.parametrize(("temperature", "tokens"), [(2, 10**6), (4, 10**6), (4, 10**4), (0.5, 100)])
def test_means_are_within_the_bound_of_exact_ones_for_flames_smallest_weights(clients, temperature, tokens):
    numbers = flame_numbers(clients, temperature, tokens)
    found, exact = means_of(numbers), weighted_means(FORM, numbers, list(numbers))
    for name in FORM.names:
        assert np.array_equal(found.known[name], ~np.isnan(exact[name]))
        error = np.abs(found.values[name] - exact[name])[found.known[name]].max()
        assert error <= found.bounds[name]
    largest = max(np.abs(own.values["x"]).max() for own in numbers.values())
    # Stated: at most n^2 / 2^31 of the largest magnitude, and twice that where the smallest weights are rounded up.
    assert found.bounds["x"] <= 2.1 * clients**2 * 2.0**-32 * largest


@pytest.mark.parametrize("left", [[0, 1, 2, 3, 4, 5, 6], [0, 2, 3, 5, 6, 7]])
def test_means_over_the_survivors_are_divided_by_their_shares(left):
    numbers = flame_numbers(8, 2, 10**5)
    found, exact = means_of(numbers, left), weighted_means(FORM, numbers, left)
    for name in FORM.names:
        known = found.known[name]
        assert known.any()
        assert np.abs(found.values[name] - exact[name])[known].max() <= found.bounds[name]
        share = found.shares[FORM.means[name].weight]
        assert share[share > 0].max() < 1


def test_survivors_with_hardly_any_weight_have_no_mean():
    numbers = flame_numbers(4, 0, 10)
    numbers[3].weights["size"][0] = 1e7
    found = means_of(numbers, [0, 1, 2])
    assert found.shares["size"][0] < LEAST_SHARE
    assert not found.known["y"].any()
    assert found.known["x"].any()


@pytest.mark.parametrize("weight", [1e-30, 1e-24, 3e-13, 0.1, 1.0, 12345.678, 1e9])
def test_a_weight_is_sent_to_120_bits_and_rounded_up(weight):
    form = Form({}, {"w": 1})
    words = weight_words(form, Contribution({}, {"w": np.array([weight])}))
    sums = weight_sums(form, words)
    assert sums.counts[0] == 1
    assert 0 <= sums.totals[0] - weight <= max(WEIGHT_UNITS[0], weight * 2.0**-52)


def test_what_fewer_clients_have_is_not_sent():
    numbers = flame_numbers(4, 2, 100)
    for client in (0, 1):
        numbers[client].weights["gamma"][1] = 0
    found = means_of(numbers)
    assert found.known["x"][:, 0].tolist() == [True, False, True, False]
    sums = weight_sums(FORM, sum((weight_words(FORM, own) for own in numbers.values()), np.uint64(0)))
    sent, _ = value_words(FORM, numbers[3], sums, 4, 3)
    assert not sent[FORM.slices["x"]].reshape(4, 30)[1].any()


@pytest.mark.parametrize("value", [np.nan, np.inf, 2e6])
def test_a_client_does_not_send_what_nobody_could_add(value):
    numbers = flame_numbers(3, 2, 100)
    numbers[1].values["x"][0, 3] = value
    with pytest.raises(UploadError, match="not finite, or beyond"):
        weight_words(FORM, numbers[1])
    numbers[1].weights["gamma"][0] = 0  # without a weight it is not looked at
    weight_words(FORM, numbers[1])


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf, 1e11])
def test_a_weight_out_of_range_is_not_sent(weight):
    numbers = flame_numbers(3, 2, 100)
    numbers[1].weights["size"][0] = weight
    with pytest.raises(UploadError, match="a weight is not in"):
        weight_words(FORM, numbers[1])


def test_a_form_whose_weights_do_not_fit_is_refused():
    with pytest.raises(ValueError, match="'x' needs 4 weight"):
        Form({"x": LinearMean((4, 2), "w", weight_axis=0)}, {"w": 3})


@pytest.mark.parametrize(
    ("kind", "own"), [("weights", ({}, {"other": np.ones(1)})), ("values", ({"other": np.ones(2)}, {}))]
)
def test_terms_that_the_form_does_not_have_are_refused(kind, own):
    """They would count for nothing, beside a weight that counts."""
    form = Form({"mean": LinearMean((2,), "examples")}, {"examples": 1})
    with pytest.raises(ValueError, match=f"No {kind} named other are in the form"):
        weight_words(form, Contribution(*own))
