"""The app that Flower starts on a client's machine for each message: it hands the message to the trainer."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedguild.engines.flower.adapter import make_client_app
from fedguild.engines.flower.link import forward
from fedguild.engines.flower.parcel import Parcel
from fedguild.federation import WORK_FOLDER


def handle(parcel: Parcel, settings: Mapping[str, Any]) -> Parcel:
    """Returns the trainer's answer."""
    return forward(Path(os.environ[WORK_FOLDER]), parcel)


app = make_client_app(handle)
