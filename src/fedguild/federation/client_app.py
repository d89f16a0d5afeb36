"""The app of a client, which forwards each message to the trainer. `client_executor` runs the installed copy."""

from __future__ import annotations

import os
from pathlib import Path

from fedguild.federation import WORK_FOLDER
from fedguild.federation.flower import ipc
from fedguild.federation.flower.adapter import make_client_app
from fedguild.federation.flower.message import Message


def forward(message: Message) -> Message:
    return ipc.request(Path(os.environ[WORK_FOLDER]), message)


app = make_client_app(forward)
