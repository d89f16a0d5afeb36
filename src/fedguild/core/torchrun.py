"""This process's place among those that `torchrun` started, from the environment variables that it sets."""

from __future__ import annotations

import os
from dataclasses import dataclass

from fedguild.core.errors import ConfigError

_NAMES = ("RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class TorchrunPlace:
    """One of several processes.

    Attributes:
        rank: Its number, from 0.
        size: Number of processes.
        local_rank: Its number on its machine; 0 where the launcher does not set it.
        address: Address of rank 0.
        port: Port of torchrun's own store there.
    """

    rank: int
    size: int
    local_rank: int
    address: str
    port: int


def torchrun_place() -> TorchrunPlace | None:
    """Returns this process's place; None for a single process.

    Raises:
        ConfigError: WORLD_SIZE is over 1, but other variables of torchrun are missing; or one is no whole number.
    """
    size = _number("WORLD_SIZE", "1")
    if size <= 1:
        return None
    if missing := [name for name in _NAMES if name not in os.environ]:
        raise ConfigError(
            f"WORLD_SIZE is {size}, but {', '.join(missing)} is not set.",
            "Start the processes with torchrun, or unset WORLD_SIZE for a single one.",
        )
    ranks = _number("RANK"), size, _number("LOCAL_RANK", "0")
    return TorchrunPlace(*ranks, os.environ["MASTER_ADDR"], _number("MASTER_PORT"))


def torchrun_ranks() -> int:
    """Returns the number of processes that torchrun started; 1 if it started none.

    Raises:
        ConfigError: as `torchrun_place`.
    """
    place = torchrun_place()
    return 1 if place is None else place.size


def _number(name: str, default: str = "") -> int:
    given = os.environ.get(name, default)
    if not given.isdecimal():
        raise ConfigError(f"{name} is '{given}', but torchrun sets it to a whole number.", f"Unset {name}.")
    return int(given)
