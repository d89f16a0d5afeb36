"""The guide's commands, run as they are written, on 127.0.0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from fedguild.config.site import AcceptSettings
from tests.engines.flower.federation_processes import FAST, Started, wait_for

GUIDE = Path(__file__).parents[3] / "docs/guides/federation.md"
STAYS = re.compile(r'# terminal: (?P<name>\S+), until "(?P<said>[^"]+)"\n(?P<command>.*)', re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of the guide."""

    language: str
    text: str


def blocks() -> list[Block]:
    """Returns the guide's blocks, in order."""
    found = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in found]


def test_the_example_of_an_agreement_is_one() -> None:
    (example,) = (block for block in blocks() if block.language == "yaml")
    accepted = AcceptSettings.model_validate(yaml.safe_load(example.text)["accept"])
    assert accepted.leave == ("adapter/*",)


@pytest.mark.processes
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_command_of_the_guide_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, **FAST, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    staying: list[Started] = []
    said = ""
    try:
        for block in blocks():
            if block.language == "sh" and (stays := STAYS.fullmatch(block.text)):
                program, *arguments = stays["command"].split()
                assert program == "fedguild"
                staying.append(Started(arguments, tmp_path / f"{stays['name']}.out"))
                wait_for(lambda here=staying[-1], text=stays["said"]: text in here.said(), staying[-1])  # type: ignore[misc]
            elif block.language in ("sh", "python"):
                command = ["bash", "-euc", block.text] if block.language == "sh" else [sys.executable, "-c", block.text]
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=600, check=False
                )
                assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
                said += done.stdout + done.stderr
    finally:
        for started in reversed(staying):
            started.end()
    assert "client-002 is there" in said
    assert "What does cat number 7 say?" in said
    assert (tmp_path / "guild/server/state/run/report.html").is_file()
    for index in range(3):
        assert (tmp_path / f"guild/client-{index:03d}/work/models/latest/adapter_config.json").is_file()
        leftover = (tmp_path / f"guild/client-{index:03d}/work").resolve()
        assert not subprocess.run(["pgrep", "-f", str(leftover)], capture_output=True, check=False).stdout
