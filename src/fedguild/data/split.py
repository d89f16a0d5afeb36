"""Split of each client's share into training, validation and test examples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedguild.config.data import SplitSettings
from fedguild.core.errors import DataError
from fedguild.core.seeding import numpy_rng
from fedguild.data.example import Corpus, Example
from fedguild.data.partition import apportion
from fedguild.data.sampling import sample


@dataclass(frozen=True, slots=True)
class ClientData:
    """A client's training, validation and test examples, each in random order.

    The first n of each are therefore a random sample, which is what `evaluation.max_examples` takes.
    """

    train: tuple[Example, ...]
    validation: tuple[Example, ...]
    test: tuple[Example, ...]


def split_clients(
    corpus: Corpus, parts: Sequence[Sequence[int]], rule: SplitSettings | None = None, *, seed: int
) -> list[ClientData]:
    """Splits every client's share into training, validation and test examples.

    If a fraction is positive, its split gets at least one example. A client's split depends only on its share, the seed
    and its index.

    Args:
        parts: For each client the indices into `corpus.train`, as from `partition`.

    Raises:
        DataError: a client has too few examples, or the test source is the corpus and that has no test examples for a
            client's labels.
    """
    rule = rule or SplitSettings()
    if rule.test_source == "corpus" and not corpus.test:
        raise DataError(
            f"The corpus '{corpus.name}' has no test examples of its own.",
            "Name a test file or dataset, or set the test source to client.",
        )
    shares = [[corpus.train[index] for index in part] for part in parts]
    return [_cut(corpus, share, rule, client, seed) for client, share in enumerate(shares)]


def _cut(corpus: Corpus, share: Sequence[Example], rule: SplitSettings, client: int, seed: int) -> ClientData:
    _check_enough(share, rule, client)
    rng = numpy_rng(seed, "split", client)
    order = [share[index] for index in rng.permutation(len(share))]
    validation = _held_out(len(share), rule.validation)
    test = _held_out(len(share), rule.own_test)
    if validation + test >= len(share):
        validation, test = min(validation, 1), min(test, 1)
    tests = order[validation : validation + test]
    if rule.test_source == "corpus":
        tests = _matching_test(corpus, share, client, rng)
    return ClientData(
        train=tuple(order[validation + test :][: rule.max_train_samples]),
        validation=tuple(order[:validation][: rule.max_validation_samples]),
        test=sample(tests, rule.max_test_samples, rng),
    )


def _check_enough(share: Sequence[Example], rule: SplitSettings, client: int) -> None:
    uses = ["training"] + ["validation"] * (rule.validation > 0) + ["testing"] * (rule.own_test > 0)
    if len(share) < len(uses):
        raise DataError(
            f"Client {client} has {len(share)} example(s), but needs at least {len(uses)} for {', '.join(uses)}.",
            f"Raise the partition's minimum per client to {len(uses)}, use fewer clients or more data, "
            "or set the validation or test fraction to 0.",
        )


def _held_out(count: int, fraction: float) -> int:
    return max(1, round(count * fraction)) if fraction > 0 else 0


def _matching_test(corpus: Corpus, share: Sequence[Example], client: int, rng: np.random.Generator) -> list[Example]:
    """Draws as many of the corpus's test examples as the proportions of the share's labels allow, in random order.

    Two clients may be tested on the same example. Because of the random order, the first of them alone
    (`evaluation.max_examples`) are as if drawn at random. A label of which the corpus has few tests leaves few in all.
    """
    pool: dict[str, list[Example]] = {}
    for example in corpus.test:
        pool.setdefault(example.label, []).append(example)
    share_counts = Counter(example.label for example in share if example.label in pool)
    if not share_counts:
        raise DataError(
            f"None of client {client}'s labels is among the test examples of the corpus '{corpus.name}'.",
            "Set the test source to client.",
        )
    weights = np.array([share_counts[label] for label in sorted(share_counts)])
    available = np.array([len(pool[label]) for label in sorted(share_counts)])
    total = int((weights.sum() * available // weights).min())
    counts = np.minimum(apportion(weights.astype(np.float64), max(total, 1)), available)
    drawn = [
        example
        for label, count in zip(sorted(share_counts), counts.tolist(), strict=True)
        for example in (sample(pool[label], count, rng) if count else ())
    ]
    return [drawn[index] for index in rng.permutation(len(drawn))]


def pooled_test(
    corpus: Corpus, clients: Sequence[ClientData], *, limit: int | None = None, seed: int = 0
) -> tuple[Example, ...]:
    """Returns the test examples of a global model: the corpus's own test examples, else all clients'.

    Args:
        limit: Keep this many, drawn at random; None keeps all.
    """
    pool = corpus.test or tuple(example for client in clients for example in client.test)
    return sample(pool, limit, numpy_rng(seed, "pooled test"))
