"""A federation's server folder as the parts of a page: the run, its clients' keys and the audit log."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from fedguild.core.layout import AUDIT, REGISTERED, RUN, client_index, client_name
from fedguild.core.tail import Tail
from fedguild.measuring.log.folder import read_if_whole
from fedguild.report.watch.board import Board
from fedguild.report.watch.run_view import RunView

_TOLD = {
    "joined": "{client} has joined: {examples} examples.",
    "refused": "{name} was turned away: {reason}.",
    "accepted": "{name} takes part after all.",
    "registered": "The key of {client} is registered.",
    "revoked": "The key of {client} was revoked.",
    "delivered": "The model of {client}: {result}.",
}
"""What the log shows of the audit log; the rest is among the run's own events."""


class FederationView(RunView):
    """The parts of the run in a server's state folder, with the state of every client's key.

    A key is `registered`, `joined` once the run has admitted the client, `refused` with the reason, or `revoked`.

    Args:
        state: The server's state folder; it need not exist yet.
    """

    def __init__(self, state: Path, board: Board) -> None:
        self.state = state
        self._audit = Tail(state / AUDIT)
        self._keys: dict[int, tuple[str, str]] = {}
        self._seen: dict[int, float] = {}
        super().__init__(state / RUN, board)

    def refresh(self) -> bool:
        entries, _ = self._audit.read()
        for entry in entries:
            self._take_entry(entry)
        for name in read_if_whole(self.state / REGISTERED):
            if (client := client_index(name)) is not None:
                self._keys.setdefault(client, ("registered", ""))
        for client, (key, reason) in self._keys.items():
            known = self._clients.get(client)
            if known is None or known.key != key:
                row = self.row(client)
                row.key = key
                if key in ("revoked", "refused"):
                    row.state, row.note = "gone", reason or f"its key was {key}"
                elif row.state == "gone":
                    row.state, row.note = "idle", ""
            if known is not None and known.contact is None and client in self._seen:
                self.row(client).contact = self._seen[client]
        return super().refresh() or bool(entries)

    def close(self) -> None:
        super().close()
        self._audit.close()

    def _facts(self) -> dict[str, Any]:
        return {**super()._facts(), "kind": "federation", "folder": str(self.state.parent)}

    def _take_entry(self, line: bytes) -> None:
        try:
            entry = from_json(line)
            at = datetime.fromisoformat(entry["time"]).timestamp()
            self._take_audit(entry, at)
        except (ValueError, KeyError, TypeError):
            return  # a damaged line; `fedguild federation audit` says which

    def _take_audit(self, entry: Mapping[str, Any], at: float) -> None:
        event, named = entry["event"], entry.get("client", entry.get("name", ""))
        client = named if isinstance(named, int) else client_index(str(named))
        if client is not None and event in ("registered", "joined", "revoked"):
            self._keys[client] = (event, "")
        elif client is not None and event == "refused" and self._keys.get(client, ("",))[0] != "revoked":
            self._keys[client] = ("refused", str(entry["reason"]))
        elif client is not None and event == "accepted" and self._keys.get(client, ("",))[0] == "refused":
            self._keys[client] = ("joined", "")
        if client is not None and event in ("joined", "delivered"):
            self._seen[client] = at
        if event in _TOLD:
            name = client_name(client) if client is not None else str(named)
            self._say(at, _TOLD[event].format_map({**entry, "client": name}), "message")
