"""The program on a client's machine that takes the messages received by Flower's node.

It runs FedGuild's own app as it is installed here, whatever app the server sends: no code of the server is executed. A
message of a run with another app is answered with an error.
"""

from __future__ import annotations

import sys
import threading
from pathlib import Path

from fedguild.core.text import printable
from fedguild.federation import templates
from fedguild.federation.client_app import app
from fedguild.federation.flower import bundle
from fedguild.federation.flower.tasks import AGENT_APP, CLIENT_APP, Task, TaskSource, answer


def main(address: str, secret: str) -> None:
    """Answers messages until a signal ends it.

    Args:
        address: Where Flower's node answers, `host:port`.
    """
    source = TaskSource(address, Path(secret))
    for task in source.forever(CLIENT_APP, AGENT_APP):
        if task is not None:
            # A node has one message at a time, so one that is still waited for when the next comes is of a run that has
            # ended: Flower never gives out the rest of it, and waits two hours for that.
            threading.Thread(target=_answer, args=(source, task), daemon=True).start()


def _answer(source: TaskSource, task: Task) -> None:
    try:
        refused = answer(source, task, app, lambda content: bundle.refusal(content, templates.APP))
    except Exception as error:  # The node answers the message itself once it misses the heartbeats.
        reason = f"{type(error).__name__}: {error}"
        print(f"A message was given up: {printable(reason, 300)}", file=sys.stderr, flush=True)
        return
    if refused:
        print(f"Refused an app that is not FedGuild's: {printable(refused, 300)}.", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
