"""A run's folder as the parts of a page, followed while the run writes."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from pydantic_core import from_json

from fedguild.core.layout import client_index
from fedguild.core.score_names import metric_name, scores_line
from fedguild.core.tail import Tail
from fedguild.measuring.log.activity import NOT_CONNECTED, ActivityLog
from fedguild.measuring.log.folder import FollowedRun
from fedguild.measuring.log.records import ClientRecord, EvaluationRecord, PrivacyRecord, Record, RoundRecord
from fedguild.measuring.log.standing import Standing, standing
from fedguild.report.watch.board import Board

SHOWN_LINES = 400
SHOWN_REJECTIONS = 200
_CLIENT_SCOPES = ("client", "trained", "received")
_ROUNDS_AVERAGED = 10
_STANDING_SECONDS = 1.0
_LATE_FACTOR = 2.0
"""A client is late if it takes this many times as long as half of those that have answered."""


@dataclass
class ClientRow:
    """A client of the run.

    Attributes:
        state: `idle`, `asked`, `training`, `delivered`, `unneeded`, `rejected`, `late` or `gone`.
        note: The reason for its state; empty if it needs none.
        since: Start of its state, seconds since 1970; None if unknown.
        rounds: Number of rounds in which it trained.
        last_round: The last of them.
        loss: Mean loss of its last training; None if withheld.
        seconds: Time of its last local update; None if withheld.
        training_flops: Total so far; None if withheld.
        peak_memory_bytes: The largest of its rounds; None if not measured.
        rejected: Number of its uploads that were not aggregated.
        score: Its model's last score on its own examples; None if not scored.
        epsilon: Privacy spent so far; None without differential privacy.
        key: The state of its key, in a federation.
        online: Whether it is connected; None if unknown.
        contact: When it last answered, seconds since 1970; None if unknown.
    """

    budget: str = ""
    state: str = "idle"
    note: str = ""
    since: float | None = None
    rounds: int = 0
    last_round: int = 0
    loss: float | None = None
    seconds: float | None = None
    upload_bytes: int = 0
    download_bytes: int = 0
    training_flops: float | None = 0.0
    peak_memory_bytes: int | None = None
    rejected: int = 0
    score: float | None = None
    epsilon: float | None = None
    key: str = ""
    online: bool | None = None
    contact: float | None = None

    def to_json(self) -> dict[str, Any]:
        """Returns the row without unknown values."""
        return {name: value for name, value in vars(self).items() if value is not None and value != ""}


@dataclass
class _RoundSums:
    """Sums over the clients of a round."""

    clients: int = 0
    upload_bytes: int = 0
    download_bytes: int = 0
    training_flops: float | None = 0.0
    peak_memory_bytes: int | None = None

    def add(self, record: ClientRecord) -> None:
        self.clients += 1
        self.upload_bytes += record.upload_bytes
        self.download_bytes += record.download_bytes
        self.training_flops = _plus(self.training_flops, record.training_flops)
        self.peak_memory_bytes = _larger(self.peak_memory_bytes, record.peak_memory_bytes)


@dataclass
class _Now:
    """The round in progress."""

    round: int = 0
    stage: str = ""
    phase: str = ""
    step: Sequence[Any] = ()
    asked: int = 0
    delivered: int = 0
    started: float | None = None
    took: list[float] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        facts = {"round": self.round, "stage": self.stage, "phase": self.phase, "step": list(self.step)}
        return {**facts, "asked": self.asked, "delivered": self.delivered, "started": self.started}


class RunView(FollowedRun):
    """The parts `run`, `standing`, `now`, `totals`, `scores`, `rounds`, `clients`, `rejections` and `log` of a run.

    Args:
        folder: The run's folder; it need not exist yet.
        now: The clock, seconds since 1970.
    """

    def __init__(self, folder: Path, board: Board, now: Callable[[], float] = time.time) -> None:
        super().__init__(folder, ClientRecord, RoundRecord, EvaluationRecord, PrivacyRecord)
        self.board, self._clock = board, now
        self._events = Tail(folder / ActivityLog.FILE)
        self._asked_standing, self._shown, self._had_events = 0.0, False, False
        self._budgets: list[str] = []
        self._forget_records()
        self._forget_events()

    @property
    def clients(self) -> dict[int, ClientRow]:
        return self._clients

    def refresh(self) -> bool:
        changed = self.read_config()
        records, began = self.records.read()
        if began and self._rounds:
            self._forget_records()
            self.board.clear()
            for client in range(len(self._budgets)):
                self.row(client)
        for record in records:
            self._take_record(record)
        events, restarted = self._events.read()
        if restarted and self._had_events:
            self._forget_events()
        self._had_events = self._had_events or restarted
        for line in events:
            self._take_event(line)
        self._find_late()
        if changed or records or events or self._touched or not self._shown:
            self._shown = True
            self._show()
        self._show_standing()
        return bool(records or events)

    def close(self) -> None:
        self.records.close()
        self._events.close()

    def row(self, client: int) -> ClientRow:
        self._touched.add(client)
        row = self._clients.get(client)
        if row is None:
            row = self._clients[client] = ClientRow(budget=self._budget_of(client))
        return row

    # --- what is forgotten when a file begins anew

    def _forget_records(self) -> None:
        self._clients: dict[int, ClientRow] = {}
        self._touched: set[int] = set()
        self._sums: dict[int, _RoundSums] = {}
        self._rounds: dict[int, dict[str, Any]] = {}
        self._scores: dict[str, list[list[Any]]] = {}
        self._metrics: set[str] = set()
        self._new_scores: set[str] = set()
        self._new_rounds: set[int] = set()
        self._rejections: deque[tuple[int, dict[str, Any]]] = deque(maxlen=SHOWN_REJECTIONS)
        self._rejected = 0
        self._privacy: dict[str, Any] = {}

    def _forget_events(self) -> None:
        self._now = _Now()
        self._lines: deque[tuple[int, dict[str, Any]]] = deque(maxlen=SHOWN_LINES)
        self._line_number = 0
        self._ending: tuple[str, str] | None = None
        self._busy: set[int] = set()
        self._remote = False

    def read_config(self) -> bool:
        if not super().read_config():
            return False
        self._budgets = _dealt(self.config)
        for client in range(len(self._budgets)):
            self.row(client)
        return True

    def _budget_of(self, client: int) -> str:
        return self._budgets[client] if 0 <= client < len(self._budgets) else ""

    # --- the records

    def _take_record(self, record: Record) -> None:
        match record:
            case ClientRecord():
                self._client(record)
            case RoundRecord():
                self._round(record)
            case EvaluationRecord():
                self._score(record)
            case PrivacyRecord():
                self._spent(record)

    def _client(self, record: ClientRecord) -> None:
        row = self.row(record.client)
        row.budget = record.budget
        row.rounds += 1
        row.last_round = record.round
        row.loss, row.seconds = _finite(record.train_loss), record.seconds
        row.upload_bytes += record.upload_bytes
        row.download_bytes += record.download_bytes
        row.training_flops = _plus(row.training_flops, record.training_flops)
        row.peak_memory_bytes = _larger(row.peak_memory_bytes, record.peak_memory_bytes)
        self._sums.setdefault(record.round, _RoundSums()).add(record)

    def _round(self, record: RoundRecord) -> None:
        number, sums = record.round, self._sums.pop(record.round, _RoundSums())
        self._rounds[number] = {
            "seconds": record.seconds,
            "phases": record.phase_seconds,
            "asked": len(record.participants),
            "rejected": len(record.rejected),
            "unneeded": len(record.unneeded),
            "late": sum(stray.round < number for stray in record.strays),
            **vars(sums),
        }
        self._new_rounds.add(number)
        for entry in record.rejected:
            self._reject(number, entry.client, entry.reason)
        for stray in record.strays:
            fate = f"dropped: {stray.dropped}" if stray.dropped else "aggregated although late"
            self._reject(number, stray.client, f"an upload of round {stray.round} was {fate}", counts=False)

    def _reject(self, number: int, client: int, reason: str, *, counts: bool = True) -> None:
        if counts:
            self.row(client).rejected += 1
        self._rejected += 1
        self._rejections.append((self._rejected, {"round": number, "client": client, "reason": reason}))

    def _score(self, record: EvaluationRecord) -> None:
        self._metrics.add(record.metric)
        score = _finite(record.score)
        if record.scope in _CLIENT_SCOPES:
            if record.examples != 0 and (client := client_index(record.name)) is not None:
                self.row(client).score = score
        elif record.scope in ("budget", "summary") and score is not None:
            name = f"{record.scope}/{record.name}/{record.split}"
            self._scores.setdefault(name, []).append([record.round, score])
            self._new_scores.add(name)

    def _spent(self, record: PrivacyRecord) -> None:
        self._privacy = {
            "epsilon": max(record.epsilon, default=0.0),
            "delta": record.delta,
            "unit": record.unit,
        }
        for client, epsilon in zip(record.clients, record.epsilon, strict=True):
            self.row(client).epsilon = epsilon
        for client in record.stopped:
            row = self.row(client)
            row.state, row.note = "gone", "its privacy budget is spent"

    # --- the events

    def _take_event(self, line: bytes) -> None:
        try:
            event = from_json(line)
            name, at = str(event["event"]), float(event["time"])
            handle = getattr(self, f"_on_{name}", None)
            if handle is not None:
                handle(event, at)
        except (ValueError, KeyError, TypeError, AttributeError):
            return

    def _say(self, at: float, text: str, kind: str = "") -> None:
        self._line_number += 1
        self._lines.append((self._line_number, {"time": at, "text": text, "kind": kind}))

    def _on_begun(self, event: Mapping[str, Any], at: float) -> None:
        again = self._ending is not None or self._line_number > 0
        self._now, self._ending = _Now(), None
        self._calm()
        self._say(at, "The run goes on." if again else "The run begins.")

    def _on_stage(self, event: Mapping[str, Any], at: float) -> None:
        self._now.stage = event["text"]
        self._say(at, f"{event['text']}.")

    def _on_round(self, event: Mapping[str, Any], at: float) -> None:
        self._calm()
        self._now = _Now(round=event["round"], phase="train", started=at)
        self._say(at, f"Round {event['round']} of {event['rounds']}.")

    def _on_asked(self, event: Mapping[str, Any], at: float) -> None:
        self._now.phase = "train"
        if event["attempt"] == 0:
            self._now.asked = len(event["clients"])
        for client in event["clients"]:
            self._set(client, "asked", at, "" if event["attempt"] == 0 else "asked again")

    def _on_training(self, event: Mapping[str, Any], at: float) -> None:
        self._now.step = ()
        for client in event["clients"]:
            self._set(client, "training", at)

    def _on_step(self, event: Mapping[str, Any], at: float) -> None:
        self._now.step = (event["done"], event["total"], event["loss"])

    def _on_delivered(self, event: Mapping[str, Any], at: float) -> None:
        row = self.row(event["client"])
        if row.since is not None and row.state in ("asked", "training", "late"):
            self._now.took.append(at - row.since)
        if event["reason"]:
            self._set(event["client"], "rejected", at, event["reason"])
        else:
            self._set(event["client"], "delivered" if event["needed"] else "unneeded", at)
        self._now.delivered += 1

    def _on_withdrawn(self, event: Mapping[str, Any], at: float) -> None:
        self._set(event["client"], "rejected", at, event["reason"])

    def _on_phase(self, event: Mapping[str, Any], at: float) -> None:
        self._now.phase = event["phase"]

    def _on_scores(self, event: Mapping[str, Any], at: float) -> None:
        self._say(at, scores_line(event["scores"], event.get("metric", "score")), "scores")

    def _on_message(self, event: Mapping[str, Any], at: float) -> None:
        self._say(at, event["text"], "message")

    def _on_online(self, event: Mapping[str, Any], at: float) -> None:
        online = {index for name in event["clients"] if (index := client_index(name)) is not None}
        for client in {*self._clients, *online}:
            row = self.row(client)
            if client in online:
                row.contact = at
                if row.note == NOT_CONNECTED:
                    row.state, row.note = "idle", ""
            elif row.online and row.state != "gone":
                row.state, row.note, row.since = "gone", NOT_CONNECTED, at
            row.online = client in online if self._ending is None else None  # it looks no more after the delivery

    def _on_sent(self, event: Mapping[str, Any], at: float) -> None:
        client = client_index(event["client"])
        if client is not None and event["kind"] == "train":
            self._remote = True
            self._set(client, "training", at)

    def _on_answered(self, event: Mapping[str, Any], at: float) -> None:
        client = client_index(event["client"])
        if client is None:
            return
        row = self.row(client)
        row.contact = at
        if event["kind"] == "train" and row.state in ("asked", "training", "late"):
            if row.since is not None:
                self._now.took.append(at - row.since)
            self._set(client, "rejected" if event["failure"] else "delivered", at, event["failure"])
        if event["failure"]:
            self._say(at, f"{event['client']}: {event['failure']}", "message")

    def _on_ended(self, event: Mapping[str, Any], at: float) -> None:
        self._end(event, at, "The run is finished.")

    def _on_stopped(self, event: Mapping[str, Any], at: float) -> None:
        self._end(event, at, event.get("reason") or "The run was stopped.")

    def _on_interrupted(self, event: Mapping[str, Any], at: float) -> None:
        self._end(event, at, "The run was interrupted.")

    def _on_failed(self, event: Mapping[str, Any], at: float) -> None:
        self._end(event, at, f"The run failed: {event.get('reason', '')}")

    def _end(self, event: Mapping[str, Any], at: float, text: str) -> None:
        self._ending = event["event"], str(event.get("reason", ""))
        self._now.phase, self._now.stage, self._now.step = "", "", ()
        self._calm(only=("asked", "training", "late"))
        for client, row in self._clients.items():
            if row.online is not None:
                row = self.row(client)
                row.online = None
                if row.note == NOT_CONNECTED:
                    row.state, row.note = "idle", ""
        self._say(at, text, "failed" if event["event"] == "failed" else "")

    def _set(self, client: int, state: str, at: float, note: str = "") -> None:
        row = self.row(client)
        if row.state == "gone":
            return
        row.state, row.note, row.since = state, note, at
        if state in ("asked", "training"):
            self._busy.add(client)
        else:
            self._busy.discard(client)

    def _calm(self, only: tuple[str, ...] = ()) -> None:
        """Resets the clients' states after a round, except for those that have left for good."""
        for client, row in self._clients.items():
            if row.state not in ("gone", "idle") and (not only or row.state in only):
                changed = self.row(client)
                changed.state, changed.note, changed.since = "idle", "", None
        self._busy.clear()

    def _find_late(self) -> None:
        """Marks the clients that take far longer than half of those that have answered in this round."""
        if not self._remote or not self._busy or len(self._now.took) < 2 or self._now.phase != "train":
            return
        limit = max(1.0, _LATE_FACTOR * median(self._now.took))
        now = self._clock()
        for client in list(self._busy):
            row = self._clients[client]
            if row.state == "training" and row.since is not None and now - row.since > limit:
                late = self.row(client)
                late.state, late.note = "late", f"half of the others took {median(self._now.took):.1f} s or less"
                self._busy.discard(client)

    # --- what is shown

    def _show(self) -> None:
        for client in sorted(self._touched):
            self.board.put("clients", client, self._clients[client].to_json())
        self._touched.clear()
        for name in self._new_scores:
            self.board.put("scores", name, _by_round(self._scores[name]))
        self._new_scores.clear()
        for number in sorted(self._new_rounds):
            self.board.put("rounds", number, self._rounds[number])
        self._new_rounds.clear()
        for number, rejection in self._rejections:
            self.board.put("rejections", number, rejection)
        self.board.keep("rejections", SHOWN_REJECTIONS)
        for number, line in self._lines:
            self.board.put("log", number, line)
        self.board.keep("log", SHOWN_LINES)
        self.board.put("page", "facts", self._facts())
        self.board.put("page", "now", self._now.to_json())
        self.board.put("page", "totals", self.totals())

    def _show_standing(self) -> None:
        if self._clock() - self._asked_standing >= _STANDING_SECONDS or self._ending is not None:
            self._asked_standing = self._clock()
            how = self.standing()
            self.board.put("page", "standing", {"word": how.word, "reason": how.reason, "holder": how.holder})

    def standing(self) -> Standing:
        last = max(self._rounds, default=0)
        return standing(self.folder, self._ending, last, self.planned_rounds)

    def _facts(self) -> dict[str, Any]:
        return {
            "kind": "run",
            "folder": str(self.folder),
            "name": self.name,
            "method": self.method,
            "model": self.model,
            "data": self.data,
            "partition": self.partition_scheme,
            "clients": self.number_of_clients,
            "rounds": self.planned_rounds,
            "metric": metric_name(self._metrics),
            "seed": self.seed if self.config else None,
            "budgets": [
                {"name": str(each.get("name")), "active_experts": each.get("active_experts", 0)}
                for each in self.setting("federation", "budgets") or []
            ],
        }

    def totals(self) -> dict[str, Any]:
        """Returns sums over the complete rounds, the last of them, and the mean time of a round."""
        rounds = list(self._rounds.values())
        recent = [self._rounds[number]["seconds"] for number in sorted(self._rounds)[-_ROUNDS_AVERAGED:]]
        flops: float | None = 0.0
        memory: int | None = None
        for each in rounds:
            flops = _plus(flops, each["training_flops"])
            memory = _larger(memory, each["peak_memory_bytes"])
        return {
            "round": max(self._rounds, default=0),
            "seconds": sum(each["seconds"] for each in rounds),
            "round_seconds": fmean(recent) if recent else None,
            "upload_bytes": sum(each["upload_bytes"] for each in rounds),
            "download_bytes": sum(each["download_bytes"] for each in rounds),
            "training_flops": flops,
            "peak_memory_bytes": memory,
            "rejected": sum(each["rejected"] for each in rounds),
            "late": sum(each["late"] for each in rounds),
            "privacy": self._privacy,
        }


def _dealt(config: Mapping[str, Any]) -> list[str]:
    """Returns each client's budget as the config assigns them; empty if unknown."""
    from fedguild.config.federation import FederationSettings

    try:
        settings = FederationSettings.model_validate(config.get("federation") or {})
        return [tier.name for tier in settings.budget_per_client()]
    except ValueError:
        return []


def _by_round(points: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Returns (round, score) in the order of the rounds; the last score of a round that was scored twice."""
    latest: dict[int, Any] = {point[0]: point[1] for point in points}
    return [[number, latest[number]] for number in sorted(latest)]


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _plus(total: float | None, value: float | None) -> float | None:
    number = _finite(value)
    return None if total is None or number is None else total + number


def _larger(best: int | None, value: int | None) -> int | None:
    return value if best is None else best if value is None else max(best, value)
