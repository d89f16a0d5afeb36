"""Shared names: of clients, and of files in the folders of a run and of a server."""

from __future__ import annotations

from typing import Final

CONFIG: Final = "config.yaml"
"""In a run's folder, which it marks as one: the config. Written last of what is known before the first round."""
METHOD: Final = "method.json"
"""In a run's folder: every option of the method, as it runs."""
ENVIRONMENT: Final = "environment.json"
"""In a run's folder: the machine and the versions."""
PARTITION: Final = "partition.json"
"""In a run's folder: the distribution of the data over the clients."""
SAMPLES: Final = "samples.json"
"""In a run's folder: answers to a few held-out examples, before and after training."""
STOPPED: Final = "stopped.json"
"""In a run's folder: after which round a callback stopped the run, and why."""
DIVERGED: Final = "diverged.json"
"""In a run's folder: in which words its training diverged."""
CHECKPOINTS: Final = "checkpoints"
"""In a run's folder: the folder of its checkpoints."""
MEMORY: Final = "clients"
"""In a run's folder: the folder of what its clients keep."""

RUN: Final = "run"
"""In the folder of a federation's server: the folder of its run."""
UPLOADS: Final = "uploads"
"""In the folder of a federation's server: the folder of a round's uploads."""
SPOOL: Final = "spool"
"""In a run's folder: the folder of a round's uploads while they are compared."""
OUTCOMES: Final = "outcomes"
"""In the folder of a federation's server: the folder of how its runs ended."""
MEMBERS: Final = "members.json"
"""In the folder of a federation's server: the clients that have joined."""
REGISTERED: Final = "registered.json"
"""In the folder of a federation's server: the keys that Flower knows."""
AUDIT: Final = "audit.jsonl"
"""In the folder of a federation's server: who joined, sent, was refused."""

_CLIENT = "client-"


def client_name(index: int) -> str:
    """Returns a client's name in files, tables and messages, `client-002`."""
    return f"{_CLIENT}{index:03d}"


def client_index(name: str) -> int | None:
    """Returns the index in a client's name, 2 for `client-002`; None for other names."""
    number = name.removeprefix(_CLIENT)
    return int(number) if number != name and number.isdigit() else None
