"""Everything that matters on one GPU: training against sequential peft and plain transformers, and other benchmarks.

Run: python benchmarks/gpu.py --output runs/bench-gpu (or make bench-gpu); --device cpu --small rehearses it.

First of all the device must compute what a CPU does (`gpu_parity.py`'s parity); otherwise nothing is measured.

Random weights in the layouts of OLMoE-1B-7B and Qwen3-30B-A3B, created on the device; clients of 128 to 8,192 tokens,
one row each, 1 to 16 of them, with equal and with unequal budgets. Every case is an entry of `results.json`, written as
soon as it is measured: a second call measures what is missing, and a case that does not fit says so. The cases that
tell most come first, and the last minutes are kept for the other benchmarks. `index.html` shows them.

- ours: one fused step of all clients (forward, backward, clipping, AdamW). Where it runs out of memory, it is measured
  again with activations recomputed.
- ours without kernels: the same with FEDGUILD_KERNELS=none.
- peft: the step of one client of each budget; clients train one after the other, so their times add up. Its gate and up
  projection share one rank.
- transformers: the frozen model alone, forward and backward to its input, below which no training of adapters gets.

Qwen3-30B-A3B as a whole leaves room for few clients beside its 61 GB of weights, so that it is measured with 12 of its
48 layers, too.
The share of peak counts the FLOPs of `fedguild.measuring.costs` over the GPU's published dense bf16 rate, and over the
rate of a large product measured here.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from gpu_parity import Setting, frozen, parity
from timing import add_device, bandwidth, machine, speed, wait
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from fedguild.client.optimizer import SlotOptimizer
from fedguild.config.training import TrainingSettings
from fedguild.core.files import write_text
from fedguild.data.batches import Encoded, SlotBatch, collate
from fedguild.engines.peak_memory import peak_bytes, reset_peak
from fedguild.measuring.costs.flops import cost
from fedguild.model import kernels
from fedguild.model.adapters.lora import Lora
from fedguild.model.backbone import Backbone, describe_architecture
from fedguild.model.info import ModelInfo
from fedguild.model.known import find_known
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel

PEAKS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
"""Part of a GPU's name -> its published dense bf16 FLOP/s."""
TARGETS = ("attention", "experts")
EQUAL = ((20, 8),)
UNEQUAL = ((20, 8), (12, 4), (8, 2), (6, 1))
"""Ranks and active experts of the clients, in turn (FLAME's four budgets)."""
OURS, WITHOUT, PEFT, PLAIN = "ours", "ours without kernels", "peft", "transformers"
SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 16,
    "moe_intermediate_size": 16,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 8,
}
"""What a rehearsal changes in a model's config."""
SCRIPTS = (
    "optimizer",
    "packing",
    "cohort",
    "one_client",
    "grouped_products",
    "active_experts",
    "ub_smoe_step",
    "hmole",
)
"""The other benchmarks that take `--device` and `--dtype`, those that tell most first."""
REHEARSED = ("grouped_products",)
"""Those of them that a rehearsal runs."""
SCRIPT_SECONDS = 120
SCRIPTS_MINUTES = 7.0
"""Part of the time that is kept for them."""
TYPICAL_CLIENTS, TYPICAL_TOKENS = 8, 1024
"""The step that the budget of decision 0016 is about."""


@dataclass(frozen=True)
class Layout:
    """A model's architecture.

    Attributes:
        name: What the cases are called after.
        known: Its name among the known models.
        layers: Number of layers; None for all.
        clients: Numbers of clients to measure.
    """

    name: str
    known: str
    layers: int | None
    clients: tuple[int, ...]


