"""Cost of importing a run's code beside torch and transformers' Auto classes: processor seconds, and their ratio.

Run: python benchmarks/imports.py; every import is of a process of its own, in turn.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys

from timing import machine

BASE = "import torch; from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer"
IMPORTS = {
    "torch and transformers' Auto classes": BASE,
    "a run": "import fedguild.runs.experiment",
    "a run and a model's code": "import fedguild.runs.experiment, transformers.modeling_utils",
    "the Auto classes and a model's code": f"{BASE}; import transformers.modeling_utils",
    "fedguild methods": "from fedguild.cli.app import app; app(['methods'], standalone_mode=False)",
}


def seconds(code: str) -> float:
    """Returns the processor seconds of a Python process that runs a line of code."""
    before = os.times()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user + after.children_system - before.children_user - before.children_system


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=5, help="processes for each import")
    times: dict[str, list[float]] = {name: [] for name in IMPORTS}
    repeat = parser.parse_args().repeat
    print(machine())
    for _ in range(repeat):
        for name, code in IMPORTS.items():
            times[name].append(seconds(code))
    found = {name: statistics.median(values) for name, values in times.items()}
    for name, value in found.items():
        print(f"{name}: {value:.2f} s")
    auto, run = (found[name] for name in list(IMPORTS)[:2])
    with_model, auto_with_model = (found[name] for name in list(IMPORTS)[2:4])
    print(f"ratio {run / auto:.2f} (a run beside the Auto classes)")
    print(f"ratio {with_model / auto_with_model:.2f} (both with a model's code)")


if __name__ == "__main__":
    main()
