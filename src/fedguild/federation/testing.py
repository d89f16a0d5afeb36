"""A federation in one process, without a network, in which a test controls the answers of some clients.

The server's loop, its checks and the honest clients' trainer are the ones of a real federation; only Flower is
replaced, by a transport that hands bytes over. This module is stable: tests outside this repository may use it.

    import math
    from dataclasses import replace

    from fedguild.testing import HostileClient, drive

    def endless(request, honest):
        answer = honest()
        return replace(answer, metadata={**answer.metadata, "steps": math.inf}) if request.kind == "train" else answer

    def test_a_hostile_client_stops_nothing(tmp_path):
        driven = drive("fedit/tiny-tasks", tmp_path, [HostileClient(2, endless)], overrides=["federation.clients=3"])
        assert driven.error is None
        assert "steps" in driven.rejected[1][2]

A `HostileClient` that never calls `honest` needs no trainer, so all answers can come from a script.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedguild.config import Config, load_config
from fedguild.core.errors import FedGuildError
from fedguild.core.files import write_text
from fedguild.core.layout import CHECKPOINTS, RUN, client_name
from fedguild.core.payload import Payload
from fedguild.core.progress import Silent
from fedguild.federation.flower.message import Message
from fedguild.federation.flower.transport import Node, NoReply, too_large
from fedguild.federation.keys import write_key
from fedguild.federation.serving import serve
from fedguild.federation.site import ServerSettings, SiteSettings
from fedguild.federation.trainer_service import TrainerService
from fedguild.measuring.log.records import Record, RoundRecord, RunLog
from fedguild.model.backbone import Backbone
from fedguild.runs.setup import load_model
from fedguild.server import checkpoint

__all__ = ["Driven", "HostileClient", "LoopbackTransport", "Message", "drive"]

Answer = Callable[[Message, Callable[[], Message]], Message | bytes | None]
"""A client's answer to a request: a message; its bytes, which need not be a message (`Message.to_bytes`); or None for
no answer. The second argument computes what an honest client would answer."""
_FIRST_NODE = 100


@dataclass(frozen=True)
class HostileClient:
    """A registered client with arbitrary answers.

    Attributes:
        client: Its index in the federation, for which its key is registered.
        answer: Returns its answer to a request.
        nodes: How many connections it opens with its key; each is asked who it is.
    """

    client: int
    answer: Answer
    nodes: int = 1


@dataclass(frozen=True)
class Driven:
    """The outcome of a federation.

    Attributes:
        folder: The run's folder.
        error: What ended the run before its last round; None if it was completed.
        state: The method's state after the last complete round; None if there is none.
        records: The run's records.
        lines: The lines that the operator saw.
    """

    folder: Path
    error: Exception | None
    state: Payload | None
    records: list[Record]
    lines: list[str]

    @property
    def rounds(self) -> list[RoundRecord]:
        return [record for record in self.records if isinstance(record, RoundRecord)]

    @property
    def rejected(self) -> dict[int, dict[int, str]]:
        """Round -> client index -> the reason why its upload was not aggregated."""
        return {record.round: {each.client: each.reason for each in record.rejected} for record in self.rounds}

    @property
    def accepted(self) -> dict[int, list[int]]:
        """Round -> indices of the clients whose upload was aggregated."""
        return {
            record.round: [
                client
                for client in record.participants
                if client not in self.rejected[record.round] and client not in record.unneeded
            ]
            for record in self.rounds
        }


@dataclass
class _LoopbackNode:
    id: int
    name: str
    handle: Callable[[Message], Message | bytes | None]
    inbox: deque[tuple[str, bytes]] = field(default_factory=deque)


class LoopbackTransport:
    """A transport to clients in this process (`fedguild.federation.flower.transport.Transport`).

    Every message is written to bytes and read again. Each poll for any reply lets every node handle one message.
    """

    def __init__(self) -> None:
        self._nodes: dict[int, _LoopbackNode] = {}
        self._replies: dict[str, Message | bytes] = {}
        self._sent = 0

    def add(self, name: str, handle: Callable[[Message], Message | bytes | None]) -> int:
        """Connects a node.

        Args:
            name: The name that its key is registered under.
            handle: Returns its reply to a message.

        Returns:
            The node's id.
        """
        node = _LoopbackNode(_FIRST_NODE + len(self._nodes), name, handle)
        self._nodes[node.id] = node
        return node.id

    def nodes(self) -> list[Node]:
        return [Node(node.id, node.name) for node in self._nodes.values()]

    def send(self, node: int, message: Message, *, ttl_seconds: float) -> str:
        self._sent += 1
        self._nodes[node].inbox.append((str(self._sent), message.to_bytes()))
        return str(self._sent)

    def poll(self, message_id: str, limit_bytes: int | None = None) -> Message | NoReply | None:
        for node in self._nodes.values():
            if node.inbox:
                id, request = node.inbox.popleft()
                answer = node.handle(Message.from_bytes(request))
                if answer is not None:
                    self._replies[id] = answer
        answer = self._replies.pop(message_id, None)
        return None if answer is None else _received(answer, limit_bytes)


class _Lines(Silent):
    def __init__(self) -> None:
        self.lines: list[str] = []

    def message(self, text: str) -> None:
        self.lines.append(text)


def drive(
    config: str | Config,
    folder: Path,
    hostile: Sequence[HostileClient] = (),
    *,
    overrides: Sequence[str] = (),
    **server: Any,
) -> Driven:
    """Runs a federation to its end, or resumes the one in the folder.

    Args:
        config: The run: a config, a preset or a YAML file.
        folder: The server's folder; the clients' folders are in it.
        hostile: The clients that are not honest.
        overrides: Settings of the config to change, `key=value`.
        server: Settings of `server.yaml` to change. By default clients score their own models and deliver nothing.

    Returns:
        The outcome; an exception of the server's loop is in `error`, not raised.
    """
    config = load_config(config, overrides) if isinstance(config, str) else config
    transport, loaded = LoopbackTransport(), dict[str, Backbone]()

    def load(config: Config) -> Backbone:
        key = config.model.model_dump_json()
        if key not in loaded:
            loaded[key] = load_model(config)
        return loaded[key]

    if config.federation.secure:
        _write_keys(folder, config.federation.clients)
    by_index = {each.client: each for each in hostile}
    for index in range(config.federation.clients):
        trainer = TrainerService(_site(config, index), folder / client_name(index), load=load)
        name, each = client_name(index), by_index.get(index)
        for _ in range(1 if each is None else each.nodes):
            transport.add(name, trainer.handle if each is None else _answering(each, trainer))
    write_text(folder / "run.yaml", config.resolved_yaml())
    settings = ServerSettings.model_validate(
        {"wait_seconds": 60, "grace_seconds": 0, "reconnect_seconds": 0, "deliver": False, **server}
    )
    lines, error = _Lines(), None
    try:
        serve(transport, settings, folder, progress=lines, poll_seconds=0.0)
    except Exception as raised:
        error = raised
    return _driven(config, folder / settings.state / RUN, error, lines.lines)


def _write_keys(folder: Path, clients: int) -> None:
    """Writes every client's key, and the public ones to the server and to each other client."""
    names = [client_name(index) for index in range(clients)]
    new = [name for name in names if not (folder / name / "node.key").exists()]
    public = {name: write_key(folder / name / "node.key").read_text() for name in new}
    for name, text in public.items():
        for holder in (folder / "nodes", *(folder / other / "peers" for other in names)):
            write_text(holder / f"{name}.pub", text)


