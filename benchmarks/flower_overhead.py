"""Cost of real clients over `local`: seconds per round, loads of the backbone, bytes of the codecs.

    python benchmarks/flower_overhead.py [--megabytes 1 50] [--rounds 5] [--clients 2]

Both engines do the same work: plain LoRA of the embedded model, of a rank that makes an upload as large
as wanted, one step per round. The federation is real: Flower's server, a node and a trainer per client,
over TLS with node authentication on 127.0.0.1; all share this machine.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import fmean

import yaml
from timing import machine

from fedguild.config import Config, load_config
from fedguild.federation.project import write_project
from fedguild.measuring.log.records import ClientRecord, RoundRecord, RunLog
from fedguild.runs import experiment

MEGABYTE = 2**20
START_SECONDS, RUN_SECONDS = 180.0, 3600.0


def config_of(rank: int, rounds: int, clients: int, codec: str) -> Config:
    return load_config(
        "fedit/tiny-tasks",
        [
            f"method.rank={rank}",
            f"federation.rounds={rounds}",
            f"federation.clients={clients}",
            f"federation.wire_dtype={codec}",
            "federation.cohort_size=1",
            "federation.quorum=1",
            "federation.budgets=[{name: all, rank: 8}]",
            "training.steps=1",
            "training.batch_size=1",
            f"evaluation.every={rounds}",
            "evaluation.max_examples=1",
        ],
    )


def rank_of(megabytes: float, folder: Path) -> int:
    """Returns the rank whose upload has so many megabytes."""
    experiment.run(config_of(4, 1, 2, "fp32"), folder)
    sizes = [record.upload_bytes for record in RunLog(folder).read() if isinstance(record, ClientRecord)]
    return max(1, round(4 * megabytes * MEGABYTE / fmean(sizes)))


def round_seconds(folder: Path) -> float:
    """Returns the mean wall time of a round's training and transport, but for the first."""
    rounds = [record for record in RunLog(folder).read() if isinstance(record, RoundRecord)]
    return fmean(record.phase_seconds["train"] for record in rounds[1:] or rounds)


def upload_bytes(folder: Path) -> float:
    return fmean(record.upload_bytes for record in RunLog(folder).read() if isinstance(record, ClientRecord))


def federate(config: Config, folder: Path) -> Path:
    """Runs a config with real clients; returns the server's run folder."""
    clients = config.federation.clients
    written = folder / "run.yaml"
    written.write_text(config.resolved_yaml())
    ports = free_ports(1 + clients)
    write_project(folder / "guild", clients, str(written), address=f"127.0.0.1:{ports[0]}", shared_data=True)
    for index in range(clients):
        site = folder / f"guild/client-{index:03d}/site.yaml"
        site.write_text(yaml.safe_dump({**yaml.safe_load(site.read_text()), "port": ports[1 + index]}))
    server = folder / "guild/server/server.yaml"
    server.write_text(yaml.safe_dump({**yaml.safe_load(server.read_text()), "deliver": False}))
    started = []
    try:
        started.append(start("server", folder / "guild/server", "Ready."))
        for index in range(clients):
            started.append(start("client", folder / f"guild/client-{index:03d}", "is up"))
        command = [sys.executable, "-m", "fedguild", "federation", "run", str(folder / "guild/server")]
        subprocess.run(command, check=True, timeout=RUN_SECONDS, stdout=subprocess.DEVNULL)
    finally:
        for process in reversed(started):
            process.send_signal(signal.SIGINT)
            process.wait(60)
    return folder / "guild/server/state/run"


def start(kind: str, folder: Path, said: str) -> subprocess.Popen[bytes]:
    log = folder.with_suffix(".out")
    with open(log, "wb") as output:
        command = [sys.executable, "-m", "fedguild", "federation", kind, str(folder)]
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    due = time.monotonic() + START_SECONDS
    while said not in log.read_text() and time.monotonic() < due and process.poll() is None:
        time.sleep(0.2)
    return process


def free_ports(count: int) -> list[int]:
    doors = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [door.getsockname()[1] for door in doors]
    for door in doors:
        door.close()
    return ports


def loads(folder: Path, clients: int) -> list[int]:
    """Returns how often each client's trainer loaded the backbone."""
    logs = [folder / f"guild/client-{index:03d}/work/trainer.log" for index in range(clients)]
    return [len(re.findall("^Loading ", log.read_text(), re.MULTILINE)) for log in logs]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--megabytes", type=float, nargs="*", default=[1, 50])
    parser.add_argument("--codecs", nargs="*", default=["bf16", "int8"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--clients", type=int, default=2)
    given = parser.parse_args()
    print(machine())
    with tempfile.TemporaryDirectory() as temporary:
        base = Path(temporary)
        for megabytes in given.megabytes:
            rank = rank_of(megabytes, base / f"size-{megabytes:g}")
            config = config_of(rank, given.rounds, given.clients, "fp32")
            experiment.run(config, base / f"local-{megabytes:g}")
            folder = base / f"flower-{megabytes:g}"
            folder.mkdir()
            local, remote = (round_seconds(one) for one in (base / f"local-{megabytes:g}", federate(config, folder)))
            print(
                f"{megabytes:g} MB uploads (rank {rank}): local {local:.2f} s a round, flower {remote:.2f} s, "
                f"added per round and client {(remote - local) / given.clients:.2f} s; "
                f"loads of the backbone in {given.rounds} rounds: {loads(folder, given.clients)}",
                flush=True,
            )
        exact = base / f"local-{given.megabytes[-1]:g}"
        for codec in given.codecs:
            rank = rank_of(given.megabytes[-1], base / f"size-{codec}")
            experiment.run(config_of(rank, given.rounds, given.clients, codec), base / codec)
            print(f"{codec}: {upload_bytes(base / codec) / upload_bytes(exact):.3f} of the bytes of fp32", flush=True)


if __name__ == "__main__":
    main()
