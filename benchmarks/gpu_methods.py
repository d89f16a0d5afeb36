"""Every method on a device and on a CPU: two short rounds, the clients' losses and the scores compared.

Part (g) of gpu_session.py. Run alone: python benchmarks/gpu_methods.py [--device cuda].
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from tempfile import TemporaryDirectory

import numpy as np
import torch
from timing import add_device, machine

import fedguild
from fedguild.methods import METHODS

SHORT = (
    "federation.clients=4",
    "federation.rounds=2",
    "training.steps=3",
    "evaluation.every=2",
    "evaluation.eval_on_start=false",
    "evaluation.max_examples=16",
)
PROCESSES = 12
LARGEST = 1e-2
"""Largest relative difference of a loss that counts as rounding; after a few steps a router may choose otherwise."""


def compared(name: str, device: str, dtype: str) -> dict[str, float | str]:
    """Returns a method's largest differences: of the losses, relative to the CPU's, and of the scores; or its error."""
    losses, scores = [], []
    try:
        for where in (device, "cpu"):
            with TemporaryDirectory() as folder:
                on = (f"model.device={where}", f"model.dtype={dtype}")
                run = fedguild.run(f"{name}/tiny-tasks", *SHORT, *on, output=f"{folder}/run")
                losses.append(np.array(run.frame("clients")["train_loss"], float))
                scores.append(run.scores)
        np.testing.assert_allclose(*losses, rtol=LARGEST)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}
    apart = np.nanmax(np.abs(losses[0] / losses[1] - 1))
    scored = (abs(scores[0][budget] - scores[1][budget]) for budget in scores[1])  # none without a global model
    return {"loss": float(apart), "score": max(scored, default=0.0)}


def compare_all(
    names: Sequence[str], device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[str, dict[str, float | str]]]:
    """Yields each method's name and its largest differences as they come; several processes share the device."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    processes = min(PROCESSES, os.cpu_count() or 1)
    with ProcessPoolExecutor(processes, mp_context=multiprocessing.get_context("spawn")) as pool:
        asked = {pool.submit(compared, name, str(device), str(dtype).removeprefix("torch.")): name for name in names}
        try:
            for one in as_completed(asked):
                yield asked[one], one.result()
        finally:
            pool.shutdown(cancel_futures=True)


def main(arguments: list[str] | None = None) -> None:
    """Prints a line for each method."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    given = parser.parse_args(arguments)
    print(machine(given.device, given.dtype))
    for name, found in compare_all(list(METHODS), given.device, given.dtype):
        print(name, found, flush=True)


if __name__ == "__main__":
    main()
