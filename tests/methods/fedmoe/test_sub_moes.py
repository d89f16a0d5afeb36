"""FedMoE's server between rounds: whose p counts for whom, when sets change, and when they stay."""

from __future__ import annotations

import pytest
import torch

from fedguild.core.payload import Payload
from fedguild.methods.fedmoe import FedMoeSettings, adjust, fit
from fedguild.methods.fedmoe.fitting import Limits
from fedguild.methods.fedmoe.sub_moes import FROZEN, SEARCHING, TRYING, SubMoes

LAYER, EXPERTS = "layer.experts", 4
WHOLE, HALF = Limits([1], [1], 4), Limits([1], [1], 2)


def members(*limits: Limits, tasks: list[int] | None = None, seed: int = 3) -> SubMoes:
    return SubMoes.new(
        {LAYER: EXPERTS},
        limits,
        poor=[bounds.most < EXPERTS for bounds in limits],
        tasks=tasks or [0] * len(limits),
        examples=[10 * (1 + client) for client in range(len(limits))],
        seed=seed,
    )


def measure(known: SubMoes, client: int, p: list[float], accuracy: float = 0.5) -> None:
    known.note(client, {LAYER: torch.tensor(p)}, 1.0 - accuracy, accuracy)


def held(known: SubMoes, client: int) -> list[int]:
    return known.ids(client)[LAYER].tolist()


# The start


def test_who_can_hold_all_experts_starts_with_them() -> None:
    """And the others with random ones that fit, their own by their index and the run's seed."""
    known = members(WHOLE, HALF, HALF, HALF, HALF)
    assert held(known, 0) == [0, 1, 2, 3]
    drawn = [held(known, client) for client in range(1, 5)]
    assert {len(own) for own in drawn} == {2}
    assert len({tuple(own) for own in drawn}) > 1
    assert [held(members(WHOLE, HALF, HALF, HALF, HALF), client) for client in range(1, 5)] == drawn
    assert [held(members(WHOLE, HALF, HALF, HALF, HALF, seed=4), client) for client in range(1, 5)] != drawn


def test_they_survive_as_tensors() -> None:
    known = members(WHOLE, HALF)
    measure(known, 0, [0.5, 0.2, 0.2, 0.1])
    again = SubMoes.of(Payload(known.tensors()))
    assert all(torch.equal(value, again.tensors()[name]) for name, value in known.tensors().items())
    again.held[LAYER][0] = False
    again.known[1] = True
    assert held(known, 0) == [0, 1, 2, 3]
    assert not bool(known.known[1])


# The end of stage 1


def test_the_poor_get_the_mean_of_those_of_their_task() -> None:
    """By size, 10 : 20 of the first task: p = (1 · a + 2 · b) / 3; the third has a task of its own."""
    known = members(WHOLE, WHOLE, WHOLE, HALF, tasks=[0, 0, 1, 0])
    measure(known, 0, [0.9, 0.1, 0.0, 0.0])
    measure(known, 1, [0.0, 0.1, 0.6, 0.3])
    measure(known, 2, [0.0, 0.0, 0.0, 1.0])
    measure(known, 3, [0.0, 1.0, 0.0, 0.0])  # on experts that it happened to hold: of no account
    fit(known)
    assert held(known, 3) == [0, 2]  # .3, .1, .4, .2
    assert held(known, 2) == [3]
    assert known.known.tolist() == [True, True, True, False], "nor is it any later, as a peer of others"


def test_who_was_never_asked_gets_the_mean_too() -> None:
    known = members(WHOLE, WHOLE)
    measure(known, 1, [0.0, 0.8, 0.2, 0.0])
    fit(known)
    assert held(known, 0) == [1, 2] == held(known, 1)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [([2], [0]), ([1], [2]), ([3], [3]), ([], [0, 1])],
    ids=["own task", "another task", "another poor client", "nobody"],
)
def test_who_stands_in(measured: list[int], expected: list[int]) -> None:
    """For client 0 of task 0, with room for 2: its task's, else any who can hold all, else any, else all alike."""
    p = {1: [0.0, 0.0, 1.0, 0.0], 2: [1.0, 0.0, 0.0, 0.0], 3: [0.0, 0.0, 0.0, 1.0]}
    known = members(HALF, WHOLE, WHOLE, HALF, tasks=[0, 1, 0, 1])
    for client in measured:
        measure(known, client, p[client])
    fit(known)
    assert held(known, 0) == expected


