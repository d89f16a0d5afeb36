"""The first minutes on a GPU: is it right, how fast is it, and where does the time go?

Run: python benchmarks/gpu_first.py (or some of: parity steps decode trace); --device cpu --small rehearses it.

- parity: one layer of OLMoE's layout on the device against the same on the CPU, losses and gradients of four clients
  with unequal budgets, one of them without data. In fp32 they must agree; in the asked dtype they must be finite, and
  the differences are printed, for a rounded router may choose other experts. A failure ends the script.
- steps: OLMoE-1B-7B at random weights: a fused step of 1 to 16 clients, in tokens a second and share of the measured
  rate, and its forward pass, clipping and optimizer apart, with one client finished too.
- decode: tokens a second of generation with four budgets in one pass.
- trace: the operations of a step by their time, and the number of launches, copies and waits.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from timing import add_device, machine, speed, wait
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.data.batches import Encoded, collate
from fedguild.engines.peak_memory import peak_bytes, reset_peak
from fedguild.measuring.costs.flops import cost
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, make_backbone
from fedguild.model.known import find_known
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel

TARGETS = ("attention", "router", "experts")
BUDGETS = (8, 4, 2, 1)
"""Active experts of the clients, in turn."""
RANK = 20
LARGEST = 1e-3
"""Largest difference of a gradient in fp32, relative to its norm, that counts as equal."""
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts": 16,
    "num_hidden_layers": 2,
}
"""What a rehearsal changes in the model's config."""


@dataclass(frozen=True)
class Setting:
    """What to measure on.

    Attributes:
        device: The device.
        dtype: The dtype of its model.
        small: Whether to rehearse with small sizes.
    """

    device: torch.device
    dtype: torch.dtype
    small: bool

    def milliseconds(self, step: Callable[[], object], repeats: int = 5, warmup: int = 2) -> float:
        """Returns a step's median time."""
        taken = []
        for _ in range(warmup + (2 if self.small else repeats)):
            wait()
            started = time.perf_counter()
            step()
            wait()
            taken.append(time.perf_counter() - started)
        return 1e3 * statistics.median(taken[warmup:])


def say(*parts: object) -> None:
    """Prints at once."""
    print(*parts, flush=True)


def config(small: bool, **changes: Any) -> dict[str, Any]:
    """Returns the keys of OLMoE-1B-7B's config."""
    known = find_known("olmoe-1b-7b")
    assert known is not None
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "max_position_embeddings": 8192}
    return {**known.config, **(SMALL if small else {}), **ends, **changes}


def random_model(keys: dict[str, Any], device: torch.device, dtype: torch.dtype) -> Any:
    """Returns a model with random weights, made on the device."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    torch.manual_seed(0)
    try:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(AutoConfig.for_model(**keys), attn_implementation="sdpa").eval()
    finally:
        torch.set_default_dtype(before)


def frozen(model: Any) -> Backbone:
    """Returns a model as a backbone, whose texts never end."""
    return make_backbone(model, SimpleNamespace(pad_token_id=0, eos_token_id=None), name="random")


def rows(lengths: Sequence[int], vocabulary: int, seed: int) -> list[Encoded]:
    """Returns random texts, the loss on all but their first token."""
    rng = torch.Generator().manual_seed(seed)
    return [Encoded(tuple(torch.randint(2, vocabulary, (n,), generator=rng).tolist()), 1) for n in lengths]


def plans(active: Sequence[int], dropout: float = 0.0) -> list[AdapterPlan]:
    """Returns clients' plans, by their active experts."""
    return [AdapterPlan((Lora(RANK, 0.8, TARGETS, dropout),), number) for number in active]


def gradients(backbone: Backbone, batches: Sequence[Sequence[Encoded]]) -> dict[str, Tensor]:
    """Returns the losses, and the gradients by name and client, on the host in fp32."""
    with SlotModel(backbone, plans(BUDGETS)) as model:
        rng = torch.Generator().manual_seed(3)
        for name, trainable in model.trainables.items():
            for slot, shape in enumerate(trainable.shapes):
                assert shape is not None
                model.load(slot, {name: 0.02 * torch.randn(shape, generator=rng)})
        losses = model.token_losses(collate(batches, 0))
        losses.sum().backward()
        found = {"losses": losses.detach().float().cpu()}
        for name, trainable in model.trainables.items():
            assert trainable.stored.grad is not None
            for slot in range(len(BUDGETS)):
                found[f"{slot}/{name}"] = trainable.own(slot, of=trainable.stored.grad).float().cpu()
        return found


