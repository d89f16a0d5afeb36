"""UB-SMoE's training step against FLAME's on the same model, clients and data, side by side.

Run: python benchmarks/ub_smoe_step.py
Prints the ratio UB-SMoE / FLAME of the time of a step after the first (forward, backward, pseudo-gradients,
AdamW) and of a round's whole local update, set-up and upload included, for 8 and 1 active experts and a cohort of both.
The aim for a step is at most 1.1.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from models import LAYER, TINY, Size, our_backbone, rows
from timing import add_device, keep_freed_pages, machine

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort, LocalWork
from fedguild.config.training import TrainingSettings
from fedguild.core.payload import Payload
from fedguild.methods import build_method
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.server.method import Roster

RANK = 20
TARGETS = ("attention", "experts")
STEPS = 4


def main() -> None:
    """Measures a small model and one OLMoE-size layer."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    add_device(parser)
    given = parser.parse_args()
    keep_freed_pages()
    print(machine(given.device, given.dtype))
    for name, size, tokens, batch in (("tiny (hidden 256)", TINY, 128, 4), ("one OLMoE-size layer", LAYER, 512, 1)):
        for active in ((8,), (1,), (8, 1)):
            measure(name, size, tokens, batch, active, given.repeats, (given.dtype, given.device))


def measure(
    name: str,
    size: Size,
    tokens: int,
    batch: int,
    active: Sequence[int],
    repeats: int,
    where: tuple[torch.dtype, torch.device],
) -> None:
    """Prints one line; the two take turns, so that load hits both alike."""
    updates = {
        method: local_update(method, our_backbone(size, *where), size, tokens, batch, active)
        for method in ("flame", "ub-smoe")
    }
    seconds: dict[str, list[tuple[float, float]]] = {method: [] for method in updates}
    for turn in range(1 + repeats):
        for method, update in updates.items():
            started = time.perf_counter()
            step = update()
            if turn:
                seconds[method].append((step, time.perf_counter() - started))
    step, whole = (
        {method: median(values[kind] for values in taken) for method, taken in seconds.items()} for kind in (0, 1)
    )
    clients = " and ".join(map(str, active))
    print(
        f"{name}, {clients} active, {batch} x {tokens} tokens: a step FLAME {1e3 * step['flame']:.0f} ms, "
        f"UB-SMoE {1e3 * step['ub-smoe']:.0f} ms, ratio {step['ub-smoe'] / step['flame']:.3f}; "
        f"whole update, ratio {whole['ub-smoe'] / whole['flame']:.3f}",
        flush=True,
    )


def local_update(
    name: str, backbone: Backbone, size: Size, tokens: int, batch: int, active: Sequence[int]
) -> Callable[[], float]:
    """Returns a method's local update in its second round, which returns the seconds of a step after the first."""
    method = build_method(name, {"rank": RANK, "targets": TARGETS})
    settings = TrainingSettings(
        optimizer="adamw", learning_rate=2e-4, batch_size=batch, steps=STEPS, max_grad_norm=None
    )
    clients = [ClientInfo(i, Budget(f"k{k}", k, RANK), batch * STEPS) for i, k in enumerate(active)]
    examples = [rows(size, batch * STEPS, seed=client.index, tokens=tokens) for client in clients]
    state = method.start(
        backbone.info, Roster([client.budget for client in clients], clients), torch.Generator().manual_seed(0)
    )
    state = _after_a_round(state)

    def update() -> float:
        with SlotModel(backbone, [method.plan(backbone.info, client.budget) for client in clients]) as model:
            work = [
                LocalWork(client, data, method.download(state, backbone.info, client), Payload())
                for client, data in zip(clients, examples, strict=True)
            ]
            ends: list[float] = []
            cohort = Cohort(
                model, work, settings, round_index=2, seed=0, on_step=lambda *_: ends.append(time.perf_counter())
            )
            method.local_update(cohort)
        return (ends[-1] - ends[0]) / (len(ends) - 1)

    return update


def _after_a_round(state: Payload) -> Payload:
    """Returns the state with random pseudo-gradients, which nobody can derive, in place of zeros."""
    rng = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(value.shape, generator=rng)
        for name, value in state.tensors.items()
        if name.startswith("pseudo_gradient/")
    }
    return Payload({**state.tensors, **drawn}, {**state.scalars, "version": 1, "step_size": 0.1})


if __name__ == "__main__":
    main()
