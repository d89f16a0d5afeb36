"""The history of merges as a part of the state, and who gets which of its versions."""

from __future__ import annotations

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.merge_ledger import MERGE, VERSION, MergeLedger, by_version
from fedguild.payload import Payload
from fedguild.server.low_rank import Factors
from fedguild.server.merge_history import HELD, HOLDERS, appended, delivery, echo, merges, no_merges
from fedguild.server.method import Upload

CLIENTS = [ClientInfo(index, Budget("all", 1, 1), 4) for index in range(4)]


def change(value: float, rank: int = 2) -> dict[str, Factors]:
    return {"q": Factors(torch.full((rank, 3), value), torch.ones(2, rank))}


def uploads(state: Payload, *who: int) -> list[Upload]:
    return [Upload(1, CLIENTS[index], Payload({}, echo(delivery(state, CLIENTS[index])))) for index in who]


def sent(state: Payload, client: int) -> list[int]:
    """The versions that a client gets."""
    return list(by_version(delivery(state, CLIENTS[client]).part(MERGE)))


def test_the_backbone_as_published_sends_nothing() -> None:
    payload = delivery(no_merges(), CLIENTS[0])
    assert payload.tensors == {}
    assert payload.scalars[VERSION] == 0
    assert merges(no_merges()) == {}


def test_who_took_part_gets_the_newest_version_alone() -> None:
    state = no_merges()
    state = appended(state, change(1.0), uploads(state, 0, 1))
    assert [sent(state, client) for client in range(3)] == [[1], [1], [1]]
    state = appended(state, change(2.0), uploads(state, 2, 0))
    assert [sent(state, client) for client in range(4)] == [[2], [1, 2], [2], [1, 2]]
    assert state.tensors[HOLDERS].tolist() == [0, 2]
    assert (state.scalars[VERSION], state.scalars[HELD]) == (2, 1)


def test_every_client_ends_with_the_same_changes(tmp_path) -> None:
    """Through ledgers of their own, whoever takes part in whichever round."""
    ledgers = [MergeLedger(tmp_path / str(index)) for index in range(4)]
    state = no_merges()
    for value, who in enumerate(((0, 1), (1, 2), (1,), (0, 3), (0, 1, 2, 3)), 1):
        for client in who:
            found = ledgers[client].receive(delivery(state, CLIENTS[client]))
            assert found.keys() == merges(state).keys()
            assert all(torch.equal(found[name], value) for name, value in merges(state).items())
        state = appended(state, change(float(value)), uploads(state, *who))


def test_a_late_client_does_not_hold_the_version_that_it_did_not_train_on() -> None:
    first = no_merges()
    second = appended(first, change(1.0), uploads(first, 0, 1))
    third = appended(second, change(2.0), [*uploads(second, 0), *uploads(first, 1)])
    assert sent(third, 0) == [2]
    assert sent(third, 1) == [1, 2]


def test_an_upload_without_its_version_holds_nothing() -> None:
    state = appended(no_merges(), change(1.0), uploads(no_merges(), 0))
    state = appended(state, change(2.0), [Upload(1, CLIENTS[0], Payload())])
    assert sent(state, 0) == [1, 2]


def test_without_ranks_there_is_no_new_version() -> None:
    """Who took part holds what there is, and gets nothing."""
    state = appended(no_merges(), change(1.0), uploads(no_merges(), 0))
    for nothing in ({}, change(0.0, rank=0)):
        same = appended(state, nothing, uploads(state, 1))
        assert same.scalars[VERSION] == 1
        assert sent(same, 1) == []
        assert sent(same, 0) == [1]


def test_the_digest_tells_histories_apart() -> None:
    def digest_of(*values: float) -> object:
        state = no_merges()
        for value in values:
            state = appended(state, change(value), uploads(state, 0))
        return state.scalars["merge_digest"]

    assert digest_of(1.0, 2.0) == digest_of(1.0, 2.0)
    assert len({digest_of(1.0), digest_of(1.0, 2.0), digest_of(2.0, 1.0), digest_of(1.0, 2.5)}) == 4


def test_the_rest_of_a_state_is_left_to_the_method() -> None:
    state = Payload({**no_merges().tensors, "adapter/x": torch.ones(1)}, {**no_merges().scalars, "mine": 3})
    after = appended(state, change(1.0), uploads(state, 0))
    assert all(name.startswith(MERGE) for name in [*after.tensors, *after.scalars])
    assert isinstance(after.tensors[f"{MERGE}/1/q.lora_A"], Tensor)
