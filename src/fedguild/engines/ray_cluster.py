"""Connection of the `ray` engine to a Ray cluster, and the number of actors that the cluster has room for."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

import ray

from fedguild.core.errors import ConfigError

ROUNDING_SLACK = 1e-9
PATIENCE_SECONDS = 30.0
"""Time for which actors wait for resources that other users of the cluster hold."""


def connect(address: str | None, cores: int) -> bool:
    """Connects this process to Ray; returns whether this call did so.

    Args:
        address: Address of a cluster; None for the one already connected, or a new one on this machine.
        cores: Minimum number of CPU cores of a new one.

    Raises:
        ConfigError: there is no cluster at the address.
    """
    if ray.is_initialized():
        return False
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_worker_niceness", "0")  # the actors do the work, so they keep normal priority
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address is None:
        options |= {"include_dashboard": False, "num_cpus": max(os.cpu_count() or 1, cores)}
    try:
        ray.init(address=address or "local", **options)
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigError(
            f"federation.engine.ray.address: there is no Ray cluster at '{address}': {str(error).splitlines()[0]}",
            "Start one with `ray up` or `ray start --head`, or set it to null to start Ray on this machine. A cluster "
            "with token authentication needs RAY_AUTH_MODE=token here, and its token in ~/.ray/auth_token.",
        ) from error
    return True


def place(device: str, gpus: float) -> tuple[str, float]:
    """Returns the device of every actor, and the GPUs that they share.

    Args:
        device: `auto`, `cpu`, `cuda` or `cuda:N`; Ray decides which GPU an actor gets.

    Raises:
        ConfigError: a GPU is asked for, but Ray sees none.
    """
    if device == "cpu" or (device == "auto" and not gpus):
        return "cpu", 0.0
    if not gpus:
        raise ConfigError(f"model.device is {device}, but Ray sees no GPU.", "Set model.device=cpu or auto.")
    return "cuda", gpus


def actors_on(gpus: float, gpu_fraction: float) -> int:
    """Returns how many actors the GPUs hold, each within one GPU; 1 without a GPU."""
    return max(1, int(gpus) * int(1 / gpu_fraction + ROUNDING_SLACK))


def require_room(actors: int, cpus: int, gpu_fraction: float) -> None:
    """Raises unless Ray has the CPU cores and GPUs of all actors, which would otherwise wait for them silently.

    Resources that others are about to release are waited for, at most `PATIENCE_SECONDS`.

    Args:
        cpus: CPU cores of each.
        gpu_fraction: Part of a GPU that each gets; 0 to compute on the CPU.

    Raises:
        ConfigError: it does not; the message has what was requested and what is available.
    """
    each = f"{cpus} CPU core(s)" + (f" and {gpu_fraction:g} GPU" if gpu_fraction else "")
    requested = f"federation.engine.ray: {actors} actor(s) with {each} each, but Ray has"
    if not _fits(actors, cpus, gpu_fraction, total := ray.cluster_resources()):
        raise ConfigError(
            f"{requested} {_format(total)}.", "Lower actors, cpus_per_actor or gpu_fraction, or add machines."
        )
    started = time.monotonic()
    while not _fits(actors, cpus, gpu_fraction, free := ray.available_resources()):
        if time.monotonic() - started > PATIENCE_SECONDS:
            raise ConfigError(
                f"{requested} {_format(free)} free.",
                "Others use the rest: wait for them, or lower actors or cpus_per_actor.",
            )
        time.sleep(0.2)


def _fits(actors: int, cpus: int, gpu_fraction: float, resources: Mapping[str, float]) -> bool:
    enough_gpus = not gpu_fraction or actors <= actors_on(resources.get("GPU", 0.0), gpu_fraction)
    return enough_gpus and actors * cpus <= resources.get("CPU", 0.0)


def _format(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0.0):g} CPU core(s) and {resources.get('GPU', 0.0):g} GPU(s)"
