"""The seed of one training's noise on a real client, from its site's secret and the request."""

from __future__ import annotations

import hmac

from fedguild.config import Config


def private_seed(secret: bytes, config: Config, download: bytes) -> int:
    """Returns the seed of a training's noise: a different one for every request, so that no noise is used twice.

    A server that requested one round twice, with two models or two scales of the noise, and got the same draw in both
    replies, could cancel it in their difference.

    Args:
        secret: The site's secret for the run.
        config: The run's config with this site's settings.
    """
    return int.from_bytes(hmac.digest(secret, config.fingerprint().encode() + download, "sha256"), "big")
