"""The processes of `torchrun` other than the first, which serve it until its run ends."""

from __future__ import annotations

from fedguild.core.torchrun import torchrun_place


def follows_torchrun(device: str = "auto") -> bool:
    """Whether this process is one of them; it returns after it has served the first to the end.

    Args:
        device: The kind of device to compute on, as `model.device`.

    Raises:
        ConfigError: as `torchrun_place`.
    """
    place = torchrun_place()
    if place is None or place.rank == 0:
        return False
    from fedguild.engines.torchrun import follow

    follow(device)
    return True
