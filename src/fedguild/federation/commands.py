"""Command lines and environments of Flower's programs."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from fedguild.config.site import ServerSettings, SiteSettings
from fedguild.errors import FedGuildError
from fedguild.federation import SERVER_FOLDER, WORK_FOLDER
from fedguild.files import make_folder, write_text

CONNECTION = "guild"
"""The name of the server in Flower's own config."""
DATABASE = "flower.db"
VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
}
"""Keep Flower from sending telemetry, looking for updates, and installing packages while it runs."""


def server_environment(folder: Path, settings: ServerSettings) -> dict[str, str]:
    """Returns the environment of Flower's programs on the server."""
    home = (folder / settings.state).resolve() / "flower"
    return _environment(home) | {SERVER_FOLDER: str(folder.resolve())}


def site_environment(folder: Path, site: SiteSettings) -> dict[str, str]:
    """Returns the environment of Flower's programs, and of the trainer, on a client's machine."""
    work = (folder / site.work).resolve()
    return _environment(work / "flower") | {WORK_FOLDER: str(work)}


def superlink(folder: Path, settings: ServerSettings) -> list[str]:
    """Returns the command of Flower's server."""
    base = folder.resolve()
    return [
        _program("flower-superlink"),
        *("--ssl-ca-certfile", str(base / settings.authority)),
        *("--ssl-certfile", str(base / settings.certificate)),
        *("--ssl-keyfile", str(base / settings.key)),
        "--enable-supernode-auth",
        *("--database", str(base / settings.state / DATABASE)),
        *("--host", settings.host, "--port", str(settings.port)),
    ]


def supernode(folder: Path, site: SiteSettings) -> list[str]:
    """Returns the command of Flower's program on a client's machine."""
    base = folder.resolve()
    return [
        _program("flower-supernode"),
        *("--root-certificates", str(base / site.certificate)),
        *("--superlink", site.server),
        *("--auth-supernode-private-key", str(base / site.key)),
        *("--port", str(site.port)),
        *("--node-config", f"client={site.client}"),
    ]


def trainer(folder: Path) -> list[str]:
    """Returns the command of a client's trainer."""
    return [sys.executable, "-m", "fedguild", "federation", "trainer", str(folder.resolve())]


def enrolment() -> list[str]:
    """Returns the command that registers and revokes keys (`fedguild.engines.flower.enrolment`)."""
    return [sys.executable, "-m", "fedguild.engines.flower.enrolment", CONNECTION]


def start_run(folder: Path, ticket: str, *, stream: bool = True, round: int | None = None) -> list[str]:
    """Returns the command that starts a run.

    Args:
        folder: The server's folder.
        ticket: The name under which the run leaves its outcome.
        stream: Whether it streams the run's output and ends with it.
        round: The round to go back to; None to go on.
    """
    values = f'ticket="{ticket}"' + ("" if round is None else f" round={round}")
    return [
        _program("flwr"),
        *("run", str((folder / "app").resolve()), CONNECTION),
        *(["--stream"] if stream else []),
        *("--run-config", values),
    ]


def list_nodes() -> list[str]:
    """Returns the command that lists the clients' keys and their online status, as JSON."""
    return [_program("flwr"), "supernode", "list", CONNECTION, "--format", "json"]


def list_runs() -> list[str]:
    """Returns the command that lists the runs that Flower knows, as JSON."""
    return [_program("flwr"), "list", CONNECTION, "--format", "json"]


def write_connection(folder: Path, settings: ServerSettings) -> None:
    """Writes Flower's own config on the server's machine, so that `flwr` finds the server."""
    authority = (folder / settings.authority).resolve()
    write_text(
        (folder / settings.state).resolve() / "flower" / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{local_host(settings)}:{settings.port}"\nroot-certificates = "{authority}"\ninsecure = false\n',
    )


def local_host(settings: ServerSettings) -> str:
    """Returns the address at which the server's own machine reaches it."""
    return "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host


def _environment(home: Path) -> dict[str, str]:
    """Returns this process's environment with Flower's variables, its own folder, and its programs on the path."""
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    make_folder(home)
    return {**os.environ, **VARIABLES, "FLWR_HOME": str(home), "PATH": path, "NO_COLOR": "1"}


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FedGuildError(f"Flower's program {name} is not installed.", "pip install 'fedguild[flower]'")
    return path
