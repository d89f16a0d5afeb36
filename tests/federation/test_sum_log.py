"""A site's record of the sums that its trainings entered: which other sums of the same training it opens."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os

import numpy as np
import pytest
import torch

from fedguild.core import journal
from fedguild.core.errors import FedGuildError, UploadError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.federation.sum_log import SumLog, sketch, told_apart
from fedguild.privacy.secure_sum.client import Stated

ALL = tuple(range(8))


def drawn(seed=0, moved=0.0):
    rng = torch.Generator().manual_seed(seed)
    factors = {"a": torch.randn(8, 64, generator=rng), "b": torch.zeros(64, 8)}
    return Payload.of({ADAPTER: {name: factor + moved for name, factor in factors.items()}})


@pytest.fixture
def log(tmp_path):
    """Of a site, as of its next start."""
    return lambda fewest=3, **more: SumLog(tmp_path / "sums.jsonl", fewest, **more)


def enters(log, run, number, download, clients, stated=None):
    """Whether a site opens a sum over these clients."""
    enter = log.training(run, number, download)
    try:
        for half in ("weights", "values"):
            enter(half, clients, stated if half == "values" else None)
    except UploadError:
        return False
    return True


@pytest.mark.parametrize("synced", [0, 1])
def test_a_disk_that_is_full_at_the_first_sum_leaves_a_record_that_can_be_read(synced, log, monkeypatch):
    enter, left, sync = log().training("one", 1, drawn()), [synced], os.fsync

    def full(descriptor: int) -> None:
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        left[0] -= 1
        sync(descriptor)

    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(journal.os, "fsync", full)
            with contextlib.suppress(FedGuildError):
                enter("weights", ALL, None)
    enter("weights", ALL, None)
    assert enters(log(), "one", 1, drawn(), ALL)
    assert not enters(log(), "one", 1, drawn(), ALL[:-1])


@pytest.mark.parametrize(
    ("run", "number", "download", "clients", "opens"),
    [
        ("one", 1, drawn(), ALL, True),
        ("one", 1, drawn(), ALL[:-1], False),
        ("one", 1, drawn(moved=2e-7), ALL[:-1], False),
        ("one", 1, drawn(1), ALL[:-1], False),
        ("one", 1, drawn(), ALL[:-3], True),
        ("one", 2, drawn(), ALL[:-1], False),
        ("one", 2, drawn(moved=0.01), ALL[:-1], True),
        ("two", 1, drawn(), ALL, True),
        ("two", 1, drawn(), ALL[:-1], False),
        ("two", 1, drawn(moved=0.1), ALL[:-1], False),
        ("two", 5, drawn(moved=0.1), (*ALL, 8), False),
        ("two", 1, drawn(), (*ALL[:-3], 8, 9, 10), True),
        ("two", 1, drawn(), (*ALL[:-3], 8), False),
        ("two", 1, drawn(1), ALL[:-1], True),
    ],
    ids=[
        "the same round again, as after a crash",
        "without one client",
        "with the download moved by a unit in the last place",
        "with another download",
        "without three",
        "the same download in another round",
        "the next round",
        "the same start with the same clients",
        "the same start without one client",
        "a start that is moved a little",
        "another round of it with one more",
        "three others in place of three",
        "one other in place of three",
        "another draw of the first adapter",
    ],
)
def test_which_second_sum_a_site_opens(run, number, download, clients, opens, log):
    assert enters(log(), "one", 1, drawn(), ALL)
    assert enters(log(), run, number, download, clients) is opens
    assert enters(log(fewest=None), run, number, download, clients), "accept.repeat_sessions lifts it"


def test_no_combination_of_sums_that_a_site_opened_shows_fewer_than_it_allows():
    """Against all combinations, by the rank of what two or fewer clients would add to the sums' span."""
    rng = np.random.default_rng(0)
    for _ in range(60):
        opened = []
        for _ in range(5):
            new = frozenset(np.flatnonzero(rng.random(9) < 0.6).tolist())
            if len(new) >= 3 and not told_apart(opened, new, 3):
                opened.append(new)
        rows = np.array([[client in each for client in range(9)] for each in opened], float)
        for few in (*itertools.combinations(range(9), 1), *itertools.combinations(range(9), 2)):
            others = np.delete(rows, few, axis=1)
            assert np.linalg.matrix_rank(others) == np.linalg.matrix_rank(rows), (opened, few)


def test_distances_of_sketches_are_those_of_downloads():
    one, other = drawn(0), drawn(1)
    distance = float((one.tensors["adapter/a"] - other.tensors["adapter/a"]).norm())
    found = [np.linalg.norm(sketch(one, secret) - sketch(other, secret)) / distance for secret in range(50)]
    assert np.mean(found) == pytest.approx(1, abs=0.05)
    assert max(abs(each - 1) for each in found) < 0.4


def test_the_seed_that_a_method_sends_for_its_adapter_counts(log):
    zeros = {ADAPTER: {"b": torch.zeros(4, 2)}}
    assert enters(log(), "one", 1, Payload.of(zeros, {"seed": 7}), ALL)
    assert not enters(log(), "two", 1, Payload.of(zeros, {"seed": 7}), ALL[:-1])
    assert enters(log(), "two", 1, Payload.of(zeros, {"seed": 8}), ALL[:-1])


def test_a_kill_between_two_lines_loses_no_sum(log, tmp_path):
    assert enters(log(), "one", 1, drawn(), ALL)
    path = tmp_path / "sums.jsonl"
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"run": "on')
    assert enters(log(), "one", 2, drawn(moved=0.01), ALL)
    assert path.read_bytes().startswith(whole)
    assert not enters(log(), "one", 1, drawn(), ALL[:-1])
    path.write_bytes(b'{"secret": "0"}\n{}\n')
    with pytest.raises(FedGuildError, match="holds which clients this site was summed with"):
        log()


def test_a_round_that_an_earlier_version_summed_is_refused(log, tmp_path):
    earlier = tmp_path / "sums.json"
    earlier.write_text('{"3 0123 weights": "4567"}')
    with pytest.raises(UploadError, match="summed under an earlier version of fedguild"):
        log(earlier=earlier).training("one", 3, drawn())("weights", ALL, None)
    assert enters(log(earlier=earlier), "one", 4, drawn(), ALL)
    assert enters(log(None, earlier=earlier), "one", 3, drawn(), ALL)


@pytest.mark.parametrize(
    ("run", "number", "factor", "weighed", "opens"),
    [
        ("one", 1, 1.0, ALL, True),
        ("one", 1, 1.9, ALL, True),
        ("one", 1, 2.1, ALL, False),
        ("one", 1, 0.0, ALL, False),
        ("one", 4, 0.25, ALL, False),
        ("one", 1, 4.0, (*ALL, 8, 9, 10), True),
        ("two", 1, 4.0, ALL, True),
    ],
    ids=["the same", "nearly", "another", "nothing", "in another round", "of others too", "another run, and training"],
)
def test_the_server_states_the_sums_of_a_training_once(run, number, factor, weighed, opens, log):
    """One of several numbers is changed, the last; of a training on a GPU they need not be the same to the last bit."""
    stated = np.linspace(1.0, 100.0, 200)
    assert enters(log(), "one", 1, drawn(), ALL, Stated(ALL, stated))
    stated[-1] *= factor
    assert enters(log(), run, number, drawn(), ALL, Stated(weighed, stated)) is opens
    assert enters(log(None), run, number, drawn(), ALL, Stated(weighed, stated))
    assert not enters(log(), "one", 1, drawn(), ALL, Stated(ALL, stated[:-1])), "another number of them"