LAYOUTS = (
    Layout("OLMoE-1B-7B", "olmoe-1b-7b", None, (1, 2, 4, 8, 16)),
    Layout("Qwen3-30B-A3B", "qwen3-30b-a3b", None, (1, 2, 4)),
    Layout("Qwen3-30B-A3B, 12 layers", "qwen3-30b-a3b", 12, (1, 2, 4, 8, 16)),
)
TOKENS = (128, 512, 1024, 2048, 8192)


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        layout: Name of the layout.
        system: Who trains.
        clients: Clients of the step.
        tokens: Tokens of each client.
        budgets: (rank, active experts) of the clients, in turn.
        recomputes: Whether activations are recomputed in the backward pass.
    """

    layout: str
    system: str
    clients: int
    tokens: int
    budgets: tuple[tuple[int, int], ...]
    recomputes: bool = False

    @property
    def key(self) -> str:
        """Its name in the results."""
        budgets = "unequal" if len(self.budgets) > 1 else "rank {}, {} active".format(*self.budgets[0])
        again = ", recomputed" if self.recomputes else ""
        return f"{self.layout} | {self.system} | {self.clients} x {self.tokens} | {budgets}{again}"

    def plans(self) -> list[AdapterPlan]:
        """Returns each client's plan."""
        return [
            AdapterPlan((Lora(rank, 2.0, TARGETS),), active)
            for rank, active in (self.budgets[client % len(self.budgets)] for client in range(self.clients))
        ]


def cases(small: bool) -> Iterator[Case]:
    """Yields every case, the most telling first.

    First a typical step of each system in each layout, then that many clients with other lengths, then that length with
    other numbers of clients, then the rest; within each of these parts those of one layout and system come together.
    """
    found = list(_cases(small))
    yield from (case for part in range(4) for case in found if _part(case, found) == part)


def _part(case: Case, found: Sequence[Case]) -> int:
    """Returns how much a case tells, from 0; of a layout that is measured in small, the largest sizes are typical."""
    alike = [other for other in found if other.layout == case.layout and other.system == case.system]
    clients = min(TYPICAL_CLIENTS, max(other.clients for other in alike))
    tokens = min(TYPICAL_TOKENS, max(other.tokens for other in alike))
    return 2 * (case.clients != clients) + (case.tokens != tokens)


def _cases(small: bool) -> Iterator[Case]:
    for layout in LAYOUTS:
        clients, tokens = ((1, 2), (8, 16)) if small else (layout.clients, TOKENS)
        for budgets in (EQUAL, UNEQUAL):
            yield from (Case(layout.name, OURS, number, size, budgets) for number in clients for size in tokens)
        for budget in UNEQUAL:
            yield from (Case(layout.name, PEFT, 1, size, (budget,)) for size in tokens)
        yield from (Case(layout.name, PLAIN, 1, size, EQUAL) for size in tokens)
        yield from (Case(layout.name, WITHOUT, min(TYPICAL_CLIENTS, max(clients)), size, EQUAL) for size in tokens)


@dataclass
class Training:
    """Clients in one fused step."""

    model: SlotModel
    optimizer: SlotOptimizer
    batch: SlotBatch
    clients: int

    def forward(self) -> Tensor:
        """Returns the sum of the clients' mean losses; their rows are equally long."""
        return self.model.token_losses(self.batch).view(self.clients, -1).mean(dim=1).sum()

    def update(self) -> None:
        """One update of all clients."""
        self.optimizer.step([1e-4] * self.clients)

    def step(self) -> None:
        """One step of all clients."""
        self.optimizer.zero_grad()
        self.forward().backward()
        self.optimizer.clip(1.0)
        self.update()


