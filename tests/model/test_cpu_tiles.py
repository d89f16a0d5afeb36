"""The tiles of our products on a CPU: the registers that they fill. `test_cpu_groups` tests what they compute."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedguild.model.kernels import cpu_tiles

TESTS = Path(__file__).with_name("test_cpu_groups.py")


@pytest.mark.parametrize(
    ("features", "lanes", "vectors"),
    [
        ({"avx512f": True, "avx2": True}, 16, 4),
        ({"avx512f": False, "avx2": True}, 8, 2),
        ({"neon": True}, 4, 4),
        ({}, 4, 2),
        (None, 4, 2),
    ],
    ids=["AVX-512", "AVX2", "NEON", "another", "unknown"],
)
def test_the_registers_are_those_of_the_cpu(features, lanes, vectors, monkeypatch):
    def known():
        if features is None:
            raise RuntimeError("failed to get host cpu features")
        return features

    monkeypatch.setattr(cpu_tiles.llvmlite.binding, "get_host_cpu_features", known)
    assert cpu_tiles.registers() == (lanes, vectors)


def test_the_registers_are_those_that_numba_compiles_for(monkeypatch):
    monkeypatch.setattr(cpu_tiles.numba.config, "CPU_NAME", "generic")
    assert cpu_tiles.registers() == (4, 2)
    monkeypatch.setattr(cpu_tiles.numba.config, "CPU_FEATURES", "+avx2,-avx512f,+fma")
    assert cpu_tiles.features() == {"avx2", "fma"}
    assert cpu_tiles.registers() == (8, 2)


@pytest.mark.long
@pytest.mark.parametrize("feature", ["avx2", "neon", "sse2"])
def test_the_kernel_of_other_cpus(feature, tmp_path):
    """The tests of the products, with the registers of another CPU: LLVM splits or widens them for this one."""
    script = (
        "import llvmlite.binding as binding, pytest, sys\n"
        f"binding.get_host_cpu_features = lambda: binding.targets.FeatureMap({feature}=True)\n"
        f"sys.exit(pytest.main([{str(TESTS)!r}, '-m', 'not long']))"
    )
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
