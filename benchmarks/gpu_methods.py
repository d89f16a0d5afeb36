"""Every method on a device and on a CPU: two short rounds in fp32, the clients' losses and the scores compared.

Part (g) of gpu_session.py. Run alone: python benchmarks/gpu_methods.py [--device cuda].
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from tempfile import TemporaryDirectory

import torch
from timing import add_device

import fedguild
from fedguild.methods import METHODS

SHORT = (
    "federation.clients=4",
    "federation.rounds=2",
    "training.steps=3",
    "evaluation.every=2",
    "evaluation.eval_on_start=false",
    "evaluation.max_examples=16",
    "model.dtype=float32",
)
PROCESSES = 12


def compared(name: str, device: str) -> dict[str, float | str]:
    """Returns a method's largest differences: of the losses, relative to the CPU's, and of the scores; or its error."""
    try:
        losses, scores = [], []
        for where in (device, "cpu"):
            with TemporaryDirectory() as folder:
                run = fedguild.run(f"{name}/tiny-tasks", *SHORT, f"model.device={where}", output=f"{folder}/run")
                losses.append(run.frame("clients")["train_loss"].dropna().tolist())
                scores.append(run.scores)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    apart = [abs(ours - theirs) / max(abs(theirs), 1e-9) for ours, theirs in zip(*losses, strict=True)]
    scored = [abs(scores[0][budget] - scores[1][budget]) for budget in scores[1]]
    return {"loss": max(apart, default=math.nan), "score": max(scored, default=math.nan)}


def compare_all(names: Sequence[str], device: torch.device) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Yields each method's name and its largest differences; several processes share the device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes = min(len(names), PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from zip(names, pool.map(partial(compared, device=str(device)), names), strict=True)


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    given = parser.parse_args(arguments)
    for name, found in compare_all(list(METHODS), given.device):
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
