"""A training step with freed pages kept against one with the C library as it is.

Run: python benchmarks/freed_pages.py
Eight clients with four sequences each on a random OLMoE (hidden 256) train in two processes that take
turns, step by step; `fedguild run` keeps freed pages whenever the backbone is on a CPU. Prints the ratio
of the median steps, the page faults of a step and the largest memory of either process.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import time

import torch
from models import TINY, our_backbone, our_step, rows
from timing import add_device, machine, wait

from fedguild.model.heap import keep_freed_pages

CLIENTS, BATCH = 8, 4


def main() -> None:
    """Measures both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=11)
    parser.add_argument("--worker", choices=("kept", "given-back"), help=argparse.SUPPRESS)
    add_device(parser)
    given = parser.parse_args()
    if given.worker:
        work((given.dtype, given.device), keep=given.worker == "kept")
        return
    print(machine(given.device, given.dtype))
    there = ["--device", str(given.device), "--dtype", str(given.dtype).removeprefix("torch.")]
    workers = {name: start(name, there) for name in ("kept", "given-back")}
    seconds: dict[str, list[float]] = {name: [] for name in workers}
    faults: dict[str, list[float]] = {name: [] for name in workers}
    peak: dict[str, float] = {}
    for turn in range(3 + given.repeats):
        for name, worker in workers.items():
            took, faulted, peak[name] = ask(worker)
            if turn >= 3:
                seconds[name].append(took)
                faults[name].append(faulted)
    for worker in workers.values():
        worker.communicate("", timeout=60)
    step = {name: statistics.median(values) for name, values in seconds.items()}
    for name in workers:
        print(
            f"{name}: {1e3 * step[name]:.0f} ms a step, {statistics.median(faults[name]):.0f} page faults, "
            f"{peak[name] / 1024:.0f} MiB at most"
        )
    print(f"given back / kept {step['given-back'] / step['kept']:.2f}")


def start(name: str, there: list[str]) -> subprocess.Popen[str]:
    """Starts one of the two processes."""
    command = [sys.executable, __file__, "--worker", name, *there]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(worker: subprocess.Popen[str]) -> tuple[float, float, float]:
    """Has it do one step; returns seconds, page faults and its largest KiB so far."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("step\n")
    worker.stdin.flush()
    took, faulted, peak = map(float, worker.stdout.readline().split())
    return took, faulted, peak


def work(where: tuple[torch.dtype, torch.device], *, keep: bool) -> None:
    """Does a step whenever it reads a line."""
    if keep and not keep_freed_pages():
        raise SystemExit("The C library here is not glibc, or an environment variable sets its allocator.")
    step, _ = our_step(
        our_backbone(TINY, *where), [rows(TINY, BATCH, seed) for seed in range(CLIENTS)], 8, ("experts",)
    )
    for _ in sys.stdin:
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        step()
        wait()
        took, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_SELF)
        print(took, after.ru_minflt - before.ru_minflt, after.ru_maxrss, flush=True)


if __name__ == "__main__":
    main()
