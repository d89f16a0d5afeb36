"""The end of the round loop's process."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

PROGRAM = """
import signal, sys, threading
from fedguild.federation.server_app import _before_sigterm
def flowers(number, frame):
    print("the handler from before", number, flush=True)
    sys.exit(7)
{before}
_before_sigterm(lambda: print("last words", flush=True))
signal.raise_signal(signal.SIGTERM)
"""


@pytest.mark.parametrize(
    ("before", "said", "status"),
    [
        ("signal.signal(signal.SIGTERM, flowers)", "last words\nthe handler from before 15\n", 7),
        ("", "last words\n", -signal.SIGTERM),
    ],
)
def test_last_words_come_before_flowers_own_handler(before: str, said: str, status: int) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(before=before)], capture_output=True, text=True, check=False
    )
    assert (ended.stdout, ended.returncode) == (said, status), ended.stderr
