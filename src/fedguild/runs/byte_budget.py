"""The limit on the bytes of a whole run: the maximal bytes of a round are known before it begins, from shapes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from fedguild.client.budget import ClientInfo
from fedguild.config import Config
from fedguild.core.accounting import count_traffic
from fedguild.core.codec import Codec
from fedguild.core.errors import ConfigError
from fedguild.core.payload import Payload
from fedguild.measuring.log.records import Record, TrafficRecord
from fedguild.model.info import ModelInfo
from fedguild.server.method import Method
from fedguild.server.optimizer import own_state
from fedguild.server.sampling import sample


@dataclass
class ByteBudget:
    """The bytes that a run may still transfer, both ways, counted as in `ClientRecord`.

    Attributes:
        limit_bytes: `federation.byte_limit`.
        spent_bytes: What the rounds so far have transferred, late and repeated uploads included.
        planned: Client index -> most bytes of one attempt of the current round.
    """

    limit_bytes: int
    spent_bytes: int = 0
    planned: dict[int, int] = field(default_factory=dict)
    _granted_bytes: int = 0

    @classmethod
    def after(cls, limit_bytes: int, records: Iterable[Record]) -> ByteBudget:
        """Returns the budget after the rounds of a log."""
        seen = [record for record in records if isinstance(record, TrafficRecord)]
        return cls(limit_bytes, seen[-1].total_bytes if seen else 0)

    def plan(self, method: Method, state: Payload, model: ModelInfo, asked: Sequence[ClientInfo], codec: Codec) -> None:
        """Counts the bytes of a round if every client that it asks delivers all that it may send.

        Args:
            state: The method's state before the round, without the server's momentum.
        """
        self.planned = {client.index: _attempt_bytes(method, state, model, client, codec) for client in asked}
        self._granted_bytes = self.round_bytes

    @property
    def round_bytes(self) -> int:
        return sum(self.planned.values())

    def refusal(self, round_index: int) -> str:
        """Returns why the planned round may not begin; empty if it may."""
        if self.spent_bytes + self.round_bytes <= self.limit_bytes:
            return ""
        return (
            f"round {round_index} could move {self.round_bytes:,} bytes, but of the limit of {self.limit_bytes:,} "
            f"(federation.byte_limit) {self.limit_bytes - self.spent_bytes:,} are left"
        )

    def again(self, clients: Sequence[ClientInfo]) -> list[ClientInfo]:
        """Returns the clients, in order, that may be asked once more in the round within the limit."""
        able = []
        for client in clients:
            cost = self.planned.get(client.index, 0)
            if self.spent_bytes + self._granted_bytes + cost <= self.limit_bytes:
                self._granted_bytes += cost
                able.append(client)
        return able

    def record(self, round_index: int, moved_bytes: int) -> TrafficRecord:
        """Counts a complete round and returns its record."""
        self.spent_bytes += moved_bytes
        return TrafficRecord(
            round=round_index,
            planned_bytes=self.round_bytes,
            round_bytes=moved_bytes,
            total_bytes=self.spent_bytes,
            limit_bytes=self.limit_bytes,
        )


def first_refusal(
    method: Method, config: Config, state: Payload, model: ModelInfo, clients: Sequence[ClientInfo]
) -> ConfigError | None:
    """Returns the error of a limit on a run's bytes below its first round; None if that may begin.

    Args:
        state: The method's state before that round; shapes are enough.
    """
    rules = config.federation
    if rules.byte_limit is None:
        return None
    budget = ByteBudget(rules.byte_limit)
    asked = sample(1, clients, rules.client_fraction, config.seed, over_selection=rules.over_selection)
    budget.plan(method, own_state(state), model, asked, rules.wire_dtype)
    refusal = budget.refusal(1)
    hint = "Raise federation.byte_limit, lower method.rank or federation.client_fraction, or set "
    return ConfigError(f"The run cannot begin: {refusal}.", f"{hint}federation.wire_dtype=bf16.") if refusal else None


def _attempt_bytes(method: Method, state: Payload, model: ModelInfo, client: ClientInfo, codec: Codec) -> int:
    """Returns the bytes of a client's download and of the largest possible upload."""
    download = method.download(state, model, client)
    upload = method.schema(model, client, download).example()
    traffic = count_traffic(0, client.index, download, upload, codec)
    return traffic.download_bytes + traffic.upload_bytes
