"""Terms of means, one table for both kinds of rounds: the plain mean and the secure sums of the same terms agree."""

import doctest
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import fedguild.server.method
from fedguild.client.budget import Budget, ClientInfo
from fedguild.core.payload import Payload, with_part
from fedguild.privacy.secure_sum.fixed_point import Means as Opened
from fedguild.server.terms import (
    OpenedMeans,
    RunningMeans,
    Terms,
    Upload,
    contribution,
    form_of,
    mean,
    mean_by_expert,
    mean_by_rank,
    mean_of_budget,
    mean_of_padded,
)

EXPERTS = "layer.experts"
BUDGETS = (Budget("large", 2, 3), Budget("small", 1, 2))
CLIENTS = [ClientInfo(0, BUDGETS[0], 10), ClientInfo(1, BUDGETS[1], 30), ClientInfo(2, BUDGETS[1], 0)]


def lora(rank: int, seed: float) -> dict[str, Tensor]:
    return {
        f"{EXPERTS}.up.lora_A": seed + torch.arange(2.0 * rank * 2).reshape(2, rank, 2),
        f"{EXPERTS}.up.lora_B": seed - torch.arange(2.0 * 3 * rank).reshape(2, 3, rank),
        "q_proj.lora_A": seed * torch.arange(2.0 * rank).reshape(rank, 2),
    }


def experts_of(index: int) -> dict[str, Tensor]:
    return {EXPERTS: torch.tensor([[1.0, 0.0], [3.0, 0.0], [2.0, 0.0]][index])}


WORDS: dict[str, tuple[Callable[[int], int], Callable[[Upload], Terms]]] = {
    "mean": (lambda _: 3, lambda sent: mean("adapter", sent)),
    "mean, uniform": (lambda _: 3, lambda sent: mean("adapter", sent, "uniform")),
    "mean_by_expert": (lambda _: 3, lambda sent: mean_by_expert("adapter", sent, experts_of(sent.client.index))),
    "mean_by_rank": (lambda index: 3 - bool(index), lambda sent: mean_by_rank("adapter", sent, 3)),
    "mean_of_padded": (
        lambda index: 3 - bool(index),
        lambda sent: mean_of_padded("adapter", sent, sent.payload.part("adapter"), 3, float(sent.client.examples)),
    ),
    "mean_of_budget": (lambda _: 3, lambda sent: mean_of_budget("adapter", sent)),
}
"""Word -> the rank that each client has, and its terms."""


def slow(uploads: list[Upload], terms: list[Terms], before: dict[str, Tensor], name: str) -> Tensor:
    """The quotient of two sums in fp64, and the state's value where nobody has a weight."""
    top, bottom, present = torch.zeros(()).double(), torch.zeros(()).double(), torch.zeros(()).double()
    for each in terms:
        if name not in each.means:
            continue
        term = each.means[name]
        weight = torch.as_tensor(term.broadcast, dtype=torch.float64)
        weight = weight.reshape(*weight.shape, *[1] * (term.value.dim() - weight.dim()))
        top, bottom = top + weight * term.value.double(), bottom + weight * torch.ones_like(term.value).double()
        held = term.spread(term.held, term.along) if term.held is not None and term.axis is None else 1.0
        present = present + weight * held * torch.ones_like(term.value).double()
    kept = before.get(name, torch.zeros(()))
    return torch.where(present > 0, top / bottom.clamp(min=1e-30), kept.double())


@pytest.mark.parametrize("word", WORDS)
def test_a_plain_and_a_secure_round_take_the_mean_that_the_terms_state(word: str) -> None:
    rank_of, say = WORDS[word]
    state = with_part("adapter", lora(3, 0.5))
    uploads = []
    for client in CLIENTS:
        rank = rank_of(client.index)
        received = {
            name: value.narrow({"lora_A": -2, "lora_B": -1}[name[-6:]], 0, rank) for name, value in lora(3, 0.5).items()
        }
        sent = Payload(with_part("adapter", lora(rank, 1.0 + client.index)))
        uploads.append(Upload(1, client, sent, Payload(with_part("adapter", received))))
    terms = [say(upload) for upload in uploads]

    plain = RunningMeans()
    for upload, each in zip(uploads, terms, strict=True):
        plain.add(upload, each)
    form, changes = form_of(terms)
    opened = OpenedMeans(summed(form, [contribution(each) for each in terms]), form, changes, ())

    names = list(form.means) if word == "mean_of_budget" else list(state)
    before = {name: state.get(name, torch.zeros(form.means[name].shape)) for name in names}
    for name in names:
        (part, _, key), expected = name.partition("/"), slow(uploads, terms, before, name)
        for means in (plain, opened):
            found = means.moved(part, {key: before[name]})[key]
            torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)
    assert plain.contributors[2].client.index == 2


def summed(form, contributions) -> Opened:
    """The weighted means and the sums of the weights, as a session opens them, without fixed point."""
    weights = {key: np.zeros(count) for key, count in form.weights.items()}
    for each in contributions:
        for key, numbers in each.weights.items():
            weights[key] += numbers
    values, known = {}, {}
    for name, mean_ in form.means.items():
        total = np.zeros(mean_.shape)
        for each in contributions:
            if name in each.values:
                total += mean_.along(mean_.weight_axis, each.weights[mean_.weight]) * each.values[name]
        weight = np.broadcast_to(mean_.along(mean_.weight_axis, weights[mean_.weight]), mean_.shape)
        known[name] = weight > 0
        values[name] = np.divide(total, weight, out=np.zeros(mean_.shape), where=weight > 0)
    return Opened(values, known, weights, {}, {})


def test_the_method_of_the_protocols_docstring_runs() -> None:
    assert doctest.testmod(fedguild.server.method).failed == 0
