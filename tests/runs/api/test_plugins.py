"""A partition scheme and a callback of another package."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedguild
from fedguild.core.errors import ConfigError, DataError
from tests.plugins import install
from tests.runs.api.conftest import BASE, ROWS

SOURCE = '''
    """Halves: the first client gets one half of the data."""


    def assign(examples, clients, rng):
        half = len(examples) // 2
        return [0 if index < half else 1 + index % (clients - 1) for index in range(len(examples))]


    def leaves_one_out(examples, clients, rng):
        return [index % (clients - 1) for index in range(len(examples))]


    class CALLBACK:
        def __init__(self, after):
            self.after = after

        def __call__(self, event):
            if event.round == self.after:
                event.stop("that is enough")
'''
ENTRIES = """
    [fedguild.partitions]
    halves = halves
    leaves-one-out = halves:leaves_one_out
    [fedguild.callbacks]
    enough = halves
    no-callback = halves:assign
"""


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, tmp_path / "package", "halves", entry_points=ENTRIES, modules={"halves.py": SOURCE})


def test_a_partition_scheme_by_its_name() -> None:
    settings = ["federation.clients=3", "data.partition.minimum=4"]
    shares = fedguild.partition(BASE, *settings, "data.partition.scheme=halves", dataset=ROWS)
    assert list(shares.frame()[["train", "validation", "test"]].sum(axis=1)) == [24, 12, 12]
    with pytest.raises(DataError, match="The partition 'leaves-one-out' leaves client 2 without an example"):
        fedguild.partition(BASE, *settings, "data.partition.scheme=leaves-one-out", dataset=ROWS)
    with pytest.raises(DataError, match="'halves' leaves client 1 with 12 of at least 13"):
        fedguild.partition(BASE, *settings, "data.partition={scheme: halves, minimum: 13}", dataset=ROWS)


def test_a_callback_by_its_name(settings: list[str], tmp_path: Path) -> None:
    result = fedguild.run(BASE, *settings, "callbacks=[{name: enough, after: 1}]", output=tmp_path / "run")
    assert (result.rounds, result.stopped) == (1, "that is enough")
    with pytest.raises(ConfigError, match=r"enough does not take \{\}"):
        fedguild.run(BASE, *settings, "callbacks=[enough]", output=tmp_path / "other")
    with pytest.raises(ConfigError, match=r"no-callback does not take \{\}"):
        fedguild.run(BASE, *settings, "callbacks=[no-callback]", output=tmp_path / "other")
