"""`fedguild federation`: real clients over the network, each with its own data and its own model."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from fedguild.cli.example_command import ExampleCommand
from fedguild.cli.options import JsonOption, OverridesArgument
from fedguild.cli.output import note, show, show_json
from fedguild.cli.watch import WatchOption, watching
from fedguild.core.chained import SEAL
from fedguild.core.errors import INTERRUPTED, CheckpointError, ConfigError
from fedguild.core.layout import client_name

app = typer.Typer(
    name="federation",
    help="Run a federation of real clients over TLS: every site keeps its data and receives its own model.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)
ServerFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The server's folder.", show_default=False)]
SiteFolder = Annotated[Path, typer.Argument(metavar="FOLDER", help="The client's folder.", show_default=False)]


def _examples(*lines: str) -> str:
    return "\n".join(lines)


@app.command(
    cls=ExampleCommand,
    epilog=_examples(
        "fedguild federation init union --clients 3 --config fedit/tiny-tasks",
        "fedguild federation init union --clients 3 data.dataset=alpaca data.train=own.json",
        "fedguild federation init union --clients 5 --config flame/tiny-tasks --address guild.example.org:9443 seed=1",
        "fedguild federation init demo --clients 3 --shared-data",
    ),
)
def init(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="A new folder.", show_default=False)],
    overrides: OverridesArgument = None,
    clients: Annotated[int, typer.Option("--clients", min=1, help="Number of clients.")] = 3,
    config: Annotated[str, typer.Option("--config", help="The run: a preset or a YAML file.")] = "fedit/tiny-tasks",
    address: Annotated[
        str, typer.Option("--address", help="Address at which clients reach the server, host:port.")
    ] = "127.0.0.1:9443",
    shared_data: Annotated[
        bool,
        typer.Option(
            "--shared-data/--own-data",
            help="Own data: every client reads a file in its folder, and the server has no data. Shared data: the "
            "clients share the config's, as in a simulation, to try a federation on one machine.",
        ),
    ] = False,
) -> None:
    """Write a federation: the server's folder and one per client, with example certificates and keys."""
    from fedguild.federation.project import write_project

    written = write_project(folder, clients, config, overrides or (), address=address, shared_data=shared_data)
    note(
        f"A federation of {clients} clients that runs {written.name}; {folder / 'README.md'} explains how to start it."
    )
    if not shared_data:
        note(
            f"Every client reads its own {written.data.train} (dataset {written.data.dataset}) from its folder; "
            "--shared-data deals the config's data to the clients instead."
        )
    typer.echo(folder)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation key mine/node.key"))
def key(
    path: Annotated[Path, typer.Argument(metavar="FILE", help="The new private key.", show_default=False)],
) -> None:
    """Create a client's key pair; the public key, written next to it, goes to the server's operator."""
    from fedguild.federation.keys import write_key

    typer.echo(write_key(path))


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation server union/server"))
def server(folder: ServerFolder) -> None:
    """Run the server until Ctrl-C, over TLS and only for clients whose keys are in its folder."""
    from fedguild.federation.operations import run_server

    run_server(folder, note)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation client union/client-000"))
def client(folder: SiteFolder) -> None:
    """Run a client until Ctrl-C: its trainer, and the program that communicates with the server."""
    from fedguild.federation.operations import run_client

    run_client(folder, note)


@app.command(
    cls=ExampleCommand,
    epilog=_examples(
        "fedguild federation run union/server",
        "fedguild federation run union/server --watch",
        "fedguild federation run union/server --detach",
        "fedguild federation run union/server --round 4",
    ),
)
def run(
    folder: ServerFolder,
    fresh: Annotated[bool, typer.Option("--fresh", help="Only start a new run; do not resume one.")] = False,
    detach: Annotated[
        bool, typer.Option("--detach", help="Return once the run has started; it continues in the background.")
    ] = False,
    round: Annotated[
        int | None, typer.Option("--round", min=0, help="Go back to this round, whose checkpoint is still there.")
    ] = None,
    watch: WatchOption = False,
    as_json: JsonOption = False,
) -> None:
    """Start the federation's run, or resume it from its last complete round; Ctrl-C stops it."""
    from fedguild.federation.operations import run_federation

    if watch and detach:
        raise ConfigError(
            "--watch ends with the command, which --detach ends at once.", f"Use `fedguild watch {folder}` beside it."
        )
    with watching(folder, on=watch):
        outcome = run_federation(folder, note, fresh=fresh, detach=detach, round=round)
    if as_json:
        show_json(outcome)
    elif outcome["status"] != "stopped":
        typer.echo(outcome["folder"])
    if outcome["status"] == "stopped":
        raise typer.Exit(INTERRUPTED)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation stop union/server"))
def stop(folder: ServerFolder) -> None:
    """Stop the run in progress; `run` resumes it from its last complete round."""
    from fedguild.federation.operations import stop_federation

    stop_federation(folder, note)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation backup union/server backups/2026-11-29"))
