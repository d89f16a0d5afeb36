"""The corpora by name, and the one function that loads any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedguild.config.data import SpecialTokens, TrainOn
from fedguild.core.errors import DataError, nearest
from fedguild.core.plugins import Plugins
from fedguild.core.seeding import numpy_rng
from fedguild.data.conversation import Tally, as_conversation
from fedguild.data.corpora.source import HubDataset, Source, first_split, is_split, locate
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import folder_splits, hub_splits, is_dataset
from fedguild.data.example import Corpus, Example
from fedguild.data.prompts import check_template
from fedguild.data.sampling import sample


def _accepted(name: str, loaded: object) -> CorpusSpec:
    if not isinstance(loaded, CorpusSpec):
        raise TypeError(f"a corpus is declared by a CorpusSpec, not by a {type(loaded).__name__}")
    return replace(loaded, name=name)


CORPORA = Plugins("corpus", "fedguild.data.corpora", "fedguild.corpora", _accepted, attribute="SPEC")


def corpus_spec(name: str) -> CorpusSpec:
    """Returns the declaration of a corpus.

    Raises:
        DataError: there is no such corpus; lists the known ones.
        ConfigError: it comes from a package that is broken.
    """
    if name not in CORPORA:
        raise DataError(f"There is no corpus '{name}'.", nearest(name, CORPORA))
    return CORPORA.load(name)


def checked_options(spec: CorpusSpec, options: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a corpus's options to the types that its reader declares.

    Raises:
        DataError: an option is unknown, or its value is of another type.
    """
    types = _types_of(spec)
    found = {}
    for option, value in options.items():
        if option not in spec.options:
            hint = nearest(option, spec.options) if spec.options else "It takes no options."
            raise DataError(f"The corpus '{spec.name}' has no option '{option}'.", hint)
        try:
            found[option] = TypeAdapter(types.get(option, Any)).validate_python(value)
        except ValidationError as error:
            said = error.errors()[0]["msg"]
            raise DataError(
                f"data.options.{option}: {said}, got {value!r}.", f"{option}: {spec.options[option]}."
            ) from error
    return found


def _types_of(spec: CorpusSpec) -> dict[str, Any]:
    """Returns the declared types of the reader's options; empty if its annotations do not resolve."""
    try:
        return get_type_hints(spec.read or spec.generate)
    except (NameError, TypeError):
        return {}


def load_corpus(
    name: str,
    *,
    train: str | Sequence[str] | None = None,
    test: str | Sequence[str] | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
    template: str | None = None,
    train_on: TrainOn = "all_turns",
    special_tokens: SpecialTokens = "text",
    **options: Any,
) -> Corpus:
    """Loads a corpus from local files or from the Hugging Face hub.

    Records without a response are dropped, and counted in `Corpus.dropped`; what is changed in
    others is counted in `Corpus.changed`.

    Args:
        name: A name in `CORPORA`.
        train: A local file or folder, several files or a pattern of them, or a hub id
            (`owner/name`, `owner/name:config`, `owner/name:config@split`); None takes the corpus's
            own dataset on the hub.
        test: The same for the test examples; None takes the test split of the folder or hub
            dataset that `train` names, where it has one.
        limit: Keep this many training examples, drawn at random; None keeps all.
        test_limit: The same for test examples.
        seed: Seed of the draw, and of a corpus that is generated.
        template: Name of a prompt template; None takes the corpus's own.
        train_on: The tokens that the loss covers.
        special_tokens: What a text that spells a control token is encoded as.
        options: Further keywords of this corpus, as in its `CorpusSpec.options`.

    Raises:
        DataError: the name, an option or the template is unknown; a file is missing or has the wrong
            columns; the hub cannot be reached; or no example is found.
    """
    spec = corpus_spec(name)
    options = checked_options(spec, options)
    dropped: dict[str, int] = {}
    changed: dict[str, int] = {}
    layout = ""
    if spec.generate is not None:
        corpus = _generated(spec, train, test, template, seed, options)
        training, testing = corpus.train, corpus.test
    else:
        read = _Reading(spec, template or spec.template, options, dropped, changed)
        training, testing = read.both(train, test)
        layout = read.layout

    def drawn(examples: tuple[Example, ...], most: int | None, split: str) -> tuple[Example, ...]:
        chosen = sample(examples, most, numpy_rng(seed, "corpus", split))
        if template == "chat":
            chosen = tuple(map(as_conversation, chosen))
        if (train_on, special_tokens) == ("all_turns", "text"):
            return chosen
        return tuple(
            replace(
                one, train_on="everything" if one.train_on == "everything" else train_on, special_tokens=special_tokens
            )
            for one in chosen
        )

    for kind, examples, most in (("training", training, limit), ("test", testing, test_limit)):
        if most is not None and len(examples) > most:
            dropped[f"{kind} examples above the limit of {most}"] = len(examples) - most
    return Corpus(
        name,
        drawn(training, limit, "train"),
        drawn(testing, test_limit, "test"),
        dropped,
        changed,
        layout,
    )


