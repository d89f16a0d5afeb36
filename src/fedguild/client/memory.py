"""Client memory, kept on disk between rounds: written atomically, keyed by client and round, never sent.

Examples are a private gate, a personal adapter or a learned output scale. A memory consists of named tensors and
scalars like any payload, but never leaves the client's machine. A round reads only the memory of earlier rounds, so an
interrupted round starts again from the same memory.
"""

from __future__ import annotations

import re
from pathlib import Path

from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload
from fedguild.core.sealed import read_sealed, remove_leftovers, write_sealed

TRAINED = "trained"
"""Name of the folder with the models that clients' training left."""
_SUFFIX = ".memory"
_FILE_NAME = re.compile(r"round-(\d+)" + re.escape(_SUFFIX))


class ClientMemory:
    """The memories of a federation's clients: `FOLDER/CLIENT/round-00003.memory`.

    Args:
        folder: Folder of the files; it need not exist. Each real client has its own.
        trained: Whether to keep the models that the clients' training left as well.

    Attributes:
        trained: Those models, in the folder `trained` next to `folder`; None if they are not kept. No method sees them:
            they are kept for scoring only.
    """

    def __init__(self, folder: Path, *, trained: bool = False) -> None:
        self.folder = folder
        self.trained = ClientMemory(folder.parent / TRAINED) if trained else None
        self._crowded: set[str] | None = None

    def load(self, client: str, before_round: int) -> Payload:
        """Returns what the client kept in its newest round below `before_round`; empty if none.

        Raises:
            CheckpointError: the file is damaged.
        """
        earlier = [round for round in self._rounds(client) if round < before_round]
        if not earlier:
            return Payload()
        path = self._path(client, earlier[-1])
        content = read_sealed(path)
        try:
            return Payload(*unpack(content))
        except FedGuildError as error:
            raise CheckpointError(f"{path} is not a client's memory: {error.message}.") from error

    def save(self, client: str, round: int, kept: Payload) -> None:
        """Saves tensors and scalars as the client's memory of `round`.

        Raises:
            FedGuildError: the file cannot be written; earlier memories are unchanged.
        """
        write_sealed(self._path(client, round), pack(kept.tensors, kept.scalars))
        if self._crowded is not None:
            self._crowded.add(client)

    def forget(self, older_than_round: int) -> None:
        """Removes the memories that no resume from `older_than_round` or later needs.

        For each client, the newest memory up to `older_than_round` and all newer ones are kept. Call it with the oldest
        round whose checkpoint is kept, and not while a client saves. The first call examines all clients, later ones
        only those that may have more than one memory, so the cost of a round does not depend on the number of clients.
        """
        if self.trained is not None:
            self.trained.forget(older_than_round)
        crowded = set()
        for client in sorted(self._clients() if self._crowded is None else self._crowded):
            remove_leftovers(self.folder / client)
            rounds = self._rounds(client)
            old = [round for round in rounds if round <= older_than_round][:-1]
            for round in old:
                self._path(client, round).unlink()
            if len(rounds) - len(old) > 1:
                crowded.add(client)
        self._crowded = crowded

    def forget_after(self, round: int) -> None:
        """Removes the memories of all rounds after one, from which a run goes on."""
        if self.trained is not None:
            self.trained.forget_after(round)
        for client in self._clients():
            for later in self._rounds(client):
                if later > round:
                    self._path(client, later).unlink()

    def is_pruned(self, client: str, before_round: int, keep: int) -> bool:
        """Whether `forget` may have removed all that a client kept below a round, while newer memories are left.

        Args:
            keep: `forget` was called with the round of each training less this.
        """
        rounds = self._rounds(client)
        return bool(rounds) and before_round <= min(rounds[0], rounds[-1] - keep)

    def _clients(self) -> set[str]:
        return {path.name for path in self.folder.glob("*") if path.is_dir()}

    def _path(self, client: str, round: int) -> Path:
        return self.folder / client / f"round-{round:05d}{_SUFFIX}"

    def _rounds(self, client: str) -> list[int]:
        matches = (_FILE_NAME.fullmatch(path.name) for path in (self.folder / client).glob(f"*{_SUFFIX}"))
        return sorted(int(match[1]) for match in matches if match)
