"""The clients' privacy accounts, kept by the party that releases: what each has spent, and who may continue."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from fedguild.client.budget import ClientInfo
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.measuring.log.records import PrivacyRecord
from fedguild.privacy.dp.accounting import Release, epsilon
from fedguild.privacy.dp.ledger import Ledger

SLACK = 1e-9
"""What rounding may add to a budget."""


@dataclass(frozen=True)
class PrivacyAccounts:
    """The accounts of a run.

    Attributes:
        ledger: What was released.
        examples: Returns a client's number of training examples, if the guarantee depends on it.
        attempt: Returns what distinguishes an execution of a round from all others; empty if a repeated round releases
            the same bits.
    """

    rules: PrivacyRules
    ledger: Ledger
    examples: Callable[[int], int]
    attempt: Callable[[], str] = str

    def epsilon(self, client: ClientInfo, round_index: int) -> float:
        return epsilon(self._releases(client, round_index), self.rules.settings.delta)

    def affords(self, client: ClientInfo, round_index: int) -> bool:
        """Whether a client's budget allows a round, after those before it."""
        budget = self.rules.settings.budget
        if budget is None:
            return True
        releases = [*self._releases(client, round_index - 1), self.release(client)]
        return epsilon(releases, self.rules.settings.delta) <= budget * (1 + SLACK)

    def release(self, client: ClientInfo) -> Release:
        return self.rules.release(self.examples(client.index))

    def charge(self, round_index: int, asked: Iterable[ClientInfo], clients: Iterable[ClientInfo]) -> None:
        """Enters a round before it begins.

        Args:
            asked: The clients that it asks.
            clients: All that could take part; they all pay if nobody knows who was asked.
        """
        key = f"{round_index}{self.attempt()}"
        for client in clients if self.rules.settings.sampling == "secret" else asked:
            self.ledger.add(client.name, key, self.release(client))

    def again(self, round_index: int, clients: Sequence[ClientInfo]) -> list[ClientInfo]:
        """Returns the clients that may be asked once more in a round, after entering the further attempt.

        It costs nothing if the clients repeat the same bits, or if the server adds the noise, once for all attempts.

        Args:
            clients: The clients that the round asked, and whose uploads are missing.
        """
        if not self.attempt() or self.rules.settings.is_central:
            return list(clients)
        able = [client for client in clients if self.affords(client, round_index + 1)]
        self.charge(round_index, able, able)
        return able

    def record(self, round_index: int, clients: Sequence[ClientInfo]) -> PrivacyRecord:
        settings = self.rules.settings
        return PrivacyRecord(
            round=round_index,
            unit=settings.unit,
            delta=settings.delta,
            clients=[client.index for client in clients],
            epsilon=[self.epsilon(client, round_index) for client in clients],
            noise_multiplier=[self.rules.noise_multiplier(self.examples(client.index)) for client in clients],
            stopped=[client.index for client in clients if not self.affords(client, round_index + 1)],
        )

    def _releases(self, client: ClientInfo, round_index: int) -> list[Release]:
        """Returns the releases about a client.

        If a repeated round releases the same bits, releases of later rounds, which a run that went back has yet to
        repeat, do not count yet.
        """
        entries = self.ledger.releases(client.name)
        if self.attempt():
            return list(entries.values())
        return [release for key, release in entries.items() if int(key) <= round_index]
