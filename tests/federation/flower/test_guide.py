"""The commands of the federation guide, run as they are written, on 127.0.0.1."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from fedguild.federation.site import AcceptSettings
from tests.federation.flower.federation_processes import FAST, Command, wait_for

GUIDE = Path(__file__).parents[3] / "docs/guides/federation.md"
STAYS = re.compile(r'# terminal: (?P<name>\S+), until "(?P<output>[^"]+)"\n(?P<command>.*)', re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A fenced block of the guide."""

    language: str
    text: str


def blocks() -> list[Block]:
    fenced = re.findall(r"^```(\w+)\n(.*?)^```$", GUIDE.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [Block(language, text) for language, text in fenced]


def test_the_example_of_a_site_policy_is_valid() -> None:
    (example,) = (block for block in blocks() if block.language == "yaml")
    accepted = AcceptSettings.model_validate(yaml.safe_load(example.text)["accept"])
    assert accepted.leave == ("adapter/*",)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_every_command_of_the_guide_runs_as_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    monkeypatch.chdir(tmp_path)
    environment = {**os.environ, **FAST, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    started: list[Command] = []
    output = ""
    try:
        for block in blocks():
            if block.language == "sh" and (stays := STAYS.fullmatch(block.text)):
                program, *arguments = stays["command"].split()
                assert program == "fedguild"
                command = Command(arguments, tmp_path / f"{stays['name']}.out")
                started.append(command)
                wait_for(lambda command=command, text=stays["output"]: text in command.output(), command)  # type: ignore[misc]
            elif block.language in ("sh", "python"):
                interpreter = ["bash", "-euc"] if block.language == "sh" else [sys.executable, "-c"]
                command_line = [*interpreter, block.text]
                done = subprocess.run(
                    command_line, env=environment, capture_output=True, text=True, timeout=600, check=False
                )
                assert done.returncode == 0, f"{block.text}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
                output += done.stdout + done.stderr
    finally:
        for command in reversed(started):
            command.terminate()
    assert "client-002 has joined" in output
    assert "What does cat number 7 say?" in output
    assert (tmp_path / "union/server/state/run/report.html").is_file()
    for index in range(3):
        assert (tmp_path / f"union/client-{index:03d}/work/models/latest/adapter_config.json").is_file()
        leftover = (tmp_path / f"union/client-{index:03d}/work").resolve()
        assert not subprocess.run(["pgrep", "-f", str(leftover)], capture_output=True, check=False).stdout
