"""`fedguild doctor`: installed software, the machine, and what will not work on it."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata, util
from typing import Any, Literal

from rich.table import Table

from fedguild.cli.options import JsonOption
from fedguild.cli.output import show, show_json
from fedguild.core.plugins import Plugins
from fedguild.model.heap import keep_freed_pages

EXAMPLES = (
    "fedguild doctor",
    "fedguild doctor --json",
)

Verdict = Literal["ok", "missing", "problem"]

REQUIRED = ("torch", "transformers", "datasets", "safetensors", "numpy", "numba", "scipy", "pydantic")
EXTRAS = {
    "eval": (("peft", "accelerate"), "exported adapters cannot be checked against peft"),
    **{name: ((name,), f"tracking: [{name}] cannot be used") for name in ("tensorboard", "wandb", "mlflow", "trackio")},
    "four-bit": (("bitsandbytes", "accelerate"), "model.load_in_4bit cannot be enabled"),
    "gpu": (("triton", "liger_kernel"), "training on a GPU takes longer: no fused kernels"),
    "fusion": (("nevergrad",), "no method can search its fusion weights"),
    "ray": (("ray",), "runs cannot be spread over GPUs and machines"),
    "flower": (("flwr",), "clients cannot take part over the network"),
    "secure": (("cryptography", "Crypto"), "federation.secure cannot be enabled"),
    "privacy": (("dp_accounting",), "privacy.unit cannot be set: nothing accounts for ε"),
    "metrics": (("prometheus_client",), "servers and sites cannot answer /metrics"),
    "gguf": (("gguf",), "GGUF files cannot be model.path"),
    "excel": (("openpyxl",), "data in .xlsx cannot be read"),
}
DISTRIBUTIONS = {
    "Crypto": "pycryptodome",
    "dp_accounting": "dp-accounting",
    "prometheus_client": "prometheus-client",
    "liger_kernel": "liger-kernel",
}
"""Package -> its name for pip, where that is another."""
GIBIBYTE = 2**30


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis.

    Attributes:
        subject: The package or property that was examined.
        found: Its state.
        verdict: `ok`, `missing` (an option that is not installed) or `problem`.
        consequence: What will not work, and the remedy; empty if nothing is wrong.
    """

    subject: str
    found: str
    verdict: Verdict = "ok"
    consequence: str = ""


def command(as_json: JsonOption = False) -> None:
    """Show what is installed, which device is used, and what will not work."""
    findings = list(diagnose())
    if as_json:
        show_json([asdict(finding) for finding in findings])
        return
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in ("", "subject", "found", "what will not work"):
        table.add_column(heading, overflow="fold")
    marks = {"ok": "ok", "missing": "-", "problem": "!"}
    for finding in findings:
        table.add_row(marks[finding.verdict], finding.subject, finding.found, finding.consequence)
    show(table)


def diagnose() -> Iterator[Finding]:
    """Yields a finding for every package, extra and property of the machine that matters."""
    if util.find_spec("torch"):
        yield from _device()
        yield _kernels()
        yield _cores()
    yield _memory()
    yield Finding("python", platform.python_version())
    for package in REQUIRED:
        yield _package(package)
    for extra, (packages, loss) in EXTRAS.items():
        yield _extra(extra, packages, loss)
    if util.find_spec("torch"):
        yield from _plugins()
        yield _converter()
    if util.find_spec("flwr"):
        yield from _flower()
    yield _write_access()


def _package(name: str) -> Finding:
    try:
        return Finding(name, metadata.version(name))
    except metadata.PackageNotFoundError:
        return Finding(name, "not installed", "problem", f"nothing works without it: pip install {name}")


def _extra(extra: str, packages: tuple[str, ...], loss: str) -> Finding:
    absent = [DISTRIBUTIONS.get(package, package) for package in packages if util.find_spec(package) is None]
    if absent:
        extent = f"without {', '.join(absent)}"
        return Finding(f"extra {extra}", extent, "missing", f"{loss}: pip install 'fedguild[{extra}]'")
    return Finding(f"extra {extra}", ", ".join(_dated(package) for package in packages))


def _dated(package: str) -> str:
    """Returns an installed package's name for pip and its version; for MLflow also if only its client is installed."""
    name = DISTRIBUTIONS.get(package, package)
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"{name} {metadata.version(f'{name}-skinny')}"


def _plugins() -> Iterator[Finding]:
    """Yields the usable plug-ins of each kind in one line, and a line for each that cannot be used."""
    from fedguild.data.corpora import CORPORA
    from fedguild.data.partition import PARTITIONS
    from fedguild.measuring.scores.metrics import METRICS
    from fedguild.methods import METHODS
    from fedguild.model.families import FAMILIES
    from fedguild.runs.callbacks import CALLBACKS
    from fedguild.runs.tracking import TRACKERS

    kinds: tuple[Plugins[Any], ...] = (METHODS, CORPORA, PARTITIONS, METRICS, CALLBACKS, TRACKERS, FAMILIES)
    for kind in kinds:
        checked = list(kind.checked())
        usable = [
            one.name if one.origin == "fedguild" else f"{one.name} ({one.origin})" for one in checked if not one.fault
        ]
        if usable:
            yield Finding(kind.group.rpartition(".")[2].replace("_", " "), ", ".join(usable))
        for one in checked:
            if one.fault:
                yield Finding(f"{kind.noun} {one.name}", one.origin, "problem", f"it cannot be used: {one.fault}")


