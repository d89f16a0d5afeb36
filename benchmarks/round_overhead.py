"""Time that a round spends outside forward, backward, optimizer and evaluation; the aim is at most 10 %.

Run: python benchmarks/round_overhead.py
On a GPU the three end with a wait for it, so that their time is theirs.
Runs FLAME on the embedded model for a few rounds and adds up the time inside the three.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from timing import add_device, machine, wait

from fedguild.client.cohort import Step
from fedguild.config import load_config
from fedguild.measuring.log.records import RoundRecord, RunLog
from fedguild.runs import experiment

inside = 0.0


def timed(method: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a method that adds its wall time to `inside`."""

    def wrapper(*args: Any) -> Any:
        global inside
        started = time.perf_counter()
        try:
            return method(*args)
        finally:
            wait()
            inside += time.perf_counter() - started

    return wrapper


def main() -> None:
    """Measures three rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    add_device(parser)
    given = parser.parse_args()
    for name in ("forward", "backward", "apply"):
        setattr(Step, name, timed(getattr(Step, name)))
    print(machine(given.device, given.dtype))
    rounds = 1 if given.small else 3
    where = [f"model.device={given.device}", f"model.dtype={str(given.dtype).removeprefix('torch.')}"]
    config = load_config("flame/tiny-tasks", [f"federation.rounds={rounds}", f"evaluation.every={rounds}", *where])
    with tempfile.TemporaryDirectory() as folder:
        experiment.run(config, Path(folder) / "run")
        records = [record for record in RunLog(Path(folder) / "run").read() if isinstance(record, RoundRecord)]
    whole = sum(record.seconds - record.phase_seconds["evaluate"] for record in records)
    whole += sum(record.phase_seconds["checkpoint"] for record in records)
    print(
        f"rounds without evaluation {whole:.2f} s, forward, backward and optimizer {inside:.2f} s: "
        f"{100 * (1 - inside / whole):.1f} % outside"
    )


if __name__ == "__main__":
    main()
