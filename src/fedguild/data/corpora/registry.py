"""The corpora by name, and the one function that loads any of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from fedguild.core.errors import DataError, nearest
from fedguild.core.plugins import Plugins
from fedguild.core.seeding import numpy_rng
from fedguild.data.corpora.source import HubDataset, Source, first_split, is_split, locate
from fedguild.data.corpora.spec import CorpusSpec
from fedguild.data.corpora.table import hub_splits
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
    train: str | None = None,
    test: str | None = None,
    limit: int | None = None,
    test_limit: int | None = None,
    seed: int = 0,
    template: str | None = None,
    **options: Any,
) -> Corpus:
    """Loads a corpus from local files or from the Hugging Face hub.

    Records without a response are dropped, and counted in `Corpus.dropped`.

    Args:
        name: A name in `CORPORA`.
        train: A local file or folder, or a hub id (`owner/name`, `owner/name:config`,
            `owner/name:config@split`); None takes the corpus's own dataset on the hub.
        test: The same for the test examples; None takes the test split of the folder or hub
            dataset that `train` names, where it has one.
        limit: Keep this many training examples, drawn at random; None keeps all.
        test_limit: The same for test examples.
        seed: Seed of the draw, and of a corpus that is generated.
        template: Name of a prompt template; None takes the corpus's own.
        options: Further keywords of this corpus, as in its `CorpusSpec.options`.

    Raises:
        DataError: the name, an option or the template is unknown; a file is missing or has the wrong
            columns; the hub cannot be reached; or no example is found.
    """
    spec = corpus_spec(name)
    options = checked_options(spec, options)
    dropped: dict[str, int] = {}
    if spec.generate is not None:
        corpus = _generated(spec, train, test, template, seed, options)
        training, testing = corpus.train, corpus.test
    else:
        training, testing = _read(spec, train, test, template or spec.template, options, dropped)
    for kind, examples, most in (("training", training, limit), ("test", testing, test_limit)):
        if most is not None and len(examples) > most:
            dropped[f"{kind} examples above the limit of {most}"] = len(examples) - most
    return Corpus(
        name,
        sample(training, limit, numpy_rng(seed, "corpus", "train")),
        sample(testing, test_limit, numpy_rng(seed, "corpus", "test")),
        dropped,
    )


def _generated(
    spec: CorpusSpec, train: str | None, test: str | None, template: str | None, seed: int, options: dict[str, Any]
) -> Corpus:
    if train is not None or test is not None or template not in (None, spec.template):
        raise DataError(
            f"The corpus '{spec.name}' is generated, not read: it takes no train, test or template.",
            f"Its settings are: {', '.join(spec.options)}.",
        )
    assert spec.generate is not None
    return spec.generate(seed=seed, **options)


def _read(
    spec: CorpusSpec,
    train: str | None,
    test: str | None,
    template: str,
    options: dict[str, Any],
    dropped: dict[str, int],
) -> tuple[tuple[Example, ...], tuple[Example, ...]]:
    check_template(template)
    where = spec.hub if train is None else locate(train, spec.hub)
    if where is None:
        raise DataError(
            f"The corpus '{spec.name}' has no dataset of its own on the hub: name its training data.",
            f"Accepted: {'; '.join(spec.layouts)}.",
        )
    test_where = (where if _has_test_split(where, spec) else None) if test is None else locate(test, spec.hub)
    training = _examples(spec, Source(where, spec.train_splits), template, options, "training", dropped)
    if test_where is None:
        return training, ()
    source = Source(test_where, spec.test_splits, training)
    return training, _examples(spec, source, template, options, "test", dropped)


def _has_test_split(where: Path | HubDataset, spec: CorpusSpec) -> bool:
    if isinstance(where, HubDataset):
        return not where.split and first_split(spec.test_splits, hub_splits(where)) is not None
    return where.is_dir() and any(is_split(path, name) for path in where.iterdir() for name in spec.test_splits)


def _examples(
    spec: CorpusSpec, source: Source, template: str, options: dict[str, Any], kind: str, dropped: dict[str, int]
) -> tuple[Example, ...]:
    assert spec.read is not None
    read: Iterable[Example] = spec.read(source, template, **options)
    examples, empty = [], 0
    for example in read:
        if example.response:
            examples.append(example)
        else:
            empty += 1
    if empty:
        dropped[f"{kind} rows without a response"] = empty
    if not examples:
        raise DataError(
            f"No example of the corpus '{spec.name}' was found in {source.where}.",
            f"{empty} row(s) have no response. " * bool(empty) + f"Accepted: {'; '.join(spec.layouts)}.",
        )
    return tuple(examples)
