"""Client half of merging: a site's ledger of the changes to its backbone, version by version, on disk.

A download carries the versions that its client lacks, in the part `merge` (`merge/3/{module}.lora_A`), and two scalars:
the newest version, and a digest of all of them. The ledger stores the received versions and returns the changes of all
versions up to the newest, which bring the backbone to the server's version (`Backbone.merged`). One ledger serves all
clients of a site, since they share its backbone.

The scalar `merge_folded` names a version up to which the changes are one dense change (`fedguild.model.folding`). A
site that has the factors folds them itself; any other receives the dense change. What a dense change replaces is
removed `KEPT` versions later, so that the ledger's size is bounded.

A version that arrives again replaces the old one, and versions newer than the requested one are ignored. So a repeated
round, or a run resumed from an older checkpoint, sees the same changes as the first time.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.packing import pack, views
from fedguild.core.payload import Payload
from fedguild.core.sealed import map_sealed, read_sealed, write_sealed
from fedguild.model.folding import folded

MERGE = "merge"
"""The payload part with changes: `{version}/{module}.lora_A` and `.lora_B`, or `.change` of all up to a version."""
VERSION, DIGEST = "merge_version", "merge_digest"
"""The scalars of a download: the newest version, and `digest` over all versions up to it."""
FOLDED = "merge_folded"
"""The scalar of a download: the version up to which the changes are dense; absent if there is none."""
KEPT = 2
"""Versions after a dense change that a ledger waits for before it removes what the dense change replaces."""
FOLDER = "merges"


def merge_version(payload: Payload) -> int:
    """Returns the version of the backbone that a payload refers to; 0 is the published backbone."""
    return int(payload.scalars.get(VERSION, 0))


def by_version(merges: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Groups `{version}/{name}` as version -> name -> factor, versions in ascending order."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in merges.items():
        version, _, rest = name.partition("/")
        found.setdefault(int(version), {})[rest] = tensor
    return dict(sorted(found.items()))


def up_to(merges: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Returns the changes up to a version, of `{version}/{name}`; the tensors are not copied."""
    return {name: tensor for name, tensor in merges.items() if int(name.partition("/")[0]) <= version}


def without_merges(download: Payload) -> Payload:
    """Returns a download without the changes of the backbone, for clients that read them from a ledger."""
    kept = {name: value for name, value in download.tensors.items() if not name.startswith(f"{MERGE}/")}
    return Payload(kept, download.scalars)


def reaches(merges: Mapping[str, Tensor], version: int) -> bool:
    """Whether merges have the changes up to a version: not if it was folded into a later one."""
    found = by_version(merges)
    dense = [number for number, tensors in found.items() if any(name.endswith(".change") for name in tensors)]
    return version >= max(dense, default=0)


def digest(before: str, content: bytes) -> str:
    """Returns the digest of a chain of versions: of the digest before it and of the newest version's bytes.

    A dense change begins a new chain: its digest before is empty.
    """
    return _linked(before, hashlib.sha256(content).digest())


def _linked(before: str, sum: bytes) -> str:
    return hashlib.sha256(before.encode() + sum).hexdigest()


