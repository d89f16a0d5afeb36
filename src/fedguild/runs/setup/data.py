"""Data of a run: read, partitioned over the clients and split, before any model is loaded."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fedguild.config import Config
from fedguild.config.data import GIVEN
from fedguild.core.errors import ConfigError, DataError
from fedguild.core.seeding import numpy_rng
from fedguild.data import (
    ClientData,
    Corpus,
    Example,
    PartitionTable,
    load_corpus,
    partition,
    partition_table,
    pooled_test,
    split_clients,
)
from fedguild.data.batches import Cut, Encoded
from fedguild.data.corpora import checked_options, corpus_spec
from fedguild.data.corpora.source import is_here
from fedguild.data.given import GivenData, given_parts, source
from fedguild.data.rendering import count_cut, encode
from fedguild.data.sampling import sample
from fedguild.runs.setup.fitting import method_of, require_preferences

Split = Literal["test", "validation"]
"""The held-out examples that models are scored on."""


@dataclass(frozen=True)
class PreparedData:
    """The data of a run, prepared before any model is loaded.

    Attributes:
        clients: Each client's training, validation and test examples.
        partition_table: Clients × labels.
    """

    corpus: Corpus
    clients: list[ClientData]
    partition_table: PartitionTable

    def pooled(self, split: Split, limit: int | None, seed: int) -> tuple[Example, ...]:
        """Returns the held-out examples that the global model is scored on, at most `limit` of them."""
        if split == "test":
            return pooled_test(self.corpus, self.clients, limit=limit, seed=seed)
        validation = tuple(example for client in self.clients for example in client.validation)
        return sample(validation, limit, numpy_rng(seed, "pooled validation"))

    def digest(self) -> str:
        """Returns the SHA-256 of all clients' texts and labels, in their order."""
        digest = hashlib.sha256()
        for client in self.clients:
            for example in (*client.train, *client.validation, *client.test):
                rejected = "" if example.rejected is None else example.rejected.response
                texts = (example.prompt, example.response, rejected, example.label)
                digest.update("\0".join(texts).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()

    def sizes(self) -> dict[str, list[int]]:
        return {
            name: [len(getattr(client, name)) for client in self.clients] for name in ("train", "validation", "test")
        }


def is_elsewhere(config: Config) -> bool:
    """Whether the data is that of a federation's sites, and not on this machine."""
    given = config.data.train
    return config.federation.engine.name == "flower" and given is not None and not is_here(given)


def prepare_data(config: Config, folder: Path | None = None, given: GivenData | None = None) -> PreparedData:
    """Loads the corpus, partitions it over the clients and splits every client's share.

    Args:
        folder: The run's folder, with data and the partition if they were given in Python.
        given: The objects behind them; None if the folder has them.

    Raises:
        DataError: the data is missing, has the wrong columns, or leaves a client without examples.
        ConfigError: as `for_objective`.
    """
    corpus = prepare_corpus(config, folder)
    rng = numpy_rng(config.seed, "partition")
    rule = config.data.partition
    clients_wanted = config.federation.clients
    try:
        if rule.scheme.startswith(GIVEN):
            scheme = None if given is None else given.partition
            parts = given_parts(corpus.train, clients_wanted, rng, scheme, folder)
        else:
            parts = partition(
                rule.scheme, corpus.train, clients_wanted, rng=rng, alpha=rule.alpha, minimum=rule.minimum
            )
    except DataError as error:
        raise DataError(" ".join([error.message, *_left_out(corpus.dropped)]), error.hint) from error
    clients = split_clients(corpus, parts, config.data.split, seed=config.seed)
    return PreparedData(corpus, clients, partition_table(corpus.train, parts))


def prepare_corpus(config: Config, folder: Path | None = None) -> Corpus:
    """Loads the corpus of a config; arguments and errors as of `prepare_data`."""
    data = config.data
    options = checked_options(corpus_spec(data.dataset), data.options)
    corpus = load_corpus(
        data.dataset,
        train=source(data.train, folder),
        test=source(data.test, folder),
        limit=data.max_samples,
        seed=config.seed,
        template=data.template,
        train_on=data.train_on,
        special_tokens=data.special_tokens,
        **options,
    )
    return for_objective(corpus, config)


def for_objective(corpus: Corpus, config: Config) -> Corpus:
    """Returns a corpus as `training.objective` uses it: preference pairs as pairs, or their chosen answers alone.

    Raises:
        ConfigError: as `of_client`.
    """
    pairs = _has_pairs(corpus.train)
    whole = of_client(ClientData(corpus.train, (), corpus.test), config, corpus.layout or corpus.name)
    said = (
        "chosen answers alone (training.objective=sft)" if config.training.objective == "sft" else "trained on by DPO"
    )
    layout = f"{corpus.layout}; {said}" if pairs else corpus.layout
    return replace(corpus, train=whole.train, test=whole.test, layout=layout)


def of_client(data: ClientData, config: Config, found: str) -> ClientData:
    """Returns a client's examples as `training.objective` uses them.

    Args:
        found: What the data are, for messages.

    Raises:
        ConfigError: the objective is dpo, but there are no pairs; or there are, and the method cannot train on them.
    """
    objective, pairs = config.training.objective, _has_pairs(data.train)
    if objective == "sft":
        alone = (tuple(replace(one, rejected=None) for one in own) for own in (data.train, data.validation, data.test))
        return ClientData(*alone)
    if objective == "dpo" and not pairs:
        raise ConfigError(
            f"training.objective is dpo, but the data are no preference pairs: {found}.",
            "Give data.dataset=instructions and data with chosen and rejected answers, or set training.objective=sft.",
        )
    if pairs:
        require_preferences(method_of(config))
    return data


def _has_pairs(examples: Sequence[Example]) -> bool:
    return any(example.rejected is not None for example in examples)


def dropped_of(data: PreparedData, config: Config) -> dict[str, int]:
    """Returns why examples of the source are not part of a run -> how many."""
    dropped = dict(data.corpus.dropped)
    shares = sum(data.partition_table.client_sizes)
    own_test = config.data.split.test_source == "client"
    used = sum(len(one.train) + len(one.validation) + own_test * len(one.test) for one in data.clients)
    for reason, count in (
        ("training examples that the partition gives to no client", len(data.corpus.train) - shares),
        ("examples above data.split.max_*_samples", shares - used),
    ):
        if count > 0:
            dropped[reason] = count
    return dropped


def data_sentences(corpus: Corpus, dropped: Mapping[str, int]) -> list[str]:
    """Returns what the data was recognised as, and what of it is left out or changed."""
    return [
        *([f"Data: {corpus.layout}."] if corpus.layout else []),
        *_left_out(dropped),
        *(f"{count} {what}." for what, count in corpus.changed.items()),
    ]


def _left_out(dropped: Mapping[str, int]) -> list[str]:
    return [f"Left out: {count} {reason}." for reason, count in dropped.items()]


def encoded_texts(data: PreparedData, tokenizer: Any, max_tokens: int) -> dict[int, list[Encoded]]:
    """Returns client index -> its training examples as token ids."""
    return {
        index: [encode(example, tokenizer, max_tokens) for example in client.train]
        for index, client in enumerate(data.clients)
    }


def cut_of(data: PreparedData, encoded: Mapping[int, list[Encoded]], tokenizer: Any, max_tokens: int) -> Cut:
    """Returns how many of all clients' training texts are cut to `data.max_length`."""
    pairs = (pair for index, one in enumerate(data.clients) for pair in zip(one.train, encoded[index], strict=True))
    return count_cut(pairs, tokenizer, max_tokens)
