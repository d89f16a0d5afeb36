"""Access to the Hugging Face hub that fails fast without a network, and then uses what was downloaded before."""

from __future__ import annotations

import logging
import time
from functools import lru_cache

from fedguild.core.errors import first_line

TIMEOUT_SECONDS = 10.0
PAUSE_SECONDS = 1.0
_log = logging.getLogger("fedguild")


@lru_cache(maxsize=1)
def reach_hub() -> bool:
    """Whether the hub answers, after at most two attempts and one line about it; asks once per process.

    If it does not, the process goes offline: the libraries use their caches and do not retry on their own.
    """
    from huggingface_hub import constants, get_session

    if constants.HF_HUB_OFFLINE:
        return False
    for attempt in (1, 2):
        try:
            get_session().head(constants.ENDPOINT, timeout=TIMEOUT_SECONDS)
        except Exception as error:  # every transport raises its own errors
            if attempt == 1:
                _log.warning("The Hugging Face hub does not answer (%s); trying once more.", first_line(error))
                time.sleep(PAUSE_SECONDS)
        else:
            return True
    _go_offline()
    return False


def _go_offline() -> None:
    """Has the effect of the environment variable HF_HUB_OFFLINE=1, which is read at import only."""
    import datasets.config
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = True
