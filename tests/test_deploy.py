"""The files in deploy/: linted, and the Slurm script run with stand-ins for Slurm and FedGuild."""

from __future__ import annotations

import configparser
import os
import re
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import yaml

from tests.test_commands import parsed

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("systemd/*.service"))
SCRIPT = DEPLOY / "fedguild.sbatch"
CALLED = '#!/bin/bash\necho "$(basename "$0") $*" >> "$CALLS"\n'


def test_the_container_is_not_root_and_has_one_volume() -> None:
    lines = (DEPLOY / "Containerfile").read_text("utf-8").splitlines()
    words = [line.split(maxsplit=1) for line in lines if re.match(r"[A-Z]+ ", line)]
    known = {"FROM", "ARG", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in words} == known
    assert [rest for name, rest in words if name == "VOLUME"] == ["/data"]
    assert [rest for name, rest in words if name == "USER"] == ["10001:10001"]
    copied = [source for name, rest in words if name == "COPY" for source in rest.split()[:-1]]
    assert [source for source in copied if not (DEPLOY.parent / source).exists()] == []
    extras = re.search(r"\.\[([\w,-]+)\]", "\n".join(lines))
    project = (DEPLOY.parent / "pyproject.toml").read_text("utf-8")
    assert extras is not None
    assert all(f"\n{extra} = [" in project for extra in extras[1].split(","))


def test_the_compose_file_has_a_server_and_three_sites() -> None:
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text("utf-8"))
    services = compose["services"]
    assert list(services) == ["server", "site-000", "site-001", "site-002"]
    for name, service in services.items():
        parsed(service["command"])
        (volume,) = service["volumes"]
        folder = "server" if name == "server" else name.replace("site", "client")
        assert volume == f"./union/{folder}:/data"
        assert service["read_only"] is True
        assert service["cap_drop"] == ["ALL"]
        assert service["healthcheck"]["test"][0] == "CMD"
    build = services["server"]["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).is_file()


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_starts_a_command_as_its_own_user(unit: Path, tmp_path: Path) -> None:
    found = configparser.ConfigParser(interpolation=None)
    found.optionxform = str  # type: ignore[assignment,method-assign]
    found.read_string(unit.read_text("utf-8"))
    assert found.sections() == ["Unit", "Service", "Install"]
    service = found["Service"]
    program, *words = service["ExecStart"].split()
    assert program.endswith("/bin/fedguild")
    parsed(words)
    assert (service["User"], service["NoNewPrivileges"], service["ProtectSystem"]) == ("fedguild", "yes", "strict")
    assert words[-1].startswith(f"/var/lib/{service['StateDirectory']}/")
    if (analyze := shutil.which("systemd-analyze")) is not None:
        (tmp_path / unit.name).write_text(unit.read_text("utf-8").replace(program, "/bin/true"))
        checked = subprocess.run([analyze, "verify", tmp_path / unit.name], capture_output=True, text=True, check=False)
        assert (checked.returncode, checked.stderr) == (0, "")


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    """An environment in which `fedguild` and `scontrol` write down how they are called."""
    for name in ("fedguild", "scontrol"):
        path = tmp_path / "bin" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(CALLED + ('[ -z "$WAIT" ] || sleep 60\n' if name == "fedguild" else ""))
        path.chmod(0o755)
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    return {"PATH": path, "CALLS": str(tmp_path / "calls"), "WAIT": "", "SLURM_JOB_ID": "7"}


def test_a_slurm_job_begins_a_run_or_goes_on_with_it(slurm: dict[str, str], tmp_path: Path) -> None:
    for _ in range(2):
        subprocess.run(["bash", SCRIPT, "flame/tiny-tasks", tmp_path / "run", "seed=1"], env=slurm, check=True)
        (tmp_path / "run").mkdir(exist_ok=True)
        (tmp_path / "run" / "config.yaml").touch()
    calls = (tmp_path / "calls").read_text().splitlines()
    folder = str(tmp_path / "run")
    assert calls == [f"fedguild run flame/tiny-tasks --output {folder} seed=1", f"fedguild resume {folder}"]
    for call in calls:
        parsed(call.split()[1:])
    assert subprocess.run(["bash", SCRIPT], env=slurm, capture_output=True, check=False).returncode == 2


def test_a_slurm_job_near_its_limit_is_queued_again(slurm: dict[str, str], tmp_path: Path) -> None:
    job = subprocess.Popen(["bash", SCRIPT, "flame/tiny-tasks", tmp_path / "run"], env=slurm | {"WAIT": "1"})
    while not (tmp_path / "calls").exists():
        time.sleep(0.02)
    job.send_signal(signal.SIGTERM)
    assert job.wait(20) == 0
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "scontrol requeue 7"