def _device() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        yield Finding("device", "cpu", "ok", "models beyond about 1 B parameters train slowly, in 4 bit too")
        yield _freed_pages()
        return
    for index in range(torch.cuda.device_count()):
        facts = torch.cuda.get_device_properties(index)
        bfloat16 = torch.cuda.is_bf16_supported()
        yield Finding(
            f"device cuda:{index}",
            f"{facts.name}, {facts.total_memory / GIBIBYTE:.0f} GiB",
            "ok" if bfloat16 else "problem",
            "" if bfloat16 else "no bfloat16: set model.dtype=float16 or float32",
        )


def _kernels() -> Finding:
    """The kernels that the device runs; `FEDGUILD_KERNELS` chooses among them."""
    import torch

    from fedguild.core.errors import ConfigError
    from fedguild.model.kernels import CPU_KERNELS, KERNELS, VARIABLE, chosen

    kind, known = ("cuda", tuple(KERNELS)) if torch.cuda.is_available() else ("cpu", CPU_KERNELS)
    try:
        running = chosen(os.environ.get(VARIABLE, "auto"), kind)
    except ConfigError as error:
        return Finding("kernels", os.environ[VARIABLE], "problem", f"{error.message} {error.hint}")
    left_out = [name for name in known if name not in running]
    found = ", ".join(name for name in known if name in running) or "none"
    from fedguild.model.kernels.fused import FUSED, faults

    if tried := running & set(FUSED):
        dtype = torch.bfloat16 if kind == "cuda" and torch.cuda.is_bf16_supported() else torch.float32
        failed = faults(torch.device(kind), dtype, set(tried))
        if failed:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failed.items())
            return Finding("kernels", found, "problem", f"plain torch computes in their place: {reasons}")
    if not left_out:
        return Finding("kernels", found)
    remedy = "pip install 'fedguild[gpu]', or " if kind == "cuda" else ""
    loss = f"without {', '.join(left_out)}: {remedy}{VARIABLE} leaves them out"
    return Finding("kernels", found, "missing", loss)


def _freed_pages() -> Finding:
    if keep_freed_pages():
        return Finding("freed pages", "kept for the next step")
    loss = "a training step takes up to twice as long: needs glibc, and none of mallopt's variables in the environment"
    return Finding("freed pages", "given back to the system", "missing", loss)


def _converter() -> Finding:
    from fedguild.core.errors import ModelError
    from fedguild.export.gguf import SCRIPT, require_converter

    try:
        return Finding("gguf converter", str(require_converter()))
    except ModelError as error:
        loss = "no model can be exported as GGUF (--format gguf, model_format in site.yaml)"
        return Finding("gguf converter", f"no {SCRIPT}", "missing", f"{loss}. {error.hint}")


def _flower() -> Iterator[Finding]:
    from fedguild.federation.checks import version_faults
    from fedguild.federation.commands import VARIABLES

    for fault in version_faults():
        yield Finding("flower", metadata.version("flwr"), "problem", f"{fault.message} {fault.hint}")
    openssl = shutil.which("openssl")
    loss = "fedguild federation init cannot make example certificates: install openssl"
    yield Finding("openssl", openssl or "not installed", "ok" if openssl else "missing", "" if openssl else loss)
    unset = [name for name, value in VARIABLES.items() if os.environ.get(name) != value]
    variables = (
        "as fedguild federation sets them" if not unset else f"{len(unset)} of {len(VARIABLES)} not set in this shell"
    )
    lines = " ".join(f"{name}={VARIABLES[name]}" for name in unset)
    note = f"only matters where flwr is called by hand: export {lines}" if unset else ""
    yield Finding("flower's variables", variables, "ok", note)


def _memory() -> Finding:
    import psutil

    memory = psutil.virtual_memory()
    room = f"{memory.available / GIBIBYTE:.1f} of {memory.total / GIBIBYTE:.1f} GiB free"
    if memory.available < 2 * GIBIBYTE:
        return Finding("memory", room, "problem", "the embedded model needs about 2 GiB; set federation.cohort_size=1")
    return Finding("memory", room)


def _cores() -> Finding:
    import torch

    cores, threads = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        torch.get_num_threads(),
    )
    counts = f"{cores} cores, {threads} threads"
    if cores and threads > cores:
        return Finding(
            "processor",
            counts,
            "problem",
            f"more threads than cores slow training down: export OMP_NUM_THREADS={cores}",
        )
    return Finding("processor", counts)


def _write_access() -> Finding:
    try:
        with tempfile.NamedTemporaryFile(dir=os.curdir):
            return Finding("current folder", "writable")
    except OSError as error:
        return Finding(
            "current folder", f"not writable ({error.strerror})", "problem", "runs need --output in another folder"
        )
