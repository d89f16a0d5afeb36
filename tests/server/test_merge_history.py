"""The history of merges as a part of the state, and who gets which of its versions."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.merge_ledger import FOLDED, MERGE, VERSION, MergeLedger, by_version
from fedguild.core.payload import Payload
from fedguild.model.weight_changes import changes, with_changes
from fedguild.server import checkpoint, merge_history
from fedguild.server.low_rank import Factors
from fedguild.server.merge_history import HELD, HOLDERS, appended, delivery, echo, merges, no_merges, unheld
from fedguild.server.method import Upload

CLIENTS = [ClientInfo(index, Budget("all", 1, 1), 4) for index in range(4)]


def change(value: float, rank: int = 2) -> dict[str, Factors]:
    return {"q": Factors(torch.full((rank, 3), value), torch.ones(2, rank))}


def uploads(state: Payload, *who: int) -> list[Upload]:
    return [Upload(1, CLIENTS[index], Payload({}, echo(delivery(state, CLIENTS[index])))) for index in who]


def sent(state: Payload, client: int) -> list[int]:
    """The versions that a client gets."""
    return list(by_version(delivery(state, CLIENTS[client]).part(MERGE)))


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


def test_sites_that_have_folded_more_can_go_back_to_any_state(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(merge_history, "FLOOR", 0)
    ledger, states = MergeLedger(tmp_path), [no_merges()]
    for round in range(1, 9):
        ledger.receive(delivery(states[-1], CLIENTS[0]))
        states.append(appended(states[-1], random_change(round, rank=30), uploads(states[-1], 0)))
    for state in states[::-1]:
        found = ledger.receive(delivery(unheld(state), CLIENTS[0]))
        assert found.keys() == merges(state).keys()
        assert all(torch.equal(found[name], value) for name, value in merges(state).items())
    assert unheld(Payload()) == Payload()


def test_a_late_client_does_not_hold_the_version_that_it_did_not_train_on() -> None:
    first = no_merges()
    second = appended(first, change(1.0), uploads(first, 0, 1))
    third = appended(second, change(2.0), [*uploads(second, 0), *uploads(first, 1)])
    assert sent(third, 0) == [2]
    assert sent(third, 1) == [1, 2]


def test_without_ranks_there_is_no_new_version() -> None:
    """Who took part holds what there is, and gets nothing."""
    state = appended(no_merges(), change(1.0), uploads(no_merges(), 0))
    for nothing in ({}, change(0.0, rank=0)):
        same = appended(state, nothing, uploads(state, 1))
        assert same.scalars[VERSION] == 1
        assert sent(same, 1) == []
        assert sent(same, 0) == [1]


def disk(folder: Path) -> tuple[int, int]:
    """The number of files below a folder, and their bytes."""
    sizes = [path.stat().st_size for path in folder.rglob("*") if path.is_file()]
    return len(sizes), sum(sizes)


def random_change(round: int, rank: int = 3) -> dict[str, Factors]:
    """A linear layer's change, and one of experts, whose factors have no common rank with the weights' sizes."""
    rng = torch.Generator().manual_seed(round)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=rng)

    return {
        "q": Factors(normal(rank, 40), normal(30, rank)),
        "experts.up": Factors(normal(4, rank, 40), normal(4, 20, rank)),
    }


DENSE_BYTES = 4 * (30 * 40 + 4 * 20 * 40)
ROUND_BYTES = 4 * 3 * (40 + 30 + 4 * (40 + 20))


def present(round: int, last: int) -> list[int]:
    """Client 0 is there in each round, 1 in every third, 2 from round 30 on, and 3 in the last round alone."""
    return [0, *([1] if round % 3 == 0 else []), *([2] if round >= 30 else []), *([3] if round == last else [])]


def test_a_long_runs_history_has_a_bound_and_all_clients_the_same_bits(tmp_path, monkeypatch) -> None:
    """Files and bytes of the server's disk and of each ledger, and a newcomer's download, over 60 rounds."""
    monkeypatch.setattr(merge_history, "FLOOR", 0)
    ledgers = [MergeLedger(tmp_path / f"client-{index}") for index in range(4)]
    state, folds, exact = (
        no_merges(),
        set(),
        {"q": torch.zeros(30, 40).double(), "experts.up": torch.zeros(4, 20, 40).double()},
    )
    largest = {"server": (0, 0), "ledger": (0, 0), "download": (0, 0)}
    for round in range(1, 61):
        who = present(round, last=60)
        seen = []
        for index in who:
            sent = delivery(state, CLIENTS[index])
            if index == 0 and round > 2:
                assert list(by_version(sent.part(MERGE))) == [round - 1], "who takes part gets the newest alone"
            seen.append(ledgers[index].receive(sent))
            largest["ledger"] = max(largest["ledger"], disk(ledgers[index].folder))
            largest["download"] = max(largest["download"], (0, sum(t.nbytes for t in sent.tensors.values())))
        for found in seen:
            assert found.keys() == merges(state).keys()
            assert all(torch.equal(found[name], value) for name, value in merges(state).items())
            for module, total in exact.items():
                whole = with_changes(torch.zeros(total.shape), [module], changes(found))
                torch.testing.assert_close(whole.double(), total, rtol=1e-5, atol=1e-4)
        change = random_change(round)
        exact = {
            module: total + change[module].up.double() @ change[module].down.double() for module, total in exact.items()
        }
        state = appended(state, change, uploads(state, *who))
        state = checkpoint.save(tmp_path / "server", round, state, fingerprint="run", keep=2)
        largest["server"] = max(largest["server"], disk(tmp_path / "server" / "history"))
        folds.add(state.scalars.get(FOLDED, 0))
    rounds_in_a_dense = DENSE_BYTES // ROUND_BYTES + 1
    assert len(folds) > 60 // (rounds_in_a_dense + 2)
    header = 1000
    several = (rounds_in_a_dense + 4, 2 * DENSE_BYTES + (rounds_in_a_dense + 3) * (ROUND_BYTES + header))
    assert largest["download"][1] <= 2 * DENSE_BYTES + 2 * ROUND_BYTES
    for place in ("server", "ledger"):
        files, size = largest[place]
        assert files <= several[0], place
        assert size <= several[1] + DENSE_BYTES, place
    loaded = checkpoint.load(tmp_path / "server", 60, fingerprint="run").state
    assert all(torch.equal(loaded.tensors[name], value) for name, value in state.tensors.items())
    assert checkpoint.load(tmp_path / "server", 59, fingerprint="run").state.scalars[VERSION] == 59


def test_the_rest_of_a_state_is_left_to_the_method() -> None:
    state = Payload({**no_merges().tensors, "adapter/x": torch.ones(1)}, {**no_merges().scalars, "mine": 3})
    after = appended(state, change(1.0), uploads(state, 0))
    assert all(name.startswith((MERGE, f"server/{MERGE}")) for name in [*after.tensors, *after.scalars])
    assert isinstance(after.tensors[f"{MERGE}/1/q.lora_A"], Tensor)
