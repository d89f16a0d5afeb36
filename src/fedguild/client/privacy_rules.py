"""The rules of a run's differential privacy: what a round releases about a client, and with how much noise."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from fedguild.client.budget import ClientInfo
from fedguild.client.schedule import steps_in_round
from fedguild.config.privacy import PrivacySettings
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError
from fedguild.privacy.dp.accounting import Release, epsilon, noise_for, require_library
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise

WITHHELD_EXAMPLES = 1
"""What a client whose sizes are withheld says of its number of examples; all weigh the same then."""


@dataclass(frozen=True)
class PrivacyRules:
    """What every client's guarantee follows from; the same on the server and on the clients.

    Attributes:
        settings: The run's privacy settings, with a unit other than none.
        wanted: Uploads that a round wants.
    """

    settings: PrivacySettings
    training: TrainingSettings
    rounds: int
    clients: int
    wanted: int

    def check(self) -> None:
        """Checks the settings against each other, and that the privacy library is installed.

        Raises:
            ConfigError: they do not fit each other, no noise reaches the target epsilon, or one round would cost more
                than the whole budget.
        """
        require_library()
        self._check_sizes()
        if self.by_size:
            return  # how much noise and privacy a round takes follows from the clients' data
        budget, first = self.settings.max_epsilon, epsilon([self.release(0)], self.settings.delta)
        if budget is not None and first > budget:
            raise ConfigError(
                f"privacy.max_epsilon is {budget:g}, but one round costs an epsilon of {first:.3g} at delta "
                f"{self.settings.delta:g}.",
                "Raise privacy.noise_multiplier, or privacy.max_epsilon.",
            )

    def _check_sizes(self) -> None:
        """Raises ConfigError if what follows from a client's number of examples is not public."""
        if self.settings.unit != "example" or self.sizes_are_public:
            return
        if self.settings.sample_rate is None:
            raise ConfigError(
                "With privacy.unit example, the probability with which an example enters a step follows from a "
                "client's number of examples, which is not public.",
                "Declare it, privacy.public=[sizes], or set privacy.sample_rate.",
            )
        if self.training.steps is None:
            raise ConfigError(
                "training.epochs makes the number of DP-SGD's steps follow from a client's number of examples, which "
                "is not public.",
                "Set training.steps, or declare the sizes: privacy.public=[sizes].",
            )

    @property
    def per_example(self) -> bool:
        return self.settings.unit == "example"

    @property
    def sizes_are_public(self) -> bool:
        """Whether the clients' numbers of examples may leave them."""
        return "sizes" in self.settings.public

    @property
    def fixes_steps(self) -> bool:
        """Whether the steps of a round tell nothing of a size that is withheld, in refusals as elsewhere."""
        return self.sizes_are_public or self.training.steps is not None

    @property
    def by_size(self) -> bool:
        """Whether the guarantee of a client depends on its number of examples."""
        return self.per_example and self.sizes_are_public

    def said_examples(self, examples: int) -> int:
        """Returns the number of training examples that a client reports."""
        return examples if self.sizes_are_public else min(examples, WITHHELD_EXAMPLES)

    def said_steps(self, examples: int) -> int | None:
        """Returns a round's optimizer steps if they follow from what is public, else None."""
        if self.training.steps is None and not self.sizes_are_public:
            return None
        return self.steps(examples)

    def release(self, examples: int, rounds: int = 1) -> Release:
        """Returns what some rounds release about a client with this number of training examples."""
        return self._release(self._sigma(examples), examples, rounds)

    def noise_multiplier(self, examples: int) -> float:
        """Returns sigma, the noise's standard deviation over the clip norm, for a client with this number of examples.

        With a target epsilon it is solved for a client that takes part in every round.

        Raises:
            ConfigError: no noise reaches the target.
        """
        return self._sigma(examples if self.by_size else 0)

    def dp_sgd(self, examples: int, noise: Noise) -> DpSgd:
        probability = self.probability(examples)
        divisor = self._batch if self.settings.sample_rate is not None else probability * examples
        sigma = self.noise_multiplier(examples)
        return DpSgd(self.settings.clip, sigma, probability, self.steps(examples), divisor, noise)

    def probability(self, examples: int) -> float:
        """Returns q, the probability with which an example enters a step."""
        if self.settings.sample_rate is not None:
            return self.settings.sample_rate
        return min(1.0, self._batch / max(1, examples))

    def steps(self, examples: int) -> int:
        return steps_in_round(max(1, examples), self.training)

    def statement(self) -> list[str]:
        """Returns the guarantee and its assumptions, in sentences for the report and the terminal."""
        settings = self.settings
        if self.per_example:
            neighbour = (
                "replaced by one that contributes nothing, their number fixed and public; replaced by any other "
                "is two such changes"
                if self.sizes_are_public
                else "added to those that it trains on, or removed from them"
            )
            lines = [
                f"One training example of a client is protected ({neighbour}), by DP-SGD in the client's training.",
                "Sampling: every example enters a step independently with the same probability (Poisson), drawn in "
                "secret by the client.",
            ]
        elif settings.trust_model == "local":
            neighbour = "any other of the same size, which is public" if self.sizes_are_public else "any other"
            lines = [
                f"All of a client's training data is protected (replaced by {neighbour}), by noise that the client "
                "adds to its clipped change.",
                "Sampling: none is assumed; a client pays for every round that it takes part in.",
            ]
        else:
            lines = [
                "All of a client's training data is protected from those who see the models (its contribution there or "
                "all zeros), by noise that the server adds to the clipped changes. The server itself is trusted with "
                "them."
            ]
            lines.append(
                f"Sampling: nobody who sees the models knows which {self.wanted} of {self.clients} clients take part "
                "in a round; all pay for every round (one client replaced by another). The run's folder and "
                "report, which name them, and its config, whose seed draws them, must stay with the trusted party."
                if settings.sampling == "secret"
                else "Sampling: everybody may know who takes part; a client pays for every round that it is asked in."
            )
        public = " and ".join(
            {"sizes": "the clients' numbers of examples", "scores": "the scores of their own models"}[name]
            for name in settings.public
        )
        lines.append(f"Public, without noise: {public or 'nothing that a client computes from its training data'}.")
        lines.append(
            "Withheld: losses, tokens, times, memory and expert activations of the training"
            f"{'' if self.sizes_are_public else ', and the numbers of examples'}."
        )
        lines.append("Not covered: held-out examples, which scores are computed on.")
        return lines

    @cached_property
    def _batch(self) -> int:
        return self.training.batch_size * self.training.gradient_accumulation_steps

    def _sigma(self, examples: int) -> float:
        settings = self.settings
        if settings.noise_multiplier is not None:
            return settings.noise_multiplier
        return _solved(self, examples if self.by_size else 0)

    def _release(self, sigma: float, examples: int, rounds: int) -> Release:
        """Returns the release of some rounds; changing both neighbours' contributions doubles the sensitivity."""
        if self.per_example:
            return Release(sigma, rounds * self.steps(examples), self.probability(examples))
        if self.settings.trust_model == "local":
            return Release(sigma / 2, rounds)
        if self.settings.sampling == "secret":
            return Release(sigma / 2, rounds, drawn=self.wanted, drawn_from=self.clients)
        return Release(sigma, rounds)


@lru_cache(maxsize=1024)
def _solved(rules: PrivacyRules, examples: int) -> float:
    """Returns the noise multiplier at which taking part in every round costs the target epsilon."""
    target = rules.settings.target_epsilon
    assert target is not None
    return noise_for(target, rules.settings.delta, lambda noise: rules._release(noise, examples, rules.rounds))


def said(rules: PrivacyRules | None, client: ClientInfo) -> int | None:
    """Returns the number of examples of a client for the records; None where it is withheld."""
    return client.examples if rules is None or rules.sizes_are_public else None
