"""The limits that a site sets for the server, checked before anything is trained, scored, written or sent."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from fedguild.client.privacy_rules import PrivacyRules
from fedguild.core.errors import FedGuildError
from fedguild.core.files import write_json
from fedguild.federation.exposure import Exposure
from fedguild.federation.flower.message import Message
from fedguild.federation.site import AcceptSettings
from fedguild.privacy.dp.accounting import Release, epsilon

_DIGEST_CHARACTERS = 32


WITHHELD_NUMBER = "a withheld number of"


@dataclass(frozen=True)
class Terms:
    """What a run asks of a site in every round.

    Attributes:
        method: Name of its method.
        steps: Optimizer steps of a round on this site.
        batch: Examples of an optimizer step, over all accumulated batches.
        examples: Distinct examples of this site that a round trains on.
        aggregated: Minimum number of clients whose uploads the run aggregates.
        withheld: Whether a refusal must not reveal `examples`, because differential privacy withholds the site's size.
    """

    method: str
    steps: int
    batch: int
    examples: int
    aggregated: int
    withheld: bool = False


class SitePolicy(AcceptSettings):
    """A site's limits, the settings of `accept:` in its `site.yaml`, and the refusals that follow from them."""

    def kind_refusal(self, kind: str) -> str:
        """Returns why a kind of request is refused; empty if it is not."""
        if kind in self.requests:
            return ""
        return f"'{kind}' is not among accept.requests ({', '.join(self.requests) or 'none'})"

    def clients_refusal(self, clients: int) -> str:
        """Returns why a run is refused for its number of clients, before anything is computed for it; empty if not."""
        if self.max_clients is not None and clients > self.max_clients:
            return f"the run is of {clients} clients, beyond accept.max_clients of {self.max_clients}"
        return ""

    def begin_refusal(self, begun: int) -> str:
        """Returns why another run may not begin; empty if it may.

        Args:
            begun: How many began within a day.
        """
        if self.runs_per_day is not None and begun >= self.runs_per_day:
            return f"{begun} runs began within a day, and accept.runs_per_day is {self.runs_per_day}"
        return ""

    def round_refusal(self, round: int, rounds: int) -> str:
        """Returns why a request is refused whose round is not in its run; empty if it is.

        Args:
            round: The round, 0 before the first.
            rounds: The run's `federation.rounds`, to which it is bound.
        """
        return "" if 0 <= round <= rounds else f"round {round} is asked for, but the run has {rounds} round(s)"

    def most_in_run(self, kind: str) -> tuple[str, int | None]:
        """Returns the setting that limits the different requests of a kind in a run, and its value."""
        if kind == "deliver":
            return "deliveries_per_run", self.deliveries_per_run
        return "requests_per_run", self.requests_per_run

    def most_in_round(self, kind: str, *, secure: bool) -> int | None:
        """Returns the maximum number of different requests of a kind in a round; one training where uploads are summed.

        Two trainings of a round whose downloads differ by next to nothing give next to the same upload, and two sums
        of it over different clients their difference.
        """
        return 1 if secure and kind == "train" and not self.repeat_sessions else self.requests_per_round

    def run_refusal(self, terms: Terms) -> str:
        """Returns why a run is refused; empty if it is not."""
        if self.methods is not None and terms.method not in self.methods:
            return f"the method '{terms.method}' is not among accept.methods ({', '.join(self.methods) or 'none'})"
        if self.max_steps is not None and terms.steps > self.max_steps:
            return f"a round asks for {terms.steps} steps, beyond accept.max_steps of {self.max_steps}"
        if terms.steps < self.min_steps:
            return f"a round asks for {terms.steps} step(s), below accept.min_steps of {self.min_steps}"
        if terms.batch < self.min_batch:
            return f"a step is on {terms.batch} example(s), below accept.min_batch of {self.min_batch}"
        if terms.examples < self.min_examples:
            number = WITHHELD_NUMBER if terms.withheld else str(terms.examples)
            return f"a round trains on {number} example(s), below accept.min_examples of {self.min_examples}"
        if terms.aggregated < self.min_clients:
            return (
                f"the run may aggregate the uploads of only {terms.aggregated} client(s), below accept.min_clients of "
                f"{self.min_clients}"
            )
        return ""

    def exposure_refusal(self, found: Exposure, *, freezes: bool = False, dropout: float = 0.0, length: int = 0) -> str:
        """Returns why a run is refused for what its settings leave in an upload; empty if it is not.

        Args:
            freezes: Whether a factor of LoRA is frozen.
            dropout: The method's dropout.
            length: To how many tokens texts are cut; 0 for not at all.
        """
        if self.optimizers is not None and found.optimizer not in self.optimizers:
            return (
                f"the optimizer is {found.optimizer}, and accept.optimizers are {', '.join(self.optimizers) or 'none'}"
            )
        if self.max_decay is not None and found.decay > self.max_decay:
            return (
                f"learning_rate × weight_decay is {found.decay:g}, beyond accept.max_decay of {self.max_decay:g}: an "
                "upload would hold the last steps alone"
            )
        if self.max_rank is not None and found.rank > self.max_rank:
            return f"a trained tensor has the rank {found.rank}, beyond accept.max_rank of {self.max_rank}"
        if self.min_length is not None and 0 < length < self.min_length:
            return f"texts are cut to {length} tokens, below accept.min_length of {self.min_length}"
        if self.max_dropout is not None and dropout > self.max_dropout:
            return f"the method's dropout is {dropout:g}, beyond accept.max_dropout of {self.max_dropout:g}"
        if freezes and not self.frozen_factors:
            return "the method freezes a factor of LoRA, but accept.frozen_factors is false"
        least = self.min_tokens_per_rank
        if least is not None and found.tokens_per_rank < least:
            return (
                "too few distinct tokens are behind an upload for the rank of what is trained, below "
                f"accept.min_tokens_per_rank of {least:g}: take a larger batch, a smaller rank or less weight decay"
            )
        return ""

    def score_refusal(self, examples: int, *, withheld: bool = False) -> str:
        """Returns why a score that is a mean over this number of examples is refused; empty if it is not.

        Args:
            withheld: Whether the refusal must not reveal the number.
        """
        if examples < self.min_scored:
            number = WITHHELD_NUMBER if withheld else str(examples)
            return f"a score is of {number} example(s), below accept.min_scored of {self.min_scored}"
        return ""

    def disclosure_refusal(self, secure: bool, disclosed: Iterable[str]) -> str:
        """Returns why a run is refused for what the server would see of this site; empty if it is not.

        Args:
            disclosed: What such a run also sends unmasked.
        """
        if self.secure and not secure:
            return "the run does not aggregate securely (federation.secure), but accept.secure is true"
        refused = sorted(set(disclosed) - set(self.disclose)) if secure else []
        if refused:
            return f"the run asks for {', '.join(refused)} in the clear, beyond accept.disclose"
        return ""

    def privacy_refusal(self, rules: PrivacyRules | None) -> str:
        """Returns why a run is refused because it tells a withheld size, or no ledger can count it; else empty."""
        if rules is not None and not rules.fixes_steps:
            return (
                "training.epochs makes the steps of a round follow from this site's number of examples, which the run "
                "withholds: set training.steps"
            )
        if self.max_epsilon is None:
            return ""
        if rules is None:
            return "the run has no differential privacy, but accept.max_epsilon limits it"
        if rules.settings.is_central:
            return "the server adds the run's noise and would see the upload without, but accept.max_epsilon limits it"
        refused = sorted(set(rules.settings.public) - set(self.public))
        if refused:
            return f"the run declares {' and '.join(refused)} public, beyond accept.public"
        return ""

    def epsilon_refusal(self, released: Iterable[Release], following: Release) -> str:
        """Returns why a round's release is refused; empty if it is not.

        Args:
            released: What all runs released before.
        """
        if self.max_epsilon is None:
            return ""
        spent = epsilon([*released, following], self.delta)
        if math.isinf(spent):
            return (
                "an earlier run got this site's uploads without its noise, so no accept.max_epsilon holds; the site's "
                "operator can move work/privacy.jsonl away to count anew"
            )
        if spent > self.max_epsilon:
            return (
                f"its privacy is spent: another round would bring all runs together to an epsilon of {spent:.3f} at "
                f"delta {self.delta:g}, beyond accept.max_epsilon of {self.max_epsilon:g}"
            )
        return ""

    def session_refusal(self, clients: int, share: float) -> str:
        """Returns why a run that aggregates securely is refused for its limits; empty if it is not.

        Args:
            clients: Its `federation.secure_clients`.
            share: Its `federation.secure_share`.
        """
        if clients < self.secure_clients:
            return f"federation.secure_clients is {clients}, below accept.secure_clients of {self.secure_clients}"
        if share < self.secure_share:
            return f"federation.secure_share is {share:g}, below accept.secure_share of {self.secure_share:g}"
        return ""

    def names_refusal(self, names: Iterable[str]) -> str:
        """Returns why tensors of these names may not leave; empty if they may."""
        refused = sorted(name for name in names if not any(fnmatchcase(name, pattern) for pattern in self.leave))
        if not refused:
            return ""
        more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
        return f"the tensor '{refused[0]}'{more} may not leave: accept.leave is {', '.join(self.leave) or 'empty'}"

    def size_refusal(self, size_bytes: int) -> str:
        """Returns why an upload of this size may not leave; empty if it may."""
        if self.max_upload_bytes is not None and size_bytes > self.max_upload_bytes:
            return f"the upload has {size_bytes} bytes, beyond accept.max_upload_bytes of {self.max_upload_bytes}"
        return ""