def _generated(
    spec: CorpusSpec, train: Any, test: Any, template: str | None, seed: int, options: dict[str, Any]
) -> Corpus:
    if train is not None or test is not None or template not in (None, "chat", spec.template):
        raise DataError(
            f"The corpus '{spec.name}' is generated, not read: it takes no train, test or template.",
            f"Its settings are: {', '.join(spec.options)}.",
        )
    assert spec.generate is not None
    return spec.generate(seed=seed, **options)


@dataclass
class _Reading:
    """The reading of a corpus's splits; what is left out or changed is counted in `dropped` and `changed`."""

    spec: CorpusSpec
    template: str
    options: dict[str, Any]
    dropped: dict[str, int]
    changed: dict[str, int]
    layout: str = ""

    def both(
        self, train: str | Sequence[str] | None, test: str | Sequence[str] | None
    ) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
        """Returns the training examples, and the test examples if there are any."""
        check_template(self.template)
        spec = self.spec
        where = spec.hub if train is None else locate(train, spec.hub)
        if where is None:
            raise DataError(
                f"The corpus '{spec.name}' has no dataset of its own on the hub: name its training data.",
                f"Accepted: {'; '.join(spec.layouts)}.",
            )
        test_where = (where if _has_test_split(where, spec) else None) if test is None else locate(test, spec.hub)
        tally = Tally()
        training = self._examples(Source(where, spec.train_splits, tally=tally), "training")
        self.layout = tally.layout
        if test_where is None:
            return training, ()
        return training, self._examples(Source(test_where, spec.test_splits, training, Tally()), "test")

    def _examples(self, source: Source, kind: str) -> tuple[Example, ...]:
        assert self.spec.read is not None
        assert source.tally is not None
        read: Iterable[Example] = self.spec.read(source, self.template, **self.options)
        examples = []
        for example in read:
            if example.response.strip():
                examples.append(example)
            else:
                source.tally.dropped["rows without a response"] += 1
        self.dropped |= {f"{kind} {reason}": count for reason, count in source.tally.dropped.items()}
        self.changed |= {f"{kind} {reason}": count for reason, count in source.tally.changed.items()}
        if not examples:
            left_out = "".join(f"{count} {reason}. " for reason, count in source.tally.dropped.items())
            raise DataError(
                f"No example of the corpus '{self.spec.name}' was found in {source.where}.",
                f"{'Left out: ' * bool(left_out)}{left_out}Accepted: {'; '.join(self.spec.layouts)}.",
            )
        return tuple(examples)


def _has_test_split(where: Path | tuple[Path, ...] | HubDataset, spec: CorpusSpec) -> bool:
    if isinstance(where, tuple):
        return False
    if isinstance(where, HubDataset):
        return not where.split and first_split(spec.test_splits, hub_splits(where)) is not None
    if not where.is_dir():
        return False
    if any(is_split(path, name) for path in where.iterdir() for name in spec.test_splits):
        return True
    return is_dataset(where) and first_split(spec.test_splits, folder_splits(where)) is not None
