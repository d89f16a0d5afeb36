"""Our kernels compiled for GPUs, where there is none: each launch that the code makes, down to the machine's code.

The interpreter of the other tests takes what a compiler refuses: a loop whose variable changes its type, a product that
tensor cores do not have, more shared memory than there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.model.compiled import CASES

triton = pytest.importorskip("triton", reason="Triton is there for Linux only")
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas"
pytestmark = pytest.mark.skipif(not PTXAS.exists(), reason="Triton's wheel has no ptxas")

SHARED_BYTES = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10}
"""Compute capability times ten -> shared memory that a program may have."""
SHORT = ("rows added, scaled, bf16",)


@cache
def compiled(capability: int, *names: str) -> dict[str, dict[str, Any]]:
    """Returns what the kernels compile to, by case, in a process without the interpreter."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    with tempfile.TemporaryDirectory() as cache:
        return _compiled({**environment, "TRITON_CACHE_DIR": cache}, str(capability), *names)


def _compiled(environment: dict[str, str], *arguments: str) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-P", str(Path(__file__).with_name("compiled.py")), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines()]
    return {entry["name"]: entry for entry in found}


def assert_runs(found: dict[str, Any], capability: int) -> None:
    assert "error" not in found, found["error"]
    assert found["code_bytes"] > 1000
    assert found["shared_bytes"] <= SHARED_BYTES[capability]
    half = "16" in found["name"] and "cross" not in found["name"]
    assert found["tensor_cores"] == (half and capability >= 80)


@pytest.mark.long
def test_the_low_rank_products_compile_for_an_h200():
    for found in compiled(90, *SHORT).values():
        assert_runs(found, 90)


@pytest.mark.long
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("capability", SHARED_BYTES)
def test_a_kernel_compiles(name: str, capability: int) -> None:
    """Below capability 8.0 Triton has no tensor cores, and its products are those of the common cores."""
    assert_runs(compiled(capability)[name], capability)