def differences(here: Setting, dtype: torch.dtype) -> tuple[dict[str, float], list[str]]:
    """Returns each result's difference from the CPU's, relative to its norm, and the names of those that are wrong.

    Wrong is what is not finite, and a gradient of the client without data that is not zero.
    """
    keys = config(here.small, num_hidden_layers=1, vocab_size=512)
    model = random_model(keys, here.device, dtype)
    copy = random_model(keys, torch.device("cpu"), dtype)
    copy.load_state_dict({name: value.cpu() for name, value in model.state_dict().items()})
    lengths: tuple[list[int], ...] = ([40, 17], [33], [], [5, 9, 60])
    batches = [rows(own, 512, seed) for seed, own in enumerate(lengths)]
    found, expected = (gradients(frozen(each), batches) for each in (model, copy))
    wrong = [name for name, value in found.items() if not value.isfinite().all()]
    wrong += [name for name, value in found.items() if name.startswith("2/") and value.any()]
    apart = {
        name: float((value - expected[name]).norm() / expected[name].norm().clamp(min=1e-6))
        for name, value in found.items()
    }
    return apart, wrong


def parity(here: Setting) -> None:
    """Compares the device with the CPU.

    Raises:
        SystemExit: they differ in fp32, or a value is wrong; the message names it.
    """
    for dtype in dict.fromkeys((torch.float32, here.dtype)):
        apart, wrong = differences(here, dtype)
        worst = sorted(apart, key=lambda name: apart[name], reverse=True)[:3]
        told = ", ".join(f"{name} {apart[name]:.1e}" for name in worst)
        say(f"parity in {dtype}: median {statistics.median(apart.values()):.1e}, largest: {told}")
        if dtype is torch.float32:
            wrong += [name for name, value in apart.items() if not value <= LARGEST]
        if wrong:
            raise SystemExit(f"{here.device} computes something else than the CPU in {dtype}: {', '.join(wrong[:5])}")