class MergeLedger:
    """The versions that a site has received: `FOLDER/version-00003.merge`, and dense ones: `folded-00003.merge`.

    Args:
        folder: Folder of the files; it need not exist.

    Attributes:
        contents: Version -> the SHA-256 of its content, for what `receive` last returned.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.contents: dict[int, str] = {}

    @classmethod
    def beside(cls, memory: ClientMemory) -> MergeLedger:
        return cls(memory.folder.parent / FOLDER)

    def receive(self, *downloads: Payload) -> dict[str, Tensor]:
        """Stores the versions in the downloads; returns the changes of all versions up to theirs.

        Args:
            downloads: Downloads of the site's clients in one round, all of the same version.

        Returns:
            `{version}/{module}.lora_A` and `.lora_B`, as `Backbone.merged` takes them; empty for the published
            backbone.

        Raises:
            CheckpointError: a version was never received, is damaged, or differs from the server's.
            FedGuildError: a version cannot be written.
            ValueError: the downloads are of several versions.
        """
        asked = {
            (merge_version(download), int(download.scalars.get(FOLDED, 0)), str(download.scalars.get(DIGEST, "")))
            for download in downloads
        }
        if len(asked) != 1:
            raise ValueError(
                f"The downloads refer to different versions of one backbone: {sorted(each[0] for each in asked)}."
            )
        ((newest, dense, expected),) = asked
        carried: dict[int, dict[str, Tensor]] = {}
        for download in downloads:
            carried |= by_version(download.part(MERGE))
        missing = [
            version
            for version in range(dense + 1, newest + 1)
            if version not in carried and not self._path(version).exists()
        ]
        if dense and dense not in carried:
            missing += self._missing_for(dense)
        if missing:
            lacks = ", ".join(map(str, sorted(missing)))
            told = f"{self.folder} lacks {lacks} of the {newest} versions of the backbone's changes."
            raise CheckpointError(told, _CURE)
        for version, tensors in carried.items():
            self._keep(version, pack(tensors, {}), dense=version == dense)
        if dense and not self._path(dense, dense=True).exists():
            self._fold(dense)
        found: dict[str, Tensor] = {}
        chain, contents = "", {}
        for version in range(max(dense, 1), newest + 1):
            tensors, sum = self._mapped(self._path(version, dense=version == dense))
            chain, contents[version] = _linked(chain, sum), sum.hex()
            found |= {f"{version}/{name}": tensor for name, tensor in tensors.items()}
        if chain != expected:
            raise CheckpointError(f"{self.folder} holds changes of the backbone that differ from the server's.", _CURE)
        self.contents = contents
        self._remove_before(self._dense_up_to(newest - KEPT))
        return found

    def refill(self, merges: Mapping[str, Tensor]) -> None:
        """Stores the versions that are missing here; `merges` are all merges of a run, as `receive` returns them.

        Raises:
            FedGuildError: a version cannot be written.
        """
        for version, tensors in by_version(merges).items():
            dense = not reaches(merges, version - 1)
            if not self._path(version, dense=dense).exists():
                self._keep(version, pack(tensors, {}), dense=dense)

    def _keep(self, version: int, content: bytes, *, dense: bool) -> None:
        """Writes a version unless the same version is already stored undamaged."""
        path = self._path(version, dense=dense)
        with suppress(CheckpointError):
            if path.exists() and read_sealed(path) == content:
                return
        write_sealed(path, content, aligned=True)
        if not dense:  # what was folded from another version of this number
            self._remove(lambda is_dense, number: is_dense and number >= version)

    def _missing_for(self, dense: int) -> list[int]:
        """Returns the versions that are missing to fold a dense change; none if it is already stored."""
        held = self._dense_up_to(dense)
        return [version for version in range(held + 1, dense + 1) if not self._path(version).exists()]

    def _fold(self, dense: int) -> None:
        held = self._dense_up_to(dense)
        paths = [self._path(held, dense=True)] if held else []
        paths += [self._path(version) for version in range(held + 1, dense + 1)]
        content = pack(folded(self._mapped(path)[0] for path in paths), {})
        write_sealed(self._path(dense, dense=True), content, aligned=True)

    def _dense_up_to(self, version: int) -> int:
        return max((number for is_dense, number in self._stored() if is_dense and number <= version), default=0)

    def _remove_before(self, dense: int) -> None:
        self._remove(lambda is_dense, number: number < dense or (number == dense and not is_dense))

    def _remove(self, unwanted: Callable[[bool, int], bool]) -> None:
        for stored in self._stored():
            if unwanted(*stored):
                self._path(stored[1], dense=stored[0]).unlink(missing_ok=True)

    def _stored(self) -> list[tuple[bool, int]]:
        """Returns (whether it is dense, version) of every file."""
        matches = (_FILE_NAME.fullmatch(path.name) for path in self.folder.glob("*.merge"))
        return [(match[1] == "folded", int(match[2])) for match in matches if match]

    def _mapped(self, path: Path) -> tuple[dict[str, Tensor], bytes]:
        """Returns a version's tensors, mapped from its file, and the SHA-256 of its content."""
        content, sum = map_sealed(path)
        try:
            return views(content), sum
        except FedGuildError as error:
            raise CheckpointError(f"{path} is not a version: {error.message}.") from error

    def _path(self, version: int, *, dense: bool = False) -> Path:
        return self.folder / f"{'folded' if dense else 'version'}-{version:05d}.merge"


_FILE_NAME = re.compile(r"(folded|version)-(\d+)\.merge")
_CURE = "A client that missed a round gets every version again: continue without this client, or restore the folder."
