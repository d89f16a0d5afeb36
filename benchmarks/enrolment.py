"""Time to register the keys of many clients with Flower's server; the aim is at most a minute for 1,000.

Run: python benchmarks/enrolment.py [--keys 1000]
Starts Flower's server of a new project on 127.0.0.1 and registers keys as `fedguild federation server` and `run` do,
with the list of what is registered and the audit log on the disk.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
import time
from pathlib import Path

from timing import machine

from fedguild.federation import commands
from fedguild.federation.keys import write_key
from fedguild.federation.operations import START_SECONDS, register_keys
from fedguild.federation.processes import Child
from fedguild.federation.project import write_project
from fedguild.federation.site import load_server


def main() -> None:
    """Registers the keys once, and once more when all are there."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--keys", type=int, default=1000)
    count = parser.parse_args().keys
    print(machine())
    with tempfile.TemporaryDirectory() as scratch:
        write_project(Path(scratch) / "guild", 2, "flame/tiny-tasks", ["federation.clients=2"], shared_data=True)
        folder = Path(scratch) / "guild" / "server"
        settings = load_server(folder).model_copy(update={"control_port": free_port()})
        nodes, state = folder / settings.nodes, folder / settings.state
        for index in range(2, count):
            write_key(nodes / f"client-{index:03d}")
        commands.write_connection(folder, settings)
        environment = commands.server_environment(folder, settings)
        log = state / "server.log"
        server = Child("server", commands.superlink(folder, settings), environment, log, folder)
        server.start()
        try:
            wait_for(settings.control_port, server)
            for what in ("new", "known"):
                started = time.perf_counter()
                lines = register_keys(nodes, state, environment)
                print(f"{count} keys, all {what}: {time.perf_counter() - started:.1f} s, {len(lines)} registered")
        finally:
            server.terminate()


def free_port() -> int:
    """Returns a port of 127.0.0.1 that is free at the moment."""
    with socket.create_server((commands.LOOPBACK, 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


def wait_for(port: int, server: Child) -> None:
    """Waits until the server accepts connections.

    Raises:
        RuntimeError: it ends before, or takes too long.
    """
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and server.exit_status() is None:
        try:
            socket.create_connection((commands.LOOPBACK, port), timeout=1.0).close()
            return
        except OSError:
            time.sleep(0.2)
    raise RuntimeError(f"Flower's server does not answer: {server.log_tail()}")


if __name__ == "__main__":
    main()
