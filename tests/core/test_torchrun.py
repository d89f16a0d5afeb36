from __future__ import annotations

import pytest

from fedguild.cli.following import follows_torchrun
from fedguild.core.errors import ConfigError
from fedguild.core.torchrun import TorchrunPlace, torchrun_place, torchrun_ranks

COMPLETE = {"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1", "MASTER_ADDR": "host", "MASTER_PORT": "29500"}


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch):
    def setting(variables: dict[str, str]) -> None:
        for name in COMPLETE:
            monkeypatch.delenv(name, raising=False)
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return setting


def test_the_place_is_that_of_torchruns_variables(given):
    given(COMPLETE)
    assert torchrun_place() == TorchrunPlace(rank=3, size=4, local_rank=1, address="host", port=29500)
    assert torchrun_ranks() == 4


@pytest.mark.parametrize("variables", [{}, {"WORLD_SIZE": "1"}, {**COMPLETE, "WORLD_SIZE": "1"}, {"RANK": "1"}])
def test_a_single_process_has_none(variables, given):
    given(variables)
    assert torchrun_place() is None
    assert torchrun_ranks() == 1
    assert not follows_torchrun()


@pytest.mark.parametrize(
    ("variables", "told"),
    [
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is 2, but RANK, MASTER_ADDR, MASTER_PORT is not set"),
        ({**COMPLETE, "WORLD_SIZE": "two"}, "WORLD_SIZE is 'two', but torchrun sets it to a whole number"),
        ({**COMPLETE, "LOCAL_RANK": ""}, "LOCAL_RANK is '', but"),
    ],
)
@pytest.mark.parametrize("reader", [torchrun_place, torchrun_ranks, follows_torchrun])
def test_variables_that_torchrun_does_not_set_so_are_one_error_wherever_they_are_read(variables, told, reader, given):
    given(variables)
    with pytest.raises(ConfigError, match=told):
        reader()
