"""The command that builds the English checkpoint, stopped and killed as a process, ends with the same weights."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedguild.core.seeding import numpy_rng
from tools.english.build import CHECKPOINT, STATE
from tools.english.pretrain import Recipe

pytestmark = pytest.mark.long

STEPS, DECAY_STEPS = 5, 3
LETTERS = list("abcdefghijklmnopqrstuvwxyz")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of made-up words, enough for a vocabulary and a held-out row of the default sizes."""
    folder, rng = tmp_path_factory.mktemp("corpus"), numpy_rng(0, "words")
    words = ["".join(rng.choice(LETTERS, rng.integers(2, 9))) for _ in range(20_000)]
    documents = [" ".join(rng.choice(words, 150)) for _ in range(1_200)]
    (folder / "words.txt").write_text("\n\n".join(documents))
    return folder


def started(corpus: Path, output: Path) -> subprocess.Popen[str]:
    step = Recipe().step_tokens
    arguments = ["--corpus", corpus, "--output", output, "--tokens", STEPS * step, "--decay-tokens", DECAY_STEPS * step]
    command = [sys.executable, "-m", "tools.english.build", *map(str, arguments)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})


def step_at_the_start(build: subprocess.Popen[str]) -> int:
    """Waits until the training begins; returns the step from which it does."""
    assert build.stderr is not None
    line = next(line for line in build.stderr if "at step" in line)
    return int(line.rpartition(" ")[2])


@pytest.mark.timeout(900)
def test_the_command_stopped_and_killed_ends_with_the_same_weights(corpus: Path, tmp_path: Path) -> None:
    whole = started(corpus, tmp_path / "whole")
    _, told = whole.communicate()
    assert whole.returncode == 0, told

    stopped = started(corpus, tmp_path / "ended")
    assert step_at_the_start(stopped) == 0
    stopped.send_signal(signal.SIGTERM)
    _, told = stopped.communicate()
    assert stopped.returncode == 0, told
    assert "the same command continues from it" in told
    assert (tmp_path / "ended" / STATE).exists()

    killed = started(corpus, tmp_path / "ended")
    assert step_at_the_start(killed) == 1, "SIGTERM ends after the step at hand"
    killed.kill()
    killed.communicate()
    assert killed.returncode == -signal.SIGKILL

    last = started(corpus, tmp_path / "ended")
    assert step_at_the_start(last) == 1, "a kill loses what came after the last save, and nothing else"
    _, told = last.communicate()
    assert last.returncode == 0, told
    weights = [(tmp_path / name / CHECKPOINT / "model.safetensors").read_bytes() for name in ("whole", "ended")]
    assert weights[0] == weights[1]
    cards = [(tmp_path / name / CHECKPOINT / "README.md").read_text() for name in ("whole", "ended")]
    assert cards[0] == cards[1]
