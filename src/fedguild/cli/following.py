"""The processes of `torchrun` other than the first, which serve it until its run ends."""

from __future__ import annotations

import os


def follows_torchrun(device: str = "auto") -> bool:
    """Whether this process is one of them; it returns after it has served the first to the end.

    Args:
        device: The kind of device to compute on, as `model.device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("RANK", "0") == "0":
        return False
    from fedguild.engines.torchrun import follow

    follow(device)
    return True
