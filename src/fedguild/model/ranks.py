"""The processes (ranks) that share one backbone's layers, and their agreement on what they compute next.

A layer that is sharded over several ranks is gathered from all of them in each of its forward and backward passes.
Ranks train different clients, with different numbers of steps, so before each pass they agree on what comes next. A
rank that wants something else, or nothing, takes part with an empty pass, which gathers and releases the same layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from enum import IntEnum
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from fedguild.core.errors import FedGuildError, first_line
from fedguild.model.rank_watch import RankWatch

TIMEOUT_SECONDS = 1800.0
"""Default time that a rank waits for the others."""
GRACE_SECONDS = 1.0
"""Time in which the ranks that wait tell each other that they do."""
DEVICE_MARGIN_SECONDS = 60.0
"""Time that a GPU's communication waits longer than the ranks, which name who hangs before NCCL ends them."""
_STACKS = 16
"""More than the stacks of a model."""
_PASS, _WAITS = "fedguild/pass", "fedguild/waits"


class Direction(IntEnum):
    """What a rank wants to compute next. Where ranks differ, the largest comes first.

    A backward pass has precedence: it belongs to a forward pass that its rank has completed.
    """

    NOTHING = 0
    FORWARD = 1
    BACKWARD = 2


class Event(NamedTuple):
    """A pass through one stack of layers: the model's only one, or an encoder or a decoder."""

    direction: Direction
    stack: int = 0


@dataclass
class Ranks:
    """This process's place among the ranks of a backbone; see the module's docstring.

    Attributes:
        rank: Its number, from 0.
        size: Number of ranks.
        store: The store through which the ranks met, on rank 0.
        timeout_seconds: Time that a rank waits for the others.
        empty: Takes part in a pass of other ranks, set by `fedguild.model.sharding`.
        empty_passes: Number of such passes so far.
        watch: Names late ranks while this one waits for its GPU; None on a CPU, where the agreement does.
    """

    rank: int
    size: int
    device: torch.device
    store: Store
    timeout_seconds: float = TIMEOUT_SECONDS
    empty: Callable[[Event], None] | None = None
    empty_passes: int = 0
    watch: RankWatch | None = field(default=None, repr=False)
    _passes: int = field(default=0, repr=False)

    @classmethod
    def join(
        cls,
        rank: int,
        size: int,
        device: torch.device,
        address: str,
        port: int,
        timeout_seconds: float = TIMEOUT_SECONDS,
    ) -> Ranks:
        """Meets the other ranks; returns when all have arrived.

        Args:
            rank: This process's number; rank 0 opens the port.
            address: Address of rank 0.
            port: Port of rank 0.
            timeout_seconds: Time that a rank waits for the others, here and later.

        Raises:
            FedGuildError: the others did not arrive in time.
        """
        timeout = timedelta(seconds=timeout_seconds)
        try:
            store = TCPStore(address, port, size, rank == 0, timeout=timeout)
            backend = "gloo" if device.type == "cpu" else f"cpu:gloo,{device.type}:nccl"
            dist.init_process_group(
                backend,
                store=PrefixStore("group", store),
                rank=rank,
                world_size=size,
                timeout=timeout,
                device_id=None if device.type == "cpu" else device,
            )
        except (RuntimeError, ValueError) as error:
            raise FedGuildError(
                f"Rank {rank} did not meet the {size - 1} others at {address}:{port} within {timeout_seconds:g} s: "
                f"{first_line(error)[:200]}",
                "See the output of the other processes.",
            ) from error
        ranks = cls(rank, size, device, store, timeout_seconds)
        store.set(f"{_PASS}/{rank}", "0")
        if device.type != "cpu":
            ranks.watch_device(dist.group.WORLD)
        return ranks

    def watch_device(self, group: Any) -> None:
        """Extends the timeout of a GPU's communication beyond the ranks' own, and starts the watch."""
        longer = timedelta(seconds=self.timeout_seconds + DEVICE_MARGIN_SECONDS)
        group._get_backend(self.device)._set_default_timeout(longer)
        self.watch = RankWatch(self.store.clone(), _PASS, self.rank, self.size, self.timeout_seconds)  # type: ignore[attr-defined]
        self.watch.start()

    def close(self) -> None:
        if self.watch is not None:
            self.watch.end()
        if dist.is_initialized():
            dist.destroy_process_group()

    def take(self, wanted: Event) -> None:
        """Returns when all ranks have reached what this one wants; takes part in what others want before.

        Raises:
            FedGuildError: a rank did not arrive in time; the message names it.
        """
        while (event := self._agree(wanted)) != wanted:
            self.empty_passes += 1
            if self.empty is not None:
                self.empty(event)
        if self.watch is not None and wanted.direction is Direction.NOTHING:
            self.watch.rest()

    def wait_for_others(self) -> None:
        """Takes part in the passes of the others until no rank has any left.

        Raises:
            FedGuildError: as `take`.
        """
        self.take(Event(Direction.NOTHING))

    @contextmanager
    def naming_who_hangs(self) -> Iterator[None]:
        """Turns a failed communication inside the block into an error that names the missing ranks.

        Raises:
            FedGuildError: a rank did not arrive.
        """
        try:
            yield
        except RuntimeError as error:
            if not _is_communication(error):
                raise
            raise self._missing(error) from error

    def _agree(self, wanted: Event) -> Event:
        self._passes += 1
        if self.watch is not None:
            self.watch.begin(self._passes)
        with self.naming_who_hangs():
            self.store.set(f"{_PASS}/{self.rank}", str(self._passes))
            largest = torch.tensor([_STACKS * wanted.direction + wanted.stack])
            dist.all_reduce(largest, dist.ReduceOp.MAX)
        direction, stack = divmod(int(largest), _STACKS)
        return Event(Direction(direction), stack)

    def _missing(self, error: Exception) -> FedGuildError:
        """Returns the error that names the ranks that are behind this one, or else those that do not wait."""
        try:
            self.store.set(f"{_WAITS}/{self.rank}/{self._passes}", "1")
            reached = [int(self.store.get(f"{_PASS}/{rank}")) for rank in range(self.size)]
            missing = [rank for rank, passes in enumerate(reached) if passes < self._passes]
            if not missing:
                time.sleep(GRACE_SECONDS)
                waiting = [self.store.check([f"{_WAITS}/{rank}/{self._passes}"]) for rank in range(self.size)]
                missing = [rank for rank, waits in enumerate(waiting) if not waits]
        except RuntimeError:
            missing = [0]  # its store does not answer
        names = ", ".join(map(str, missing)) or "unknown"
        return FedGuildError(
            f"Rank {names} of {self.size} did not come to pass {self._passes} of the backbone that they share; "
            f"rank {self.rank} waited for {self.timeout_seconds:g} s ({first_line(error)[:200]}).",
            "Its process hangs, is out of memory or has ended: see its output.",
        )


def _is_communication(error: RuntimeError) -> bool:
    """Whether an error comes from the communication between ranks."""
    if isinstance(error, dist.DistError):
        return True
    said = str(error).lower()
    return any(word in said for word in ("timed out", "gloo", "nccl", "connection reset", "connection closed"))
