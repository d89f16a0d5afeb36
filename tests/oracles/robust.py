"""Robust estimates of a mean, value by value, from Yin et al. 2018 (Definitions 1 and 2) and Sun et al. 2019."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedguild.server.method import Method
from fedguild.server.terms import RunningMeans, Upload


def median(values: Sequence[Tensor]) -> Tensor:
    """Definition 1: the one-dimensional median of each coordinate."""
    result = torch.empty(values[0].numel(), dtype=torch.float64)
    for coordinate in range(values[0].numel()):
        ordered = sorted(float(value.flatten()[coordinate]) for value in values)
        half = len(ordered) // 2
        result[coordinate] = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
    return result.reshape(values[0].shape)


def trimmed_mean(values: Sequence[Tensor], trim: float) -> Tensor:
    """Definition 2: the mean of each coordinate without its ⌈βC⌉ largest and smallest values."""
    result = torch.empty(values[0].numel(), dtype=torch.float64)
    left_out = min(math.ceil(trim * len(values)), (len(values) - 1) // 2)
    for coordinate in range(values[0].numel()):
        ordered = sorted(float(value.flatten()[coordinate]) for value in values)
        kept = ordered[left_out : len(ordered) - left_out]
        result[coordinate] = sum(kept) / len(kept)
    return result.reshape(values[0].shape)


def over_holders(
    values: Sequence[Tensor], weights: Sequence[Tensor], before: Tensor, robust: str, trim: float
) -> Tensor:
    """The same of each coordinate over the clients whose weight is positive there, the trimmed mean by these weights.

    `before` where there is no such client.
    """
    result = torch.empty(before.numel(), dtype=torch.float64)
    spread = [weight.expand(before.shape).flatten() for weight in weights]
    for coordinate in range(before.numel()):
        pairs = zip(values, spread, strict=True)
        held = sorted((float(x.flatten()[coordinate]), float(w[coordinate])) for x, w in pairs if w[coordinate] > 0)
        if not held:
            result[coordinate] = before.flatten()[coordinate]
        elif robust == "median":
            result[coordinate] = median([torch.tensor(value) for value, _ in held])
        else:
            left_out = min(math.ceil(trim * len(held)), (len(held) - 1) // 2)
            kept = held[left_out : len(held) - left_out]
            result[coordinate] = sum(value * weight for value, weight in kept) / sum(weight for _, weight in kept)
    return result.reshape(before.shape)


def centered_clipping(changes: Sequence[Tensor], weights: Sequence[float], start: Tensor, iterations: int) -> Tensor:
    """Karimireddy et al. 2021, Algorithm 2 with weights: v after so many steps, tau the median distance from v."""
    centre = start
    for _ in range(iterations):
        distances = [math.sqrt(float(((change - centre) ** 2).sum())) for change in changes]
        ordered = sorted(distances)
        half = len(ordered) // 2
        tau = ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2
        step = torch.zeros_like(centre)
        for change, weight, distance in zip(changes, weights, distances, strict=True):
            step += weight * (change - centre) * (min(1.0, tau / distance) if distance else 1.0)
        centre = centre + step / sum(weights)
    return centre


class Medians(RunningMeans):
    """A round's means, each value of which is the median over the clients whose weight for it is positive."""

    def __init__(self, uploads: Sequence[Upload], method: Method) -> None:
        super().__init__()
        self.each = [method.terms(upload) for upload in uploads]
        for upload, terms in zip(uploads, self.each, strict=True):
            self.add(upload, terms)

    def _moved(self, name: str, before: Tensor) -> Tensor:
        held = []
        for term in (terms.means[name] for terms in self.each if name in terms.means):
            value = term.value.detach().double().numpy().copy()
            weight = np.asarray(term.weight, dtype=float)
            if term.axis is not None:
                weight = np.moveaxis(np.broadcast_to(weight, np.moveaxis(value, term.axis, -1).shape), -1, term.axis)
            value[np.broadcast_to(weight, value.shape) <= 0] = np.nan
            if term.held is not None:
                np.moveaxis(value, term.along, 0)[~term.held.numpy()] = np.nan
            held.append(value)
        if not held:
            return before
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # of values that nobody holds
            found = np.nanmedian(np.stack(held), axis=0)
        return torch.from_numpy(np.where(np.isnan(found), before.double().numpy(), found)).float()


def clipped_mean(start: Tensor, values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Section 4: theta + sum_c w_c min(1, M / ||delta_c||) delta_c / sum_c w_c, with M the median of the norms."""
    changes = [(value - start).double() for value in values]
    norms = sorted(math.sqrt(float((change**2).sum())) for change in changes)
    half = len(norms) // 2
    bound = norms[half] if len(norms) % 2 else (norms[half - 1] + norms[half]) / 2
    total = torch.zeros_like(start, dtype=torch.float64)
    for change, weight in zip(changes, weights, strict=True):
        norm = math.sqrt(float((change**2).sum()))
        total += weight * change * (min(1.0, bound / norm) if norm else 1.0)
    return start.double() + total / sum(weights)
