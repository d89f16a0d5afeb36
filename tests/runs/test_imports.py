"""Imports of a run before it has a model: so little that a mistake in its settings is told at once."""

from __future__ import annotations

import subprocess
import sys

HEAVY = ("matplotlib", "pandas", "scipy.optimize", "sympy", "torch._dynamo", "transformers.modeling_utils", "triton")
"""Half of what torch and transformers can import, by time (`benchmarks/imports.py`)."""


def test_a_run_imports_no_modelling_code_before_it_has_a_model() -> None:
    code = f"import sys, fedguild.runs.experiment; print([name for name in {HEAVY} if name in sys.modules])"
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "[]"
