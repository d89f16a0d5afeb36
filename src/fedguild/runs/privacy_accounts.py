"""The clients' privacy accounts as the party that releases keeps them: what each has spent, and who may go on."""

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
        rules: The run's rules.
        ledger: What was released.
        examples: Returns a client's number of training examples, where the guarantee depends on it.
        attempt: Returns what distinguishes an execution of a round from all others; empty where a repeated round
            releases the same bits.
    """

    rules: PrivacyRules
    ledger: Ledger
    examples: Callable[[int], int]
    attempt: Callable[[], str] = str

    def epsilon(self, client: ClientInfo, round_index: int) -> float:
        """Returns what a client has spent after a round."""
        return epsilon(self._releases(client, round_index), self.rules.settings.delta)

    def affords(self, client: ClientInfo, round_index: int) -> bool:
        """Whether a client's budget reaches for a round, after those before it."""
        budget = self.rules.settings.budget
        if budget is None:
            return True
        releases = [*self._releases(client, round_index - 1), self.release(client)]
        return epsilon(releases, self.rules.settings.delta) <= budget * (1 + SLACK)

    def release(self, client: ClientInfo) -> Release:
        """Returns what a round releases about a client."""
        return self.rules.release(self.examples(client.index))

    def charge(self, round_index: int, asked: Iterable[ClientInfo], clients: Iterable[ClientInfo]) -> None:
        """Enters a round before it begins.

        Args:
            round_index: The round.
            asked: The clients that it asks.
            clients: All that could take part, who all pay where nobody knows who was asked.
        """
        key = f"{round_index}{self.attempt()}"
        for client in clients if self.rules.settings.sampling == "secret" else asked:
            self.ledger.add(client.name, key, self.release(client))

    def again(self, round_index: int, clients: Sequence[ClientInfo]) -> list[ClientInfo]:
        """Returns the clients that may be asked once more in a round, after entering the further attempt.

        It costs nothing where the clients repeat the same bits, or the server adds the noise, once for all attempts.

        Args:
            round_index: The round.
            clients: Whom the round asked, and whose uploads it lacks.
        """
        if not self.attempt() or self.rules.settings.is_central:
            return list(clients)
        able = [client for client in clients if self.affords(client, round_index + 1)]
        self.charge(round_index, able, able)
        return able

    def record(self, round_index: int, clients: Sequence[ClientInfo]) -> PrivacyRecord:
        """Returns the record of what every client has spent after a round."""
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
        """Returns what was released about a client.

        Where a repeated round releases the same bits, those of later rounds, to which a run that went back has yet to
        come again, do not count yet.
        """
        entries = self.ledger.releases(client.name)
        if self.attempt():
            return list(entries.values())
        return [release for key, release in entries.items() if int(key) <= round_index]
