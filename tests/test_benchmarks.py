"""All of `benchmarks/`: each prints the machine's own rates beside its figures, and runs where it is told to."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
SCRIPTS = sorted(path.stem for path in BENCHMARKS.glob("*.py") if "__main__" in path.read_text("utf-8"))
COMPUTED = {"attacks", "gpu_budget"}
"""Scripts that measure nothing of the machine."""
NO_TENSORS = {
    "enrolment": "it registers keys",
    "flower_overhead": "its runs have a device in their config",
    "imports": "it imports",
    "watch_page": "it shows a page",
}
"""Scripts for which a device does not matter, with the reason."""
IGNORES_DTYPE = {"optimizer": "a trained tensor is fp32 whatever its model is"}


def names_in(script: str) -> tuple[set[str], set[str]]:
    tree = ast.parse((BENCHMARKS / f"{script}.py").read_text("utf-8"))
    calls = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)}
    return calls, {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}


def test_the_exceptions_are_scripts():
    assert COMPUTED | NO_TENSORS.keys() | IGNORES_DTYPE.keys() <= set(SCRIPTS)


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - COMPUTED))
def test_a_script_prints_the_machines_bandwidth_and_speed(script):
    calls, _ = names_in(script)
    assert "machine" in calls


@pytest.mark.parametrize("script", sorted(set(SCRIPTS) - COMPUTED - NO_TENSORS.keys()))
def test_a_script_takes_a_device_and_a_dtype_and_uses_both(script):
    calls, attributes = names_in(script)
    assert "add_device" in calls
    assert "device" in attributes
    assert "dtype" in attributes or script in IGNORES_DTYPE
