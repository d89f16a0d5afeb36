import pytest
import torch

from fedguild.client.memory import ClientMemory
from fedguild.core.errors import CheckpointError
from fedguild.core.payload import Payload


def kept(value: float) -> Payload:
    return Payload({"scale": torch.tensor(value)}, {"rank": 4})


def values(memory: ClientMemory, client: str, rounds: range) -> list[float | None]:
    loaded = [memory.load(client, before_round=round) for round in rounds]
    return [found.tensors["scale"].item() if found.tensors else None for found in loaded]


def test_a_round_reads_only_what_earlier_rounds_left(tmp_path):
    memory = ClientMemory(tmp_path)
    for round in (1, 4):
        memory.save("client-000", round, kept(round))
    assert values(memory, "client-000", range(1, 7)) == [None, 1, 1, 1, 4, 4]
    assert memory.load("client-000", before_round=5).scalars == {"rank": 4}


def test_a_repeated_round_replaces_its_memory(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.save("client-000", 1, kept(1))
    memory.save("client-000", 1, kept(8))
    assert values(memory, "client-000", range(2, 3)) == [8]


def test_what_came_after_a_round_to_which_a_run_goes_back_is_gone(tmp_path):
    memory = ClientMemory(tmp_path / "memory", trained=True)
    for round in (1, 3, 4):
        memory.save("client-000", round, kept(round))
        memory.trained.save("client-000", round, kept(10 * round))
    memory.forget_after(3)
    assert values(memory, "client-000", range(1, 7)) == [None, 1, 1, 3, 3, 3]
    assert values(memory.trained, "client-000", range(4, 7)) == [30, 30, 30]


@pytest.mark.parametrize(("left", "up_to"), [((), 0), ((2,), 0), ((2, 3, 4), 2), ((4, 5), 3), ((1, 3, 9), 1)])
def test_what_a_run_that_goes_back_far_would_need_may_be_gone(left, up_to, tmp_path):
    memory = ClientMemory(tmp_path)
    for round in left:
        memory.save("client-000", round, kept(round))
    pruned = [round for round in range(1, 11) if memory.is_pruned("client-000", round, keep=2)]
    assert pruned == list(range(1, up_to + 1))


def test_rounds_sort_as_numbers(tmp_path):
    memory = ClientMemory(tmp_path)
    for round in (99_999, 100_000, 2):
        memory.save("client-000", round, kept(round))
    assert values(memory, "client-000", range(100_001, 100_002)) == [100_000]


def test_forgetting_leaves_every_kept_checkpoint_resumable(tmp_path):
    memory = ClientMemory(tmp_path)
    for round in (1, 2, 3, 5, 6):
        memory.save("client-000", round, kept(round))
    memory.save("client-001", 2, kept(20))
    before = {client: values(memory, client, range(5, 9)) for client in ("client-000", "client-001")}
    memory.forget(older_than_round=4)
    assert {client: values(memory, client, range(5, 9)) for client in before} == before
    assert before == {"client-000": [3, 5, 6, 6], "client-001": [20, 20, 20, 20]}
    assert sorted(path.name for path in (tmp_path / "client-000").iterdir()) == [
        "round-00003.memory",
        "round-00005.memory",
        "round-00006.memory",
    ]


def test_forgetting_removes_what_a_killed_process_left(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.save("client-000", 1, kept(1))
    (tmp_path / "client-000" / ".round-00002.memory.x.part").write_bytes(b"half")
    assert values(memory, "client-000", range(3, 4)) == [1]
    memory.forget(1)
    assert [path.name for path in (tmp_path / "client-000").iterdir()] == ["round-00001.memory"]


def test_a_damaged_memory_is_named(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.save("client-000", 3, kept(1))
    path = tmp_path / "client-000" / "round-00003.memory"
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=r"client-000/round-00003\.memory is damaged"):
        memory.load("client-000", before_round=4)


def test_a_sealed_file_of_something_else_is_named(tmp_path):
    from fedguild.core.sealed import write_sealed

    write_sealed(tmp_path / "client-000" / "round-00001.memory", b"hello")
    with pytest.raises(CheckpointError, match=r"round-00001\.memory is not a client's memory: its header"):
        ClientMemory(tmp_path).load("client-000", before_round=2)


def test_forgetting_again_looks_at_nobody_who_has_nothing_to_forget(tmp_path, monkeypatch):
    memory = ClientMemory(tmp_path)
    kept = Payload({"gate": torch.ones(1)})
    for index in range(5):
        memory.save(f"client-00{index}", 1, kept)
    memory.save("client-001", 2, kept)
    looked_at = []
    rounds_of = ClientMemory._rounds
    monkeypatch.setattr(
        ClientMemory, "_rounds", lambda self, client: (looked_at.append(client), rounds_of(self, client))[1]
    )
    memory.forget(1)
    assert len(looked_at) == 5
    looked_at.clear()
    memory.save("client-003", 3, kept)
    memory.forget(2)
    assert looked_at == ["client-001", "client-003"]
    looked_at.clear()
    memory.forget(3)
    assert looked_at == ["client-003"]
    left = {path.name: [file.name for file in path.iterdir()] for path in tmp_path.iterdir()}
    assert left == {
        "client-000": ["round-00001.memory"],
        "client-001": ["round-00002.memory"],
        "client-002": ["round-00001.memory"],
        "client-003": ["round-00003.memory"],
        "client-004": ["round-00001.memory"],
    }
    looked_at.clear()
    memory.forget(4)
    assert looked_at == []


def test_clients_do_not_see_each_other(tmp_path):
    memory = ClientMemory(tmp_path)
    memory.save("client-001", 1, kept(1))
    memory.save("client-0011", 1, kept(11))
    assert values(memory, "client-001", range(2, 3)) == [1]
    assert values(memory, "client-000", range(2, 3)) == [None]
