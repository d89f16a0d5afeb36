"""Command lines and environments of the programs of Flower and FedGuild."""

from __future__ import annotations

import os
import secrets
import shutil
import sys
from contextlib import suppress
from pathlib import Path

from fedguild.core.errors import FedGuildError
from fedguild.core.files import make_folder, write_text
from fedguild.federation import SERVER_FOLDER, WORK_FOLDER, templates
from fedguild.federation.site import ServerSettings, SiteSettings

CONNECTION = "guild"
"""The name of the server in Flower's own config."""
DATABASE = "flower.db"
SECRET = "executor.secret"
"""File in Flower's folder that only FedGuild's executor and Flower's program read."""
LOOPBACK = "127.0.0.1"
VARIABLES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONSAFEPATH": "1",
}
"""Keep Flower from sending telemetry, looking for updates, and installing packages while it runs, and Python from
importing modules of the folder of a server or site, which somebody else may have written."""


def server_environment(folder: Path, settings: ServerSettings) -> dict[str, str]:
    """Returns the environment of Flower's programs on the server."""
    home = (folder / settings.state).resolve() / "flower"
    return _environment(home) | {SERVER_FOLDER: str(folder.resolve())}


def site_environment(folder: Path, site: SiteSettings) -> dict[str, str]:
    """Returns the environment of Flower's programs, and of the trainer, on a client's machine."""
    work = (folder / site.work).resolve()
    return _environment(work / "flower") | {WORK_FOLDER: str(work)}


def superlink(folder: Path, settings: ServerSettings) -> list[str]:
    """Returns the command of Flower's server, which only this machine can reach and which runs no app by itself."""
    base = folder.resolve()
    return [
        _program("flower-superlink"),
        *("--ssl-ca-certfile", str(base / settings.ca_certificate)),
        *("--ssl-certfile", str(base / settings.certificate)),
        *("--ssl-keyfile", str(base / settings.key)),
        "--enable-supernode-auth",
        *("--database", str(base / settings.state / DATABASE)),
        *("--host", LOOPBACK, "--port", str(settings.control_port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(_server_secret(folder, settings))),
    ]


def server_executor(folder: Path, settings: ServerSettings) -> list[str]:
    """Returns the command of the program that starts FedGuild's app on the server (`federation.server_executor`)."""
    return [
        *(sys.executable, "-m", "fedguild.federation.server_executor"),
        *(_server_address(settings), str(_server_secret(folder, settings))),
        *(str((folder / settings.ca_certificate).resolve()), str((folder / settings.state).resolve())),
    ]


def server_app(address: str, authority: Path | None, token_file: Path, parent: int) -> list[str]:
    """Returns the command of Flower's program that runs the app of one run on the server.

    Anyone with the token can send requests to the clients in the run's name, and every user can read a command line, so
    the token is passed in a file.
    """
    return [
        *(_program("flwr-serverapp"), "--runtime-api-address", address, "--token-file", str(token_file)),
        *(["--insecure"] if authority is None else ["--root-certificates", str(authority)]),
        *("--parent-pid", str(parent)),
    ]


def gateway(folder: Path, settings: ServerSettings) -> list[str]:
    """Returns the command of the program that faces the clients (`fedguild.federation.flower.gateway`)."""
    base = folder.resolve()
    return [
        *(sys.executable, "-m", "fedguild.federation.flower.gateway"),
        *("--host", settings.host, "--port", str(settings.port)),
        *("--certificate", str(base / settings.certificate), "--key", str(base / settings.key)),
        *("--authority", str(base / settings.ca_certificate), "--server", f"https://{_server_address(settings)}"),
        *_option("--client-bytes", settings.client_bytes),
        *_option("--client-seconds", settings.client_seconds),
        *_option("--connections-per-address", settings.connections_per_address),
        *_option("--header-seconds", settings.header_seconds),
        *_option("--bytes-per-second", settings.client_bytes_per_second),
    ]


def supernode(folder: Path, site: SiteSettings) -> list[str]:
    """Returns the command of Flower's program on a client's machine."""
    base = folder.resolve()
    return [
        _program("flower-supernode"),
        *("--root-certificates", str(base / site.ca_certificate)),
        *("--superlink", site.server),
        *("--auth-supernode-private-key", str(base / site.key)),
        *("--host", LOOPBACK, "--port", str(site.port)),
        *("--isolation", "process", "--superexec-auth-secret-file", str(_site_secret(folder, site))),
        *("--node-config", f"client={site.client}"),
    ]


def client_executor(folder: Path, site: SiteSettings) -> list[str]:
    """Returns the command of the program that runs FedGuild's app on a client (`federation.client_executor`)."""
    executor = [sys.executable, "-m", "fedguild.federation.client_executor"]
    return [*executor, f"{LOOPBACK}:{site.port}", str(_site_secret(folder, site))]


def trainer(folder: Path) -> list[str]:
    return [sys.executable, "-m", "fedguild", "federation", "trainer", str(folder.resolve())]


def enrolment() -> list[str]:
    return [sys.executable, "-m", "fedguild.federation.flower.enrolment", CONNECTION]


def start_run(folder: Path, ticket: str, *, stream: bool = True, round: int | None = None) -> list[str]:
    """Returns the command that starts a run.

    Args:
        ticket: The name under which the run leaves its outcome.
        stream: Whether it streams the run's output and ends with it.
        round: The round to go back to; None for the last.
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


def write_connection(folder: Path, settings: ServerSettings) -> None:
    """Writes Flower's own config on the server's machine, so that `flwr` finds the server."""
    authority = (folder / settings.ca_certificate).resolve()
    write_text(
        (folder / settings.state).resolve() / "flower" / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\n'
        f'address = "{_server_address(settings)}"\nroot-certificates = "{authority}"\ninsecure = false\n',
    )


def write_app(folder: Path) -> None:
    """Writes the app of the server's runs for this version of FedGuild; the clients accept no other."""
    write_text(folder / "app" / "pyproject.toml", templates.APP)


def _option(name: str, value: float | None) -> list[str]:
    return [] if value is None else [name, str(value)]


def _server_address(settings: ServerSettings) -> str:
    """Returns the address at which the server's own machine reaches Flower's server."""
    return f"{LOOPBACK}:{settings.control_port}"


def _server_secret(folder: Path, settings: ServerSettings) -> Path:
    return (folder / settings.state).resolve() / "flower" / SECRET


def _site_secret(folder: Path, site: SiteSettings) -> Path:
    return (folder / site.work).resolve() / "flower" / SECRET


def _environment(home: Path) -> dict[str, str]:
    programs = str(Path(sys.executable).parent)
    path = os.pathsep.join([programs, os.environ.get("PATH", os.defpath)])
    _make_secret(home / SECRET)
    return {**os.environ, **VARIABLES, "FLWR_HOME": str(home), "PATH": path, "NO_COLOR": "1"}


def _make_secret(path: Path) -> None:
    """Draws the secret between one of Flower's programs and its executor, if there is none; only the user can read it.

    Flower's runtime interface gives a node's messages, and the right to run an app, to any caller; with this secret,
    only to callers that know it.
    """
    make_folder(path.parent)
    if not path.exists():
        with suppress(FileExistsError), open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(secrets.token_bytes(32))


def _program(name: str) -> str:
    beside = Path(sys.executable).parent / name
    path = str(beside) if beside.exists() else shutil.which(name)
    if path is None:
        raise FedGuildError(f"Flower's program {name} is not installed.", "pip install 'fedguild[flower]'")
    return path