@dataclass
class Training:
    """Clients in one fused step."""

    model: SlotModel
    optimizer: SlotOptimizer
    batches: list[list[Encoded]]
    rate: float | None = 1e-4

    def forward(self) -> Tensor:
        """Returns the sum of the clients' mean losses."""
        self.model.dropout.seed(list(range(len(self.batches))))
        losses = self.model.token_losses(collate(self.batches, 0))
        counts = [sum(row.response_tokens for row in own) for own in self.batches]
        return torch.stack([own.mean() for own in losses.split(counts)]).sum()

    def update(self) -> None:
        """One update of all clients, the last at `rate`."""
        self.optimizer.step([*[1e-4] * (len(self.batches) - 1), self.rate])

    def step(self) -> None:
        """One step of all clients."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.clip(1.0)
        self.update()


def training(backbone: Backbone, batches: list[list[Encoded]], active: Sequence[int], dropout: float) -> Training:
    """Returns clients that are ready to train; close their model."""
    model = SlotModel(backbone, plans(active, dropout))
    for name, trainable in model.trainables.items():
        if name.endswith("lora_A"):
            trainable.stored.detach().normal_(0, 0.02)
    return Training(model, SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw")), batches)


def steps(here: Setting) -> None:
    """Times steps and their parts."""
    backbone, rate = frozen(random_model(config(here.small), here.device, here.dtype)), speed(here.device, here.dtype)
    length = 8 if here.small else 512
    equal = [(clients, 1, (8,), 0.0) for clients in ((1, 4) if here.small else (1, 4, 8, 16))]
    others = [] if here.small else [(8, 2, (8,), 0.0), (8, 8, (8,), 0.0)]
    for clients, batch, budgets, dropout in [*equal, *others, (4, 4, BUDGETS, 0.0), (4, 1, (8,), 0.05)]:
        name = f"{clients} clients x {batch} x {length}, active {budgets}, dropout {dropout}"
        active = [budgets[client % len(budgets)] for client in range(clients)]
        batches = [rows([length] * batch, backbone.info.vocabulary, client) for client in range(clients)]
        reset_peak(here.device)
        try:
            train = training(backbone, batches, active, dropout)
        except torch.OutOfMemoryError:
            say(f"{name}: out of memory")
            continue
        with train.model:
            try:
                whole = here.milliseconds(train.step)
                parts = {
                    "forward": here.milliseconds(train.forward),
                    "clip": here.milliseconds(partial(train.optimizer.clip, 1.0)),
                    "optimizer": here.milliseconds(train.update),
                }
                train.rate = None
                parts["optimizer, one client finished"] = here.milliseconds(train.update)
            except torch.OutOfMemoryError:
                say(f"{name}: out of memory")
                continue
        tokens = batch * length
        flops = sum(cost(backbone.info, plan).training_flops(tokens, length) for plan in plans(active))
        say(
            f"{name}: {whole:.1f} ms, {1e3 * clients * tokens / whole:.0f} tokens/s, "
            f"{flops / whole * 1e3 / rate:.1%} of a product's rate, peak {(peak_bytes(here.device) or 0) / 1e9:.1f} GB"
        )
        say("   " + ", ".join(f"{part} {value:.1f} ms" for part, value in parts.items()))
        del train
        gc.collect()


def decode(here: Setting) -> None:
    """Times generation."""
    backbone = frozen(random_model(config(here.small), here.device, here.dtype))
    length, few, many = (8, 2, 6) if here.small else (160, 16, 48)
    for prompts in (2,) if here.small else (8, 64, 256):
        asked = [
            [list(row.input_ids) for row in rows([length] * prompts, backbone.info.vocabulary, slot)]
            for slot in range(len(BUDGETS))
        ]
        with SlotModel(backbone, plans(BUDGETS)) as model, backbone.without_gradients():
            short, long = (here.milliseconds(partial(model.generate, asked, new), 3, 1) for new in (few, many))
        each, count = (long - short) / (many - few), prompts * len(BUDGETS)
        say(f"decode {count} rows: {each:.2f} ms a token, {1e3 * count / each:.0f} tokens/s")


def trace(here: Setting) -> None:
    """Prints the operations of one step."""
    from torch.profiler import ProfilerActivity, profile

    backbone = frozen(random_model(config(here.small), here.device, here.dtype))
    length = 8 if here.small else 1024
    batches = [rows([length], backbone.info.vocabulary, client) for client in range(8)]
    train = training(backbone, batches, [8] * 8, 0.0)
    cuda = here.device.type == "cuda"
    with train.model:
        for _ in range(2):
            train.step()
        wait()
        with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]) as profiled:
            train.step()
            wait()
    found = profiled.key_averages()
    order = "self_cuda_time_total" if cuda else "self_cpu_time_total"
    say(found.table(sort_by=order, row_limit=10 if here.small else 30, max_name_column_width=60))
    counted = ("cudaLaunchKernel", "cuLaunchKernel", "cudaStreamSynchronize", "cudaMemcpyAsync", "aten::nonzero")
    counts = {event.key: event.count for event in found if event.key.startswith(counted)}
    say(f"operations {sum(event.count for event in found if event.key.startswith('aten::'))}, {counts}")


PARTS = {"parity": parity, "steps": steps, "decode": decode, "trace": trace}


def main(arguments: list[str] | None = None) -> None:
    """Runs the parts, parity first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.set_defaults(device=torch.device("cuda"), dtype=torch.bfloat16)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"some of {', '.join(PARTS)}; all if none is named")
    given = parser.parse_args(arguments)
    if unknown := set(given.parts) - set(PARTS):
        parser.error(f"unknown part {min(unknown)}")
    here = Setting(given.device, given.dtype, given.small)
    say(machine(given.device, given.dtype))
    for name, part in PARTS.items():
        if not given.parts or name in given.parts:
            part(here)
            gc.collect()
            if here.device.type == "cuda":
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
