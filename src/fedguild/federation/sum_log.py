"""A site's record of the sums of secure aggregation that its trainings entered, over all runs.

Two sums of one training over different clients differ by the upload of those who are in one of them only, and training
is deterministic. A server that begins a run anew without one client has that client's upload, whether it means to or
not. So a site writes down which clients are in a sum before it helps to open it, and opens no other sum of the same
training unless those whom the two tell apart are many enough to hide one another.

Which trainings count as the same: those of one round of a run, whatever the server sends in it; and those whose
downloads are alike, in other rounds and in other runs. Downloads of one run change a little from round to round, so
there only equal ones (to single precision) are alike. In another run all that come from the same draw of the first
adapter are. A download is recorded by a sketch under a secret of the site (N. Alon et al., STOC 1996), not as it is.

Over the same clients, too, the server may state the sums of the weights of a training once only. Each client rounds its
values after dividing by them, so that sums at many scales would tell large values from small ones, and so clients. Only
within a run: another run's config may train otherwise.
"""

from __future__ import annotations

import base64
import json
import secrets
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedguild.core.errors import FedGuildError, UploadError
from fedguild.core.journal import Journal
from fedguild.core.payload import ADAPTER, Payload
from fedguild.core.seeding import numpy_rng
from fedguild.privacy.secure_sum.client import Once, Stated
from fedguild.privacy.secure_sum.form import Floats

FILE = "sums.jsonl"
_BUCKETS = 64
SAME = 1e-5
"""Relative distance up to which two downloads of one run are the same."""
SAME_DRAW = 0.5
"""Relative distance up to which downloads of two runs have the same first adapter; two draws are some sqrt(2) apart."""
OCTAVE = 256
"""Units of a stated number's logarithm in a factor of two, up to which two are the same: a training on a GPU need not
repeat to the last bit."""
_SEED_WEIGHT = 1e3
WAY_OUT = (
    "Run with the same clients again; or begin a run with another `seed`, which draws another first adapter; or, where "
    "all agree, set accept.repeat_sessions in site.yaml."
)


@dataclass(frozen=True)
class _Sum:
    run: str
    round: int
    half: str
    clients: frozenset[int]
    sketch: NDArray[np.float32]
    weighed: frozenset[int]
    stated: NDArray[np.int16]


class SumLog:
    """The record of a site.

    Args:
        path: The file, JSON lines; the first has the secret of the sketches.
        fewest: Fewest clients that the sums of one training may tell apart (`accept.secure_difference`); None to record
            only.
        earlier: The record of a version before this one, of one run: it says which trainings were summed, and not over
            whom.

    Raises:
        FedGuildError: the file cannot be read.
    """

    def __init__(self, path: Path, fewest: int | None, earlier: Path | None = None) -> None:
        self.path, self.fewest, self.earlier = path, fewest, earlier
        try:
            self._journal = Journal(path)
            lines = [json.loads(line) for line in self._journal.lines]
            self._secret = int(lines[0]["secret"], 16) if lines else secrets.randbits(128)
            self._sums = [_read(line) for line in lines[1:]]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            raise FedGuildError(
                f"{path} cannot be read ({error}).",
                "It holds which clients this site was summed with; restore the file.",
            ) from error

    def training(self, run: str, round: int, download: Payload) -> Once:
        """Returns what enters a sum of a training before it is opened.

        That raises UploadError if the sum must not be opened, and FedGuildError if the file cannot be written.
        """
        found = sketch(download, self._secret)

        def enter(half: str, clients: Sequence[int], stated: Stated | None) -> None:
            told = magnitudes(np.zeros(0) if stated is None else stated.numbers)
            weighed = frozenset(() if stated is None else stated.clients)
            self._enter(_Sum(run, round, half, frozenset(clients), found, weighed, told))

        return enter

    def _enter(self, new: _Sum) -> None:
        same = [each for each in self._sums if each.half == new.half and _same_training(each, new)]
        sets = {each.clients for each in same}
        if new.clients not in sets:
            self._require_no_earlier(new)
            few = told_apart(sets, new.clients, self.fewest or 1)
            if few:
                where = "this run" if same[-1].run == new.run else "an earlier run"
                raise UploadError(
                    f"the {new.half} of the same training were summed over other clients before (round "
                    f"{same[-1].round} of {where}), and both sums together would tell {len(few)} client(s) apart from "
                    f"the others, below accept.secure_difference of {self.fewest}. {WAY_OUT}"
                )
        elif self.fewest is not None and any(_states_otherwise(each, new) for each in same):
            raise UploadError(
                f"the server states other sums of the weights than when round {new.round} of this run was summed over "
                "the same clients before, and both sums together could tell clients apart. Begin a run with another "
                "`seed`; or, where all agree, set accept.repeat_sessions in site.yaml."
            )
        if not any((each.run, each.round, each.clients) == (new.run, new.round, new.clients) for each in same):
            is_first = not self._sums and not self._journal.lines
            lines = [{"secret": f"{self._secret:032x}"}] * is_first + [_written(new)]
            self._journal.append(*(json.dumps(line).encode() for line in lines))
            self._sums.append(new)

    def _require_no_earlier(self, new: _Sum) -> None:
        if self.fewest is None or self.earlier is None or not self.earlier.exists():
            return
        try:
            known = {key.partition(" ")[0] for key in json.loads(self.earlier.read_text("utf-8"))}
        except (OSError, ValueError, AttributeError) as error:
            raise FedGuildError(f"{self.earlier} cannot be read ({error}).") from error
        if str(new.round) in known:
            raise UploadError(
                f"round {new.round} was summed under an earlier version of fedguild, whose record does not say over "
                f"whom. Begin a new run with another `seed`; or, where all agree, set accept.repeat_sessions."
            )


