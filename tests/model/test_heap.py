"""Freed pages: kept for the next tensor, unless the user has set the allocator up."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

from fedguild.model import heap

PROGRAM = """
import psutil, resource, torch
from fedguild.model.heap import give_back_freed_pages, keep_freed_pages
print(is_kept := keep_freed_pages())
for turn in range(24):
    if turn == 16:  # the places of blocks have settled by then
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(16 << 20)
print((resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before) * resource.getpagesize() / 8 / (64 << 20))
if is_kept:
    # Blocks below the largest that is kept, with something small between them that stays.
    kept = [(torch.ones(4 << 20), torch.ones(8)) for _ in range(16)]
    small = [one for _, one in kept]
    del kept
    before = psutil.Process().memory_info().rss
    give_back_freed_pages()
    print((before - psutil.Process().memory_info().rss) / (16 * (16 << 20)))
"""


def freed_and_needed_again(**environment: str) -> list[str]:
    """What `keep_freed_pages` returned in a new process, the part of a tensor that is faulted in again, and the part
    of kept pages that is given back.
    """
    own = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=own | environment, capture_output=True, text=True, check=True
    )
    return run.stdout.split()


def is_glibc() -> bool:
    return sys.platform.startswith("linux") and "glibc" in (os.confstr("CS_GNU_LIBC_VERSION") or "")


@pytest.mark.skipif(not is_glibc(), reason="needs glibc")
def test_a_freed_tensors_pages_serve_the_next_one_and_are_given_back_between_runs():
    kept, part, given_back = freed_and_needed_again()
    assert kept == "True"
    assert float(part) < 0.05
    assert float(given_back) > 0.8


@pytest.mark.skipif(not is_glibc(), reason="needs glibc")
@pytest.mark.parametrize(
    "setting",
    [
        {"MALLOC_TRIM_THRESHOLD_": "131072"},
        pytest.param({"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=131072"}, marks=pytest.mark.long),
    ],
)
def test_settings_of_the_user_stay(setting):
    kept, part = freed_and_needed_again(**setting)
    assert kept == "False"
    assert float(part) > 0.9


@pytest.mark.parametrize(("available", "given_back"), [(7, 1), (8, 0)])
def test_pages_are_given_back_where_memory_is_scarce(monkeypatch, available, given_back):
    """Of 32 bytes a quarter is to stay available."""
    calls: list[None] = []
    monkeypatch.setattr(heap.psutil, "virtual_memory", lambda: SimpleNamespace(available=available, total=32))
    monkeypatch.setattr(heap, "give_back_freed_pages", lambda: calls.append(None))
    heap.give_back_if_scarce()
    assert len(calls) == given_back


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    assert heap.keep_freed_pages.__wrapped__() is False