class Bench:
    """The results of one device, and the model that is loaded.

    Args:
        folder: Where they are written.
        device: The device.
        dtype: The dtype of the models.
        small: Whether to rehearse with small sizes.
        seconds: Time after which nothing further begins.
    """

    def __init__(self, folder: Path, device: torch.device, dtype: torch.dtype, *, small: bool, seconds: float) -> None:
        self.path, self.device, self.dtype, self.small = folder / "results.json", device, dtype, small
        self.ends = time.monotonic() + seconds
        folder.mkdir(parents=True, exist_ok=True)
        self.results: dict[str, Any] = json.loads(self.path.read_text()) if self.path.exists() else self._fresh()
        if (self.results["device"], self.results["dtype"]) != (self._name(), str(dtype)):
            raise SystemExit(
                f"{self.path} is of {self.results['device']} in {self.results['dtype']}: name another folder"
            )
        self.save()
        self._loaded: tuple[Any, ...] = ()
        self._model: Any = None

    def _name(self) -> str:
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "CPU"

    def _fresh(self) -> dict[str, Any]:
        rate = speed(self.device, self.dtype)
        peaks = [peak for part, peak in PEAKS.items() if part in self._name()]
        return {
            "machine": machine(self.device, self.dtype),
            "device": self._name(),
            "dtype": str(self.dtype),
            "bytes_per_second": bandwidth(self.device),
            "flops_per_second": rate,
            "published_flops_per_second": peaks[0] if peaks and self.dtype is torch.bfloat16 else None,
            "kernels": sorted(name for name in kernels.KERNELS if kernels.runs(name, self.device)),
            "cases": {},
            "scripts": {},
        }

    def has_time(self, kept_seconds: float = 0.0) -> bool:
        """Whether something may begin that leaves some seconds for what comes after it."""
        return time.monotonic() < self.ends - kept_seconds

    def require_parity(self) -> None:
        """Compares the device with the CPU, unless that was done.

        Raises:
            SystemExit: it computes something else.
        """
        if "parity" not in self.results:
            parity(Setting(self.device, self.dtype, self.small))
            self.results["parity"] = "ok"
            self.save()

    def save(self) -> None:
        """Writes the results."""
        write_text(self.path, json.dumps(self.results, indent=1))

    def run(self, wanted: list[Case], kept_seconds: float) -> None:
        """Measures the cases that have no entry yet, until the time is over but for what is kept for others."""
        waiting = [case for case in wanted if case.key not in self.results["cases"]]
        while waiting and self.has_time(kept_seconds):
            case = waiting.pop(0)
            entry = self.measure(case)
            self.results["cases"][case.key] = entry
            self.save()
            print(f"{case.key}: {summary(entry)}", flush=True)
            again = replace(case, recomputes=True)
            out = entry["outcome"] == "out of memory" and case.system == OURS and not case.recomputes
            if out and again.key not in self.results["cases"]:
                waiting.insert(0, again)
        self.unload()

    def measure(self, case: Case) -> dict[str, Any]:
        """Returns a case's entry; running out of memory and other failures are results too."""
        entry: dict[str, Any] = {**asdict(case), "outcome": "ok"}
        try:
            info, step, stop = self.prepare(case)
            reset_peak(self.device)
            try:
                seconds = typical(step, few=self.small)
            finally:
                stop()
            flops = self.flops(case, info)
            entry |= {
                "layers": info.layers,
                "seconds": seconds,
                "tokens_per_second": case.clients * case.tokens / seconds,
                "share_of_measured": flops / seconds / self.results["flops_per_second"],
                "peak_bytes": peak_bytes(self.device),
            }
            published = self.results["published_flops_per_second"]
            entry["share_of_peak"] = flops / seconds / published if published else None
        except torch.OutOfMemoryError:
            entry["outcome"] = "out of memory"
        except Exception as error:  # a case of one library must not end the others
            entry |= {"outcome": "failed", "error": f"{type(error).__name__}: {str(error).splitlines()[0][:300]}"}
        if entry["outcome"] != "ok":
            self.unload()
        return entry

    def flops(self, case: Case, info: ModelInfo) -> int:
        """Returns the FLOPs that the step needs, recomputation apart."""
        if case.system == PLAIN:
            return cost(info, AdapterPlan((), case.budgets[0][1])).training_flops(case.tokens, case.tokens)
        return sum(cost(info, plan).training_flops(case.tokens, case.tokens) for plan in case.plans())

    def prepare(self, case: Case) -> tuple[ModelInfo, Callable[[], None], Callable[[], None]]:
        """Returns the model's description, a case's step, and what ends it."""
        own = case.system in (OURS, WITHOUT)
        adapter = case.budgets[0] if case.system == PEFT else None
        loaded = (case.layout, case.system, adapter)
        if self._loaded != loaded:
            self.unload()
            with self.kernels_of(case):
                model = self.random_model(case)
                self._model = frozen(model, gradient_checkpointing=True) if own else model
            if case.system == PLAIN:
                model.requires_grad_(False)
            if adapter is not None:
                self._model = with_peft(model, *adapter)
            self._loaded = loaded
        info = self.info(case)
        if own:
            return info, *self.our_step(self._model, case)
        return info, *self.their_step(self._model, case, info)

    def config(self, case: Case) -> dict[str, Any]:
        """Returns the keys of the layout's config."""
        layout = next(layout for layout in LAYOUTS if layout.name == case.layout)
        known = find_known(layout.known)
        assert known is not None
        changes: dict[str, Any] = {} if layout.layers is None else {"num_hidden_layers": layout.layers}
        if self.small:
            changes = {**SMALL, "num_hidden_layers": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
        return {**known.config, **changes, "max_position_embeddings": 8192}

    def info(self, case: Case) -> ModelInfo:
        """Returns the layout's description."""
        return describe_architecture(self.config(case), case.layout)

    def random_model(self, case: Case) -> Any:
        """Returns the layout with random weights, made on the device."""
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        torch.manual_seed(0)
        try:
            with torch.device(self.device):
                config = AutoConfig.for_model(**self.config(case))
                return AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval()
        finally:
            torch.set_default_dtype(before)

    @contextmanager
    def kernels_of(self, case: Case) -> Iterator[None]:
        """Switches the kernels off inside the block for a case without them."""
        before = os.environ.get(kernels.VARIABLE)
        if case.system == WITHOUT:
            os.environ[kernels.VARIABLE] = "none"
        try:
            yield
        finally:
            os.environ.pop(kernels.VARIABLE, None)
            if before is not None:
                os.environ[kernels.VARIABLE] = before

    def backbone(self, case: Case) -> Backbone:
        """Returns the model of a case of ours, loaded."""
        self.prepare(case)[2]()
        backbone: Backbone = self._model
        return backbone

    def training(self, backbone: Backbone, case: Case) -> Training:
        """Returns clients that are ready to train; close their model."""
        batch = collate([self.rows(case, client) for client in range(case.clients)], 0)
        model = SlotModel(backbone, case.plans())
        try:
            for name, trainable in model.trainables.items():
                trainable.stored.detach().normal_(0, 0.02) if name.endswith("lora_A") else None
            optimizer = SlotOptimizer(model.trainables, TrainingSettings(optimizer="adamw"))
        except BaseException:
            model.close()
            raise
        return Training(model, optimizer, batch, case.clients)

    def our_step(self, backbone: Backbone, case: Case) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns a fused step of all clients."""
        training = self.training(backbone, case)

        def step() -> None:
            with self.kernels_of(case), nullcontext() if case.recomputes else backbone.caching():
                training.step()

        return step, training.model.close

    def their_step(self, model: Any, case: Case, info: ModelInfo) -> tuple[Callable[[], None], Callable[[], None]]:
        """Returns one client's step with peft, or a forward and backward pass of the frozen model."""
        ids = torch.tensor([row.input_ids for row in self.rows(case, 0)], device=self.device)
        prefix = "base_model.model." if case.system == PEFT else ""
        for layer in info.moe:
            model.get_submodule(prefix + layer.router).top_k = case.budgets[0][1]
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=True) if case.system == PEFT else None
        embed = model.get_input_embeddings()

        def step() -> None:
            model.zero_grad(set_to_none=True)
            given = {"input_ids": ids}
            if optimizer is None:
                given = {"inputs_embeds": embed(ids).detach().requires_grad_()}
            logits = model(**given, use_cache=False).logits[:, :-1]
            flat = logits.reshape(-1, logits.shape[-1]).float()
            torch.nn.functional.cross_entropy(flat, ids[:, 1:].reshape(-1)).backward()
            if optimizer is not None:
                torch.nn.utils.clip_grad_norm_(trained, 1.0)
                optimizer.step()

        return step, lambda: None

    def rows(self, case: Case, client: int) -> list[Encoded]:
        """Returns a client's row, the loss on all but its first token."""
        rng = torch.Generator().manual_seed(client)
        words = self.config(case)["vocab_size"]
        return [Encoded(tuple(torch.randint(2, words, (case.tokens,), generator=rng).tolist()), 1)]

    def unload(self) -> None:
        """Frees the model."""
        self._model, self._loaded = None, ()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def run_scripts(self, names: tuple[str, ...]) -> None:
        """Runs the other benchmarks, each in a process, and keeps what they print."""
        dtype, small = str(self.dtype).removeprefix("torch."), ["--small"] if self.small else []
        for name in names:
            if name in self.results["scripts"] or not self.has_time():
                continue
            script = str(Path(__file__).with_name(f"{name}.py"))
            started = time.monotonic()
            try:
                done = subprocess.run(
                    [sys.executable, script, "--device", str(self.device), "--dtype", dtype, *small],
                    capture_output=True,
                    text=True,
                    timeout=min(SCRIPT_SECONDS, max(1.0, self.ends - started)),
                    check=False,
                )
                outcome = "ok" if done.returncode == 0 else "failed"
                text = done.stdout + (done.stderr[-2000:] if done.returncode else "")
            except subprocess.TimeoutExpired as error:
                outcome, text = "out of time", (error.stdout or b"").decode()
            entry = {"outcome": outcome, "seconds": time.monotonic() - started, "output": text}
            self.results["scripts"][name] = entry
            self.save()
            print(f"{name}: {outcome}\n{text}", flush=True)


