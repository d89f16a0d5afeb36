"""Eight minutes on one GPU: parity first, then the figures that decide most; each is written at once.

Run: benchmarks/gpu_session.sh WHEELS, or python benchmarks/gpu_session.py.
With --device cpu --dtype float32 --small it rehearses.

(a) parity: the device computes what a CPU does, in fp32 and in the asked dtype, with all kernels; else it ends here.
(b) step: a fused step of 8 clients on four budgets, 1,024 tokens each, on OLMoE-1B-7B's layout with random weights:
    tokens a second, share of peak, the time of its parts, and its operations.
(c) peft: the same clients one after the other with peft, and how many times as long they take.
(d) large: the step of (b) on Qwen3-30B-A3B's layout with 12 of its layers.
(e) decode: tokens a second of generation on four budgets.
(f) testbeds: tokens a second of 8 clients on the English model, SmolLM2 and its mixture, where they are there.
(g) methods: two short rounds of every method in fp32, compared with a CPU's.

Figures are in `results.json` of the output folder, in the form of `gpu.py`, whose cases these are. After `--seconds`
nothing further begins. A second call measures what is missing.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu import LAYOUTS, OURS, PEFT, TYPICAL_CLIENTS, TYPICAL_TOKENS, UNEQUAL, Bench, Case, Training, typical
from gpu_methods import compare_all
from gpu_parity import rows, say
from timing import add_device, machine, wait

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ModelError
from fedguild.data.batches import collate
from fedguild.methods import METHODS
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import load_backbone
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel

OLMOE, _, QWEN = (layout.name for layout in LAYOUTS)
TESTBEDS = ("english", "models/smollm2-135m", "models/smollm2-moe")
SECONDS = 480.0


def case_of(bench: Bench, layout: str) -> Case:
    """Returns the step of (b) on a layout."""
    clients, tokens = (4, 16) if bench.small else (TYPICAL_CLIENTS, TYPICAL_TOKENS)
    return Case(layout, OURS, clients, tokens, UNEQUAL)


def step(bench: Bench) -> None:
    """(b)."""
    case = case_of(bench, OLMOE)
    bench.run([case], 0)
    if bench.results["cases"][case.key]["outcome"] != "ok":
        return
    backbone = bench.backbone(case)
    training = bench.training(backbone, case)
    with training.model, backbone.caching():
        whole, forward, clip, update = (
            1e3 * typical(one, few=bench.small)
            for one in (training.step, training.forward, partial(training.optimizer.clip, 1.0), training.update)
        )
        parts = {"forward": forward, "backward": whole - forward - clip - update, "clip": clip, "optimizer": update}
        bench.results["parts_milliseconds"] = parts
        bench.save()
        say(f"{whole:.1f} ms: " + ", ".join(f"{part} {value:.1f}" for part, value in parts.items()))
        bench.results["operations"] = operations(bench, training)
    bench.save()
    say(bench.results["operations"])


def operations(bench: Bench, training: Training) -> str:
    """Returns a table of the operations of one step by their time, and the numbers of launches, copies and waits."""
    from torch.profiler import ProfilerActivity, profile

    cuda = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
        training.step()
        wait()
    found = profiled.key_averages()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    counted = ("cudaLaunchKernel", "cuLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "aten::nonzero")
    counts = {event.key: event.count for event in found if event.key.startswith(counted)}
    return f"{found.table(sort_by=order, row_limit=30, max_name_column_width=60)}\n{counts}"


def peft(bench: Bench) -> None:
    """(c)."""
    ours = case_of(bench, OLMOE)
    theirs = [Case(OLMOE, PEFT, 1, ours.tokens, (budget,)) for budget in UNEQUAL]
    bench.run(theirs, 0)
    entries = [bench.results["cases"].get(one.key, {}) for one in (ours, *theirs)]
    if all(entry.get("outcome") == "ok" for entry in entries):
        seconds, *each = (float(entry["seconds"]) for entry in entries)
        bench.results["peft_over_ours"] = sum(each) * ours.clients / len(UNEQUAL) / seconds
        bench.save()
        say(f"sequential peft takes {bench.results['peft_over_ours']:.2f} times as long")


def large(bench: Bench) -> None:
    """(d)."""
    bench.run([case_of(bench, QWEN)], 0)


def decode(bench: Bench) -> None:
    """(e)."""
    case = case_of(bench, OLMOE)
    backbone = bench.backbone(case)
    length, few, many = (8, 2, 6) if bench.small else (160, 16, 48)
    prompts = 2 if bench.small else 64
    words = backbone.info.vocabulary
    asked = [[list(row.input_ids) for row in rows([length] * prompts, words, slot)] for slot in range(len(UNEQUAL))]
    plans = case.plans()[: len(UNEQUAL)]
    with SlotModel(backbone, plans) as model, backbone.caching(), backbone.without_gradients():
        short, long = (typical(partial(model.generate, asked, new), few=True) for new in (few, many))
    each, count = (long - short) / (many - few), prompts * len(UNEQUAL)
    bench.results["decode"] = {"rows": count, "seconds_per_token": each, "tokens_per_second": count / each}
    bench.unload()
    bench.save()
    say(f"decode {count} rows: {1e3 * each:.2f} ms a token, {count / each:.0f} tokens/s")


def testbeds(bench: Bench) -> None:
    """(f)."""
    clients, batch, length = (2, 1, 8) if bench.small else (8, 4, 128)
    dtype = str(bench.dtype).removeprefix("torch.")
    found = bench.results.setdefault("testbeds", {})
    for path in TESTBEDS:
        if path in found or not bench.has_time():
            continue
        try:
            backbone = load_backbone(path, dtype=dtype, device=str(bench.device))
        except ModelError as error:
            say(f"{path}: {error.message}")
            continue
        targets = ("attention", "experts") if backbone.moe else ("attention", "mlp")
        batches = [rows([length] * batch, backbone.info.vocabulary, client) for client in range(clients)]
        with SlotModel(backbone, [AdapterPlan((Lora(8, 2.0, targets),))] * clients) as model:
            optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw"))
            training = Training(model, optimizer, collate(batches, 0), clients)
            seconds = typical(training.step, few=bench.small)
        found[path] = {"seconds": seconds, "tokens_per_second": clients * batch * length / seconds}
        bench.save()
        say(f"{path}: {1e3 * seconds:.1f} ms, {found[path]['tokens_per_second']:.0f} tokens/s")


def methods(bench: Bench) -> None:
    """(g)."""
    found = bench.results.setdefault("methods", {})
    names = [name for name in METHODS if name not in found][: 2 if bench.small else None]
    for name, differences in compare_all(names, bench.device, torch.float32):
        found[name] = differences
        bench.save()
        say(f"{name}: {differences}")
        if not bench.has_time():
            break


PARTS: Mapping[str, Callable[[Bench], None]] = {
    "step": step,
    "peft": peft,
    "large": large,
    "decode": decode,
    "testbeds": testbeds,
    "methods": methods,
}


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts in their order, parity first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.set_defaults(device=torch.device("cuda"), dtype=torch.bfloat16)
    parser.add_argument("--output", type=Path, default=Path("runs/gpu-session"))
    parser.add_argument("--seconds", type=float, default=SECONDS, help="time after which nothing further begins")
    given = parser.parse_args(arguments)
    started = time.monotonic()
    bench = Bench(given.output, given.device, given.dtype, small=given.small, seconds=given.seconds)
    say(machine(given.device, given.dtype))
    bench.require_parity()
    for name, part in PARTS.items():
        if not bench.has_time():
            say(f"{name}: no time is left")
            continue
        run(bench, name, part)
    say(f"{time.monotonic() - started:.0f} s; {bench.path}")


def run(bench: Bench, name: str, part: Callable[[Bench], Any]) -> None:
    """Runs a part; one that fails is a result too, and does not end the others."""
    started = time.monotonic()
    try:
        part(bench)
    except Exception as error:
        say(f"{name} failed: {type(error).__name__}: {error}")
        bench.results.setdefault("failed", {})[name] = f"{type(error).__name__}: {error}"[:500]
        bench.unload()
    bench.results.setdefault("part_seconds", {})[name] = time.monotonic() - started
    bench.save()
    gc.collect()


if __name__ == "__main__":
    main()
