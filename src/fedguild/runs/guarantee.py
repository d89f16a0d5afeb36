"""The differential privacy of a run, from its config: checks before anything is loaded, and its parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.privacy_rules import PrivacyRules
from fedguild.config import Config
from fedguild.core.errors import ConfigError
from fedguild.engines.cohorts import Private
from fedguild.engines.private import PrivateAnswers
from fedguild.model.info import ModelInfo
from fedguild.model.plan import adapter_shapes
from fedguild.privacy.dp.ledger import FILE as LEDGER
from fedguild.privacy.dp.ledger import Ledger
from fedguild.privacy.dp.noise import Noise
from fedguild.privacy.dp.secret import run_secret
from fedguild.runs.privacy_accounts import PrivacyAccounts
from fedguild.server.method import Method, is_client_mean, takes_means
from fedguild.server.private_mean import PrivateMean


def rules_of(config: Config) -> PrivacyRules | None:
    federation = config.federation
    if config.privacy.unit == "none":
        return None
    wanted = federation.wanted_uploads
    return PrivacyRules(config.privacy, config.training, federation.rounds, federation.clients, wanted)


def check_privacy(method: Method, config: Config) -> None:
    """Checks that a run can keep what its differential privacy promises, on any model.

    Raises:
        ConfigError: something would leave a client that the accounting does not cover, or the settings do not fit each
            other.
    """
    privacy, federation, evaluation = config.privacy, config.federation, config.evaluation
    if privacy.unit == "none":
        return
    if refusal := method.privacy_refusal(privacy.unit):
        raise ConfigError(
            f"privacy.unit is {privacy.unit}, but {method.name} {refusal}.",
            "Choose another method (docs/guides/privacy.md lists them), or set privacy.unit=none.",
        )
    asked = [name for name in ("clients", "trained", "received", "pooled") if getattr(evaluation, name)]
    if asked and "scores" not in privacy.public:
        raise ConfigError(
            f"evaluation.{asked[0]} asks for scores of the clients' own models, which no privacy noise covers.",
            f"Set evaluation.{asked[0]}=false, or declare them: privacy.public=[scores].",
        )
    if not method.facts.has_global_model:
        require_public_scores(config)
    if privacy.is_central and federation.secure:
        raise ConfigError(
            "privacy.trust_model is central, but with federation.secure the server has no single upload to clip.",
            "Set privacy.trust_model=local: each client adds its noise before its upload is masked.",
        )
    if privacy.sampling == "secret" and (federation.over_selection or federation.engine.name == "flower"):
        raise ConfigError(
            "privacy.sampling is secret, but real clients know the seed that draws them, or over-selection draws more.",
            "Set privacy.sampling=public, or federation.over_selection=0 in a simulation.",
        )
    if (rules := rules_of(config)) is not None:
        rules.check()
        if config.federation.engine.name == "flower" and not rules.fixes_steps:
            raise ConfigError(
                "training.epochs makes a client's steps follow from its number of examples, which privacy.public does "
                "not name: what sites refuse would tell it.",
                "Set training.steps, or declare the sizes: privacy.public=[sizes].",
            )


def require_public_scores(config: Config) -> None:
    """Raises ConfigError unless the privacy settings declare the scores of the clients' own models public."""
    if config.privacy.unit != "none" and "scores" not in config.privacy.public:
        raise ConfigError(
            "There is no global model to score here, and scores of the clients' own models are not public.",
            "Declare them, privacy.public=[scores], or let a server with its own examples score (server_evaluation).",
        )


def check_central(method: Method, config: Config, model: ModelInfo, budgets: Sequence[Budget]) -> None:
    """Raises ConfigError if the server's noise on a mean does not cover everything in the uploads."""
    federation = config.federation
    unequal = len({tuple(adapter_shapes(model, method.plan(model, budget)).items()) for budget in budgets}) > 1
    if unequal or not is_client_mean(method, model, budgets):
        reason = "is over adapters of unequal shapes" if unequal and takes_means(method) else "is no mean"
        raise ConfigError(
            f"privacy.trust_model is central, but the aggregate of {method.name} {reason}.",
            "Set privacy.trust_model=local, or give all budgets the same adapter.",
        )
    names, off = ("max_update_norm", "aggregator", "norm_factor"), (None, "none", "auto")
    compared = [name for name in names if getattr(federation, name) not in off]
    if compared:
        raise ConfigError(
            f"privacy.trust_model is central, but federation.{compared[0]} looks at uploads before they have noise.",
            f"Leave federation.{compared[0]} at its default: clipping bounds every upload.",
        )


@dataclass(frozen=True)
class Privacy:
    """The differential privacy of a run, on the machine that computes it.

    Attributes:
        accounts: What the clients have spent.
        noise: The source of this machine's noise.
        examples: Client -> its number of training examples, if the guarantee depends on it.
        is_simulation: Whether the clients are simulated, and the noise follows from the run's seed.
    """

    rules: PrivacyRules
    accounts: PrivacyAccounts
    noise: Noise
    examples: Callable[[int], int]
    is_simulation: bool

    def of_round(self, client: ClientInfo, round_index: int) -> Noise:
        return self.noise.child("client", client.index, "round", round_index)

    def dp_sgd(self) -> Private | None:
        """Returns the function from a client and a round to its DP-SGD; None unless the unit is an example."""
        if not self.rules.per_example:
            return None
        return lambda client, number: self.rules.dp_sgd(self.examples(client.index), self.of_round(client, number))

    def answers(self) -> PrivateAnswers:
        return PrivateAnswers(self.rules, lambda task: self.of_round(task.client, task.round), self.examples)

    def mean(self) -> PrivateMean | None:
        """Returns the server's mechanism; None if clients add the noise."""
        if not self.rules.settings.is_central:
            return None
        return PrivateMean(self.rules.settings.clip, self.rules.noise_multiplier(0), self.noise.child("server"))

    def guarantee(self) -> list[str]:
        """Returns what is protected, from whom and under which assumptions, in sentences."""
        source = (
            "Noise: from the run's seed, as this is a simulation. Whoever knows the config can take it away again. "
            "A repeated round counts once, as it repeats its bits: on the same device, engine and cohort size."
            if self.is_simulation
            else "Noise: from secrets that do not leave the machines that draw it."
        )
        settings = self.rules.settings
        budget = "no budget" if settings.budget is None else f"a client stops before its ε exceeds {settings.budget:g}"
        return [*self.rules.statement(), source, f"Budget: {budget}; δ = {settings.delta:g}."]


def privacy_of(config: Config, folder: Path, examples: Callable[[int], int], *, real: bool) -> Privacy | None:
    """Returns the differential privacy of a run, with its ledger; None without.

    Args:
        examples: Returns a client's number of training examples.
        real: Whether the clients train on their own machines.
    """
    rules = rules_of(config)
    if rules is None:
        return None
    if real:
        noise, attempt = Noise(run_secret(folder)), lambda: f"-{uuid4().hex}"
    else:
        noise, attempt = Noise.of_seed(config.seed).child("privacy"), str
    accounts = PrivacyAccounts(rules, Ledger(folder / LEDGER), examples, attempt)
    return Privacy(rules, accounts, noise, examples, is_simulation=not real)