def with_peft(model: Any, rank: int, active: int) -> Any:
    """Returns the model with peft's LoRA on attention and experts."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=["q_proj", "k_proj", "v_proj", "o_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        lora_dropout=0.0,
    )
    return get_peft_model(model, config)


def typical(step: Callable[[], None], *, few: bool) -> float:
    """Returns a step's median seconds: two that do not count, then three or more in two seconds, or fewer in twenty."""
    taken: list[float] = []
    for turn in range(3 if few else 40):
        started = time.perf_counter()
        step()
        wait()
        if turn >= 2:
            taken.append(time.perf_counter() - started)
        if sum(taken) > 20 or (len(taken) >= 3 and sum(taken) > 2):
            break
    return statistics.median(taken)


def summary(entry: dict[str, Any]) -> str:
    """Returns an entry in one line."""
    if entry["outcome"] != "ok":
        return str(entry.get("error", entry["outcome"]))
    share = entry["share_of_peak"] or entry["share_of_measured"]
    kind = "peak" if entry["share_of_peak"] else "a product's rate"
    return (
        f"{1e3 * entry['seconds']:.1f} ms, {entry['tokens_per_second']:.0f} tokens/s, {share:.1%} of {kind}, "
        f"{entry['peak_bytes'] / 1e9:.1f} GB"
    )


def main(arguments: list[str] | None = None) -> None:
    """Measures what is missing and writes the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_device(parser)
    parser.set_defaults(device=torch.device("cuda"), dtype=torch.bfloat16)
    parser.add_argument("--output", type=Path, default=Path("runs/bench-gpu"))
    parser.add_argument("--minutes", type=float, default=24.0, help="time after which nothing further begins")
    parser.add_argument("--only", default="", help="measure only cases whose name contains this")
    given = parser.parse_args(arguments)
    bench = Bench(given.output, given.device, given.dtype, small=given.small, seconds=60 * given.minutes)
    print(bench.results["machine"], flush=True)
    bench.require_parity()
    scripts = () if given.only else REHEARSED if given.small else SCRIPTS
    kept_minutes = min(SCRIPTS_MINUTES, given.minutes / 3) if scripts else 0.0
    bench.run([case for case in cases(given.small) if given.only in case.key], 60 * kept_minutes)
    bench.run_scripts(scripts)
    from gpu_page import write_page  # it needs matplotlib, which gpu_session.py does without

    print(write_page(bench.results, given.output / "index.html"))


if __name__ == "__main__":
    main()
