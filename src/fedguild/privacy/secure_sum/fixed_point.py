"""Fixed point: a client's numbers as words that are added modulo 2^64 or 2^32, and the means from their sums.

First every client sends its weights, in three words of 64 bits that together have 120 bits before any carry, and the
largest magnitude of each tensor; then its shares alpha_i = w_i / sum w (64 bits) and alpha_i x_i (32 bits). The mean is
the sum of the latter over the sum of the shares, both over the clients that are left (`error_bound`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import UploadError
from fedguild.privacy.secure_sum.form import Bits, Contribution, Floats, Form

Words = NDArray[np.uint64]
Halves = NDArray[np.uint32]

LIMB_BITS = 40
WEIGHT_UNITS = (2.0**-86, 2.0**-46, 2.0**-6)
"""What one means in each of a weight's words, the lowest first: FLAME's smallest, (1 / 10^6 tokens)^4, is 80 units."""
LARGEST_WEIGHT = WEIGHT_UNITS[-1] * 2.0**LIMB_BITS
COUNT_BIT = 52
"""The highest word of a weight also counts, from this bit on, the clients whose weight is not zero."""
MOST_CLIENTS = 2 ** (63 - COUNT_BIT)
RANGE_UNIT = 2.0**-30
SHARE_UNIT = 2.0**-51
LARGEST_VALUE = 1e6
"""The largest magnitude that a client sends, as the server accepts it of a plain upload."""
_ROUNDING = 2.0**-50
"""Relative error of a sum of weights in fp64, with room to spare."""
LEAST_SHARE = 2.0**-10
"""Where the clients that are left have less of the weight, the mean is too coarse, and there is none."""


@dataclass(frozen=True)
class WeightSums:
    """The sums of the first half.

    Attributes:
        totals: [weights] sum w.
        counts: [weights] int64, the clients with a weight above 0.
        ranges: [means] sum of the clients' largest magnitudes of all means of its range; no smaller than the largest of
            them.
    """

    totals: Floats
    counts: NDArray[np.int64]
    ranges: Floats


def weight_words(form: Form, numbers: Contribution) -> Words:
    """Returns [3 weights + ranges] words: a client's weights, lowest words first, and its largest magnitudes.

    Raises:
        UploadError: a weight is negative, too large or not finite, or a value with a weight is not finite.
    """
    weights = _weights(form, numbers)
    if not bool(((weights >= 0) & (weights < LARGEST_WEIGHT)).all()):
        raise UploadError(f"a weight is not in [0, {LARGEST_WEIGHT:g})")
    rest, words = weights.copy(), []
    for unit in reversed(WEIGHT_UNITS):  # each quotient and remainder is exact in fp64 but the last
        whole = np.ceil(rest / unit) if unit == WEIGHT_UNITS[0] else np.floor(rest / unit)  # shares sum to at most 1
        rest -= whole * unit
        words.append(whole.astype(np.uint64))
    high, middle, low = words
    high += (weights > 0).astype(np.uint64) << np.uint64(COUNT_BIT)
    ranges = np.zeros(len(form.ranges))
    largest = np.array([_largest(form, numbers, weights, name) for name in form.names], dtype=np.float64)
    with np.errstate(invalid="ignore"):
        np.maximum.at(ranges, form.range_places, largest)  # a NaN stays
    if not bool((ranges <= LARGEST_VALUE).all()):
        raise UploadError(f"a value is not finite, or beyond {LARGEST_VALUE:g}")
    return np.concatenate([low, middle, high, np.ceil(ranges / RANGE_UNIT).astype(np.uint64)])


def weighed(form: Form, numbers: Contribution) -> Bits:
    """Returns [weights], which of them are above 0."""
    return _weights(form, numbers) > 0


def weight_sums(form: Form, words: Words) -> WeightSums:
    count = form.weight_count
    low, middle, high = (words[place * count : (place + 1) * count] for place in range(3))
    counts = (high >> np.uint64(COUNT_BIT)).astype(np.int64)
    high = high & np.uint64(2**COUNT_BIT - 1)
    totals = sum(word.astype(np.float64) * unit for word, unit in zip((low, middle, high), WEIGHT_UNITS, strict=True))
    ranges = (words[3 * count :].astype(np.float64) * RANGE_UNIT)[form.range_places]
    return WeightSums(np.asarray(totals, dtype=np.float64), counts, ranges)


def value_words(form: Form, numbers: Contribution, sums: WeightSums, clients: int, fewest: int) -> tuple[Halves, Words]:
    """Returns a client's [values] alpha x and its [weights] alpha, as words.

    Args:
        sums: Of the first half.
        clients: Number of clients in the first half.
        fewest: Weights that fewer clients have count as 0.

    Raises:
        UploadError: a stated sum is smaller than what this client alone has in it. All clients divide by the stated
            sum; were one of them to stop at a share of 1, the sums of two sessions would tell the clients apart.
    """
    shares = _shares(form, numbers, sums, fewest)
    largest = [_largest(form, numbers, _weights(form, numbers), name) for name in form.names]
    if bool((np.array(largest, dtype=np.float64) > sums.ranges).any()):
        raise UploadError("the server states a smaller range of the values than this client's own")
    words = np.rint(shares / SHARE_UNIT).astype(np.uint64)
    words += (shares > 0).astype(np.uint64) << np.uint64(COUNT_BIT)
    values = np.zeros(form.value_count, dtype=np.uint32)
    for name, scale in zip(form.names, scales(sums, clients), strict=True):
        if name in numbers.values and scale > 0:
            mean = form.means[name]
            share = mean.along(mean.weight_axis, shares[form.places[mean.weight]])
            with np.errstate(invalid="ignore"):
                scaled = np.where(share > 0, numbers.values[name].astype(np.float64) * (share * scale), 0.0)
            values[form.slices[name]] = np.rint(scaled).astype(np.int64).astype(np.uint32).reshape(-1)
    return values, words


def scales(sums: WeightSums, clients: int) -> Floats:
    """Returns [means] units of fixed point per 1: as many as the sum over `clients` can hold in 32 bits, signed."""
    room = 2.0**31 - 2 * clients - 2
    with np.errstate(divide="ignore"):
        return np.where(sums.ranges > 0, room / sums.ranges, 0.0)


@dataclass(frozen=True)
class Means:
    """The result of a round.

    Attributes:
        values: Name -> mean, fp64, in the form's shape.
        known: Name -> of the same shape, where there is a mean.
        weights: Name -> [n] sum of the weights of the first half.
        shares: Name -> [n] sum of the shares of the clients that are left: 1 where nobody dropped out.
        bounds: Name -> the largest error of fixed point in any of its values.
    """

    values: Mapping[str, Floats]
    known: Mapping[str, Bits]
    weights: Mapping[str, Floats]
    shares: Mapping[str, Floats]
    bounds: Mapping[str, float]


def means(
    form: Form,
    sums: WeightSums,
    values: Halves,
    words: Words,
    clients: int,
    left: int,
    fewest: int,
    known: Bits | None,
    opened: Bits | None = None,
) -> Means:
    """Returns the means that the sums of `value_words` give.

    Args:
        sums: Of the first half.
        values: [values] the sum of the clients' values.
        words: [weights] the sum of their shares.
        clients: Number of clients in the first half.
        left: Number of these in the second half.
        fewest: Fewest clients behind a mean.
        known: [values], whether enough clients hold a value and its mask was opened; None for all.
        opened: [weights], whether the mask was opened; None for all.
    """
    if opened is not None:
        words = np.where(opened, words, np.uint64(0))
    counts = words >> np.uint64(COUNT_BIT)
    shares = (words & np.uint64(2**COUNT_BIT - 1)).astype(np.float64) * SHARE_UNIT
    enough = (sums.counts >= fewest) & (counts >= fewest) & (shares >= LEAST_SHARE)
    found: dict[str, Floats] = {}
    there: dict[str, Bits] = {}
    bounds: dict[str, float] = {}
    for name, scale in zip(form.names, scales(sums, clients), strict=True):
        mean, place = form.means[name], form.slices[name]
        share = mean.along(mean.weight_axis, shares[form.places[mean.weight]])
        usable = mean.along(mean.weight_axis, enough[form.places[mean.weight]])
        total = values[place].astype(np.int32).astype(np.float64).reshape(mean.shape)
        with np.errstate(divide="ignore", invalid="ignore"):
            found[name] = np.where(usable, total / (scale * share), 0.0) if scale > 0 else np.zeros(mean.shape)
        there[name] = np.array(np.broadcast_to(usable, mean.shape))
        if known is not None:
            there[name] &= known[place].reshape(mean.shape)
        least = float(share[usable].min()) if bool(usable.any()) else 1.0
        bounds[name] = error_bound(float(sums.ranges[form.names.index(name)]), clients, left, least)
    per_key = {key: (sums.totals[place], shares[place]) for key, place in form.places.items()}
    return Means(
        found,
        there,
        {key: total for key, (total, _) in per_key.items()},
        {key: share for key, (_, share) in per_key.items()},
        bounds,
    )


def error_bound(ranges: float, clients: int, left: int, share: float = 1.0) -> float:
    """Returns the largest difference between a fixed-point mean and the exact mean over the clients that are left.

    The values are rounded to half a unit each, of `room / ranges` units per 1, and divided by the sum of the shares.
    The shares are rounded to half of 2^-51 each, which changes the quotient by as much relative to it. fp64 adds a few
    units of 2^-53. Rounding the weights up to the next 2^-86 reduces all shares alike and does not affect the mean.

    Args:
        ranges: Sum of the clients' largest magnitudes R, at most n max|x|.
        clients: n, the clients of the first half.
        left: m of them that are left.
        share: Smallest sum of their shares A.
    """
    unit = ranges / (2.0**31 - 2 * clients - 2)
    return left * unit / (2 * share) + ranges * (left * SHARE_UNIT + 8 * 2.0**-53 * clients) / share


def _weights(form: Form, numbers: Contribution) -> Floats:
    for kind, own, known in (("weights", numbers.weights, form.weights), ("values", numbers.values, form.means)):
        if unknown := sorted(own.keys() - known.keys()):
            raise ValueError(f"No {kind} named {', '.join(unknown)} are in the form.")
    weights = np.zeros(form.weight_count)
    for key, weight in numbers.weights.items():
        weights[form.places[key]] = weight
    return weights


def _shares(form: Form, numbers: Contribution, sums: WeightSums, fewest: int) -> Floats:
    """Returns [weights] alpha."""
    weights = _weights(form, numbers)
    enough = sums.counts >= fewest
    if bool((enough & (weights > sums.totals * (1 + _ROUNDING))).any()):
        raise UploadError("the server states a smaller sum of the weights than this client's own weight")
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(enough & (sums.totals > 0), np.minimum(weights / sums.totals, 1.0), 0.0)


def _largest(form: Form, numbers: Contribution, weights: Floats, name: str) -> float:
    """Returns the largest magnitude of a client's values with a weight; 0 without any, NaN if one is NaN."""
    if name not in numbers.values:
        return 0.0
    mean, value = form.means[name], numbers.values[name]
    if value.shape != mean.shape:
        raise ValueError(f"'{name}' has the shape {list(value.shape)}, but its form {list(mean.shape)}.")
    counted = mean.along(mean.weight_axis, weights[form.places[mean.weight]] > 0)
    return float(np.max(np.abs(np.where(counted, value, 0.0)), initial=0.0))