def _driven(config: Config, run: Path, error: Exception | None, lines: list[str]) -> Driven:
    last, state = checkpoint.latest(run / CHECKPOINTS), None
    if last is not None:
        state = checkpoint.load(run / CHECKPOINTS, last, fingerprint=config.fingerprint()).state
    return Driven(run, error, state, RunLog(run).read(), lines)


def _answering(hostile: HostileClient, trainer: TrainerService) -> Callable[[Message], Message | bytes | None]:
    return lambda request: hostile.answer(request, lambda: trainer.handle(request))


def _received(answer: Message | bytes, limit_bytes: int | None) -> Message | NoReply:
    """Returns an answer as the server receives it."""
    content = answer if isinstance(answer, bytes) else answer.to_bytes()
    if limit_bytes is not None and len(content) > limit_bytes:
        return too_large(limit_bytes)
    try:
        return Message.from_bytes(content)
    except FedGuildError as error:
        return NoReply(error.message)


def _site(config: Config, client: int) -> SiteSettings:
    """Returns the settings of a client's site, which has its share of the run's data."""
    data: Mapping[str, Any] = {
        **config.data.model_dump(exclude={"max_length"}),
        "seed": config.seed,
        "shares": config.federation.clients,
        "share": client,
    }
    return SiteSettings.model_validate(
        {
            "client": client,
            "server": "127.0.0.1:1",
            "model": config.model.model_dump(),
            "data": data,
            "accept": {"min_scored": 1},
        }
    )