# Stage 2


def searching() -> SubMoes:
    """Two clients that are alike; client 0 holds 0 and 1, client 1 holds all and uses them all."""
    known = members(WHOLE, WHOLE)
    known.held[LAYER][0] = torch.tensor([True, True, False, False])
    measure(known, 1, [0.4, 0.3, 0.1, 0.2])
    return known


def rounds(known: SubMoes, *accuracies: float, patience: int = 2) -> list[tuple[list[int], int]]:
    """What client 0 holds and is after each round in which it validates alone."""
    seen = []
    for accuracy in accuracies:
        measure(known, 0, [0.7, 0.3, 0.0, 0.0], accuracy)
        adjust(known, [0], FedMoeSettings(patience=patience, peers=3))
        seen.append((held(known, 0), int(known.status[0])))
    return seen


def test_no_gain_means_an_adjustment_and_none_again_the_way_back() -> None:
    """With a patience of 2: .5 is the best, then two rounds without a gain, twice."""
    before, after = [0, 1], [0, 1, 2, 3]
    assert rounds(searching(), 0.5, 0.5, 0.4, 0.3, 0.5, 0.4, 0.1, 0.9) == [
        (before, SEARCHING),
        (before, SEARCHING),
        (after, TRYING),
        (after, TRYING),
        (before, FROZEN),
        (before, FROZEN),
        (before, FROZEN),
        (before, FROZEN),
    ]


def test_a_gain_keeps_the_adjustment_and_the_search_goes_on() -> None:
    """After it there is nothing left to add; the sets stay as they are, and the client is not settled."""
    after = [0, 1, 2, 3]
    assert rounds(searching(), 0.5, 0.4, 0.6, 0.6, 0.5, 0.5, 0.5, patience=1) == [
        ([0, 1], SEARCHING),
        (after, TRYING),
        *[(after, SEARCHING)] * 5,
    ]


def test_the_loss_can_be_what_has_to_get_better() -> None:
    known = searching()
    for loss, status in ((2.0, SEARCHING), (1.5, SEARCHING), (1.6, TRYING), (1.4, SEARCHING)):
        known.note(0, {LAYER: torch.tensor([0.7, 0.3, 0.0, 0.0])}, loss, 0.0)
        adjust(known, [0], FedMoeSettings(gain="loss", patience=1, peers=3))
        assert int(known.status[0]) == status


def test_a_client_without_peers_stays_as_it_is() -> None:
    """Nobody else measured, or nobody is like it: nothing happens, and it is asked again later."""
    alone = members(WHOLE)
    alone.held[LAYER][0] = torch.tensor([True, False, False, False])
    assert rounds(alone, 0.5, 0.4, 0.4, patience=1) == [([0], SEARCHING)] * 3
    unlike = searching()
    measure(unlike, 1, [0.0, 0.0, 0.5, 0.5])
    assert rounds(unlike, 0.5, 0.4, 0.4, patience=1) == [([0, 1], SEARCHING)] * 3
    measure(unlike, 1, [0.4, 0.2, 0.3, 0.1])
    assert rounds(unlike, 0.4, patience=1) == [([0, 1, 2, 3], TRYING)]


def test_adjustments_of_one_round_do_not_see_each_other() -> None:
    """Both clients go by what the other held in the round: 4 and 2 experts change places."""
    known = searching()
    for accuracy in (0.5, 0.4):
        measure(known, 0, [0.7, 0.3, 0.0, 0.0], accuracy)
        measure(known, 1, [0.4, 0.3, 0.1, 0.2], accuracy)
        adjust(known, [0, 1], FedMoeSettings(patience=1, peers=3))
    assert (held(known, 0), held(known, 1)) == ([0, 1, 2, 3], [0, 1])
