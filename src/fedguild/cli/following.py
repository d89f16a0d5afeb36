"""The processes of `torchrun` beside the first, which serve it until its run ends."""

from __future__ import annotations

import os


def follows_torchrun(device: str = "auto") -> bool:
    """Whether this process is one of those; it then has served the first until the end.

    Args:
        device: The kind of device to compute on, as `model.device`.
    """
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or os.environ.get("RANK", "0") == "0":
        return False
    from fedguild.engines.torchrun import follow

    follow(device)
    return True