def backup(
    folder: ServerFolder,
    copy: Annotated[Path, typer.Argument(metavar="COPY", help="The copy, a new folder.", show_default=False)],
) -> None:
    """Copy a server's folder, also while the server is up and a run goes on."""
    from fedguild.federation.backup import back_up

    back_up(folder, copy)
    typer.echo(copy)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation revoke union/server client-002"))
def revoke(
    folder: ServerFolder,
    client: Annotated[str, typer.Argument(metavar="CLIENT", help="The client, client-002.", show_default=False)],
) -> None:
    """Revoke a client's key, also during a run."""
    from fedguild.federation.operations import revoke as revoke_key

    note(revoke_key(folder, client))


@app.command(
    cls=ExampleCommand,
    epilog=_examples(
        "fedguild federation audit union/server",
        "fedguild federation audit union/server --json",
        "fedguild federation audit union/server --seal 9f86d081884c7d65",
    ),
)
def audit(
    folder: ServerFolder,
    seal: Annotated[
        str | None, typer.Option("--seal", help="A seal that you noted earlier; it is an error if the log lacks it.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check the audit log's chain and show it: who joined, what was asked, accepted, rejected, revoked, delivered."""
    from fedguild.federation.audit import AuditLog
    from fedguild.federation.site import load_server

    log = AuditLog(folder / load_server(folder).state)
    entries = log.read()
    if seal is not None and not any(entry[SEAL] == seal for entry in entries):
        raise CheckpointError(
            f"{log.path} has no entry with the seal {seal}.",
            "If that was noted from this log, entries up to it were rewritten, or removed from the end.",
        )
    if as_json:
        show_json(entries)
        return
    for entry in entries:
        values = ", ".join(f"{key} {value}" for key, value in entry.items() if key not in ("time", "event", SEAL))
        typer.echo(f"{entry['time']}  {entry['event']}: {values}")
    note(f"{len(entries)} entries; none was changed, moved or removed before the last.")
    note(f"The log's seal is {log.seal}: note it on another machine, and give it back with --seal later.")


@app.command(
    cls=ExampleCommand,
    epilog=_examples("fedguild federation status union/server", "fedguild federation status union/server --json"),
)
def status(folder: ServerFolder, as_json: JsonOption = False) -> None:
    """Show whether the server is up, which clients are online, who was refused and why, and how far the run is."""
    from fedguild.federation.operations import status_of

    state = status_of(folder)
    if as_json:
        show_json(asdict(state))
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("client", "status", "since", "examples", "budget"):
        table.add_column(heading)
    for index, description in sorted(state.clients.items(), key=lambda pair: int(pair[0])):
        node = next((node for node in state.nodes if node.get("node-id") == description.get("node")), {})
        table.add_row(
            client_name(int(index)),
            str(node.get("status", "unknown")),
            str(node.get("online-at", "")),
            str(description["sizes"]["train"]),
            str(description["budget"]),
        )
    if state.up:
        online = sum(node.get("status") == "online" for node in state.nodes)
        note(f"{len(state.nodes)} key(s) are registered, {online} client(s) online.")
    where = "no run has started" if state.round is None else f"round {state.round} is complete"
    note(f"The server {'is up' if state.up else 'does not answer'}; {where}.")
    going_on = f"{'A run is stopping' if state.stopping else 'A run is in progress'}: {state.running}."
    note(going_on if state.running else "No run is in progress.")
    for one in state.refused:
        note(f"{one['name']} was refused at {one['time']}: {one['reason'].rstrip('.')}.")
    if state.audit_fault:
        note(f"Who was refused is not known: {state.audit_fault} `fedguild federation audit {folder}` checks the log.")
    show(table)


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation check union/client-000 union/server/run.yaml"))
def check(
    folder: SiteFolder,
    config: Annotated[str, typer.Argument(metavar="CONFIG", help="The run's config.", show_default=False)],
    overrides: OverridesArgument = None,
) -> None:
    """Show what a run's settings can reveal of a site's text, and whether the site accepts the run."""
    from fedguild.config import load_config
    from fedguild.federation.trainer import check_run

    sentences, refusal = check_run(folder, load_config(config, overrides or ()))
    for sentence in sentences:
        typer.echo(sentence)
    if refusal:
        raise ConfigError(f"The site refuses this run: {refusal}.", f"Its limits are `accept` in {folder}/site.yaml.")


@app.command(cls=ExampleCommand, epilog=_examples("fedguild federation settings"))
def settings() -> None:
    """List every setting of site.yaml and server.yaml."""
    from fedguild.config.reference import settings_of
    from fedguild.federation.site import SERVER_FILE, SITE_FILE, ServerSettings, SiteSettings

    for file, schema in ((SITE_FILE, SiteSettings), (SERVER_FILE, ServerSettings)):
        table = Table(box=None, header_style="bold", pad_edge=False, title=file, title_justify="left")
        for heading in ("setting", "accepts", "default", "meaning"):
            table.add_column(heading, overflow="fold")
        for setting in settings_of(schema):
            table.add_row(setting.key, setting.accepts, setting.default, setting.help)
        show(table)


@app.command(hidden=True)
def trainer(folder: SiteFolder) -> None:
    """Run a client's trainer; `fedguild federation client` starts it."""
    from fedguild.federation.trainer import run_trainer

    run_trainer(folder)
