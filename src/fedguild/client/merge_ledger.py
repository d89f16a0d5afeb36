"""Client half of merging: a site's ledger of the changes to its backbone, version by version, on disk.

A download carries the versions that its client lacks, in the part `merge`
(`merge/3/{module}.lora_A`), and two scalars: the newest version, and a digest of all of them. The ledger stores the
received versions and returns the changes of all versions up to the newest, so that the backbone can be brought to the
server's version (`Backbone.merged`). One ledger serves all clients of a site, since they share its backbone.

A version that arrives again replaces the old one, and versions newer than the requested one are ignored. A round that
is repeated, or a run that is resumed from an older checkpoint, therefore sees the same changes as the first time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from fedguild.client.memory import ClientMemory
from fedguild.errors import CheckpointError, FedGuildError
from fedguild.packing import pack, unpack
from fedguild.payload import Payload
from fedguild.sealed import read_sealed, write_sealed

MERGE = "merge"
"""The payload part with changes: `{version}/{module}.lora_A` and `.lora_B`."""
VERSION, DIGEST = "merge_version", "merge_digest"
"""The scalars of a download: the newest version, and `digest` over all versions up to it."""
FOLDER = "merges"


def merge_version(payload: Payload) -> int:
    """Returns the version of the backbone that a payload refers to; 0 is the published backbone."""
    return int(payload.scalars.get(VERSION, 0))


def by_version(merges: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Returns version -> name -> factor, versions in ascending order, of `{version}/{name}`."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in merges.items():
        version, _, rest = name.partition("/")
        found.setdefault(int(version), {})[rest] = tensor
    return dict(sorted(found.items()))


def up_to(merges: Mapping[str, Tensor], version: int) -> dict[str, Tensor]:
    """Returns the changes of the versions up to one, of `{version}/{name}`: the very tensors."""
    return {name: tensor for name, tensor in merges.items() if int(name.partition("/")[0]) <= version}


def digest(before: str, content: bytes) -> str:
    """Returns the digest of a chain of versions: of the digest before, and of the newest version's bytes."""
    return hashlib.sha256(before.encode() + hashlib.sha256(content).digest()).hexdigest()


class MergeLedger:
    """The versions that a site has received: `FOLDER/version-00003.merge`.

    Args:
        folder: Where the files are; it need not exist.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @classmethod
    def beside(cls, memory: ClientMemory) -> MergeLedger:
        """Returns the ledger of a site, in a folder beside its clients' memories."""
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
        asked = {(merge_version(download), str(download.scalars.get(DIGEST, ""))) for download in downloads}
        if len(asked) != 1:
            raise ValueError(
                f"The downloads refer to different versions of one backbone: {sorted(version for version, _ in asked)}."
            )
        ((newest, expected),) = asked
        carried: dict[int, dict[str, Tensor]] = {}
        for download in downloads:
            carried |= by_version(download.part(MERGE))
        self._require([version for version in range(1, newest + 1) if version not in carried], newest)
        found: dict[str, Tensor] = {}
        chain = ""
        for version in range(1, newest + 1):
            if version in carried:
                content = pack(carried[version], {})
                self._keep(version, content)
            else:
                content = read_sealed(self._path(version))
                carried[version] = self._unpacked(version, content)
            chain = digest(chain, content)
            found |= {f"{version}/{name}": tensor for name, tensor in carried[version].items()}
        if chain != expected:
            raise CheckpointError(f"{self.folder} holds changes of the backbone that differ from the server's.", _CURE)
        return found

    def refill(self, merges: Mapping[str, Tensor]) -> None:
        """Stores the versions that are missing here; `merges` are all merges of a run, as `receive` returns them.

        Raises:
            FedGuildError: a version cannot be written.
        """
        for version, factors in by_version(merges).items():
            if not self._path(version).exists():
                self._keep(version, pack(factors, {}))

    def _keep(self, version: int, content: bytes) -> None:
        """Writes a version unless the same version is already stored undamaged."""
        path = self._path(version)
        with suppress(CheckpointError):
            if path.exists() and read_sealed(path) == content:
                return
        write_sealed(path, content)

    def _require(self, versions: Sequence[int], newest: int) -> None:
        missing = [str(version) for version in versions if not self._path(version).exists()]
        if missing:
            lacks = f"{self.folder} lacks {', '.join(missing)} of the {newest} versions of the backbone's changes."
            raise CheckpointError(lacks, _CURE)

    def _unpacked(self, version: int, content: bytes) -> dict[str, Tensor]:
        try:
            return unpack(content)[0]
        except FedGuildError as error:
            raise CheckpointError(f"{self._path(version)} is not a version: {error.message}.") from error

    def _path(self, version: int) -> Path:
        return self.folder / f"version-{version:05d}.merge"


_CURE = "A client that missed a round gets every version again: continue without this client, or restore the folder."