def told_apart(before: Collection[frozenset[int]], new: frozenset[int], fewest: int) -> frozenset[int]:
    """Returns the smallest group of clients that a new sum tells apart from all others, if it is smaller than `fewest`.

    Clients that are in the same sums cannot be told apart by any combination of these: each is one of the groups' sums.
    Without sums before, and of what these have told apart already, nothing is returned.
    """
    if not before:
        return frozenset()
    apart = _groups([*before, new]) - _groups(before)
    least = min(apart, key=lambda group: (len(group), min(group)), default=frozenset())
    return least if len(least) < fewest else frozenset()


def _groups(sums: Collection[frozenset[int]]) -> set[frozenset[int]]:
    """Returns the groups of clients that are in exactly the same sums."""
    groups: dict[tuple[bool, ...], set[int]] = defaultdict(set)
    for client in frozenset().union(*sums):
        groups[tuple(client in each for each in sums)].add(client)
    return {frozenset(group) for group in groups.values()}


def _same_training(before: _Sum, new: _Sum) -> bool:
    if (before.run, before.round) == (new.run, new.round):
        return True
    distance = np.linalg.norm(before.sketch - new.sketch)
    largest = max(np.linalg.norm(before.sketch), np.linalg.norm(new.sketch))
    return bool(distance <= (SAME if before.run == new.run else SAME_DRAW) * largest)


def _states_otherwise(before: _Sum, new: _Sum) -> bool:
    """Whether the server states other sums of the same weights of a run; a record of an earlier version has none."""
    if (before.run, before.clients, before.weighed) != (new.run, new.clients, new.weighed) or not before.stated.size:
        return False
    if before.stated.shape != new.stated.shape:
        return True
    return bool((np.abs(before.stated.astype(np.int32) - new.stated) > OCTAVE).any())


def magnitudes(stated: Floats) -> NDArray[np.int16]:
    """Returns the logarithms of what a server states, in 1 / `OCTAVE` of a factor of two; 0 counts as 2^-90."""
    return np.asarray(np.rint(np.log2(np.maximum(stated, 2.0**-90)) * OCTAVE), np.int16)


def sketch(download: Payload, secret: int) -> NDArray[np.float32]:
    """Returns [64] sums of a download's values under random signs; distances are those of the downloads within 10 %.

    A method that sends the seed of its first adapter in its place has that seed in it.
    """
    buckets = np.zeros(_BUCKETS)
    for name, tensor in sorted(download.part(ADAPTER).items()):
        values = tensor.detach().cpu().double().flatten().numpy()
        bits = np.frombuffer(numpy_rng(secret, name).bytes(-(-values.size // 8)), np.uint8)
        signed = np.where(np.unpackbits(bits, count=values.size), values, -values)
        buckets += np.bincount(np.arange(values.size) % _BUCKETS, signed, _BUCKETS)
    if (seed := download.scalars.get("seed")) is not None:
        buckets += _SEED_WEIGHT * numpy_rng(secret, "seed", str(seed)).normal(size=_BUCKETS)
    return buckets.astype(np.float32)


def _written(entry: _Sum) -> dict[str, object]:
    return {
        "run": entry.run,
        "round": entry.round,
        "half": entry.half,
        "clients": sorted(entry.clients),
        "sketch": base64.b64encode(entry.sketch.tobytes()).decode(),
        "weighed": sorted(entry.weighed),
        "stated": base64.b64encode(entry.stated.tobytes()).decode(),
    }


def _read(line: dict[str, object]) -> _Sum:
    found = np.frombuffer(base64.b64decode(str(line["sketch"]), validate=True), np.float32)
    if found.shape != (_BUCKETS,):
        raise ValueError("a line has no sketch")
    clients = line["clients"]
    if not isinstance(clients, list):
        raise ValueError("a line has no clients")
    stated = np.frombuffer(base64.b64decode(str(line.get("stated", "")), validate=True), np.int16)
    weighed = line.get("weighed", [])
    if not isinstance(weighed, list):
        raise ValueError("a line has no clients that weighed")
    return _Sum(
        str(line["run"]),
        int(str(line["round"])),
        str(line["half"]),
        frozenset(map(int, clients)),
        found,
        frozenset(map(int, weighed)),
        stated,
    )