class RequestLog:
    """The requests of a run that a site has answered, on disk, so that a restart does not forget them.

    A request that is repeated word for word gets the same answer again, which reveals nothing more if the answer is the
    upload; a server that was interrupted repeats requests. Only different requests count. In a secure run the answer is
    a part of a sum, and two sums over different clients do reveal more (`fedguild.federation.sum_log`).

    Args:
        path: The file, JSON: kind, round, and what distinguishes legitimate requests -> digests of those answered.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._seen: dict[str, list[str]] | None = None

    def refusal(
        self,
        message: Message,
        most: int | None,
        in_run: tuple[str, int | None] = ("", None),
        limit: str = "accept.requests_per_round",
    ) -> str:
        """Returns why a request exceeds the limits; if it does not, records it and returns an empty text.

        Args:
            most: Maximum number of different requests of its kind in its round; None for no limit.
            in_run: The setting that limits those in the whole run, and its value; None for no limit.
            limit: What sets `most`.

        Raises:
            FedGuildError: the file cannot be read or written.
        """
        seen = self._read()
        digest, key = _digest(message), _key(message)
        known = seen.get(key, [])
        if digest in known:
            return ""
        if most is not None and len(known) >= most:
            return (
                f"round {message.round} was asked for with {len(known)} different requests to {message.kind}, and "
                f"{limit} is {most}"
            )
        setting, most_in_run = in_run
        counted = sum(len(digests) for each, digests in seen.items() if each.partition(" ")[0] == message.kind)
        if most_in_run is not None and counted >= most_in_run:
            return (
                f"the run has asked for {counted} different requests to {message.kind}, and accept.{setting} is "
                f"{most_in_run}"
            )
        seen = {**seen, key: [*known, digest]}
        write_json(self.path, seen)
        self._seen = seen
        return ""

    def rounds(self, kind: str) -> set[int]:
        """Returns the rounds of the requests of a kind.

        Raises:
            FedGuildError: the file cannot be read.
        """
        keys = (key.split(" ") for key in self._read())
        return {int(each[1]) for each in keys if each[0] == kind}

    def _read(self) -> dict[str, list[str]]:
        if self._seen is None:
            try:
                self._seen = json.loads(self.path.read_text("utf-8")) if self.path.exists() else {}
            except (OSError, ValueError) as error:
                raise FedGuildError(
                    f"{self.path} cannot be read ({error}).",
                    "It counts the requests of the run; remove it to count anew.",
                ) from error
        return self._seen


def _key(message: Message) -> str:
    """Returns the key under which requests count together: a round's scores are of several models and splits."""
    parts = [message.kind, str(message.round)]
    if message.kind == "score":
        parts += [str(message.metadata.get(name)) for name in ("scope", "split")]
    return " ".join(parts)


def _digest(message: Message) -> str:
    """Returns a digest that requests share only if they ask for the same, the run's config included."""
    metadata = json.dumps(message.metadata, sort_keys=True).encode()
    return hashlib.sha256(hashlib.sha256(metadata).digest() + message.body).hexdigest()[:_DIGEST_CHARACTERS]
