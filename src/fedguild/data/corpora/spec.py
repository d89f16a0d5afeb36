"""The declaration of a corpus, and helpers for those who write one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from fedguild.data.corpora.source import HubDataset
from fedguild.data.example import Corpus, Example

Kind = Literal["choice", "generate", "mixed"]
OTHER = "other"


@dataclass(frozen=True, slots=True)
class CorpusSpec:
    """One dataset family, as its module declares it in `SPEC`.

    Attributes:
        kind: Whether answers are chosen (scored by likelihood), generated, or both.
        metric: Name of the metric whose value is the score of a generated answer.
        layouts: The file and folder layouts that are read, one line each.
        template: Name of the prompt template used unless another is asked for.
        hub: Its dataset on the Hugging Face hub; None where it has none.
        read: Called as `read(source, template, **options)`; returns the examples of one split.
        generate: Called as `generate(seed=..., **options)` instead of `read`, for a corpus that is
            generated rather than read; returns the whole corpus.
        options: Name -> help of every further keyword that `read` or `generate` takes.
        train_splits: Names that the training split may have, in order of preference.
        test_splits: The same for the test split; where published test labels are withheld, the
            validation split comes first.
        name: As in the config; filled in from the file's name or the entry point's when it is loaded.
    """

    kind: Kind
    metric: str = "rouge_l"
    layouts: tuple[str, ...] = ()
    template: str = "plain"
    hub: HubDataset | None = None
    read: Callable[..., Iterable[Example]] | None = None
    generate: Callable[..., Corpus] | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    train_splits: tuple[str, ...] = ("train",)
    test_splits: tuple[str, ...] = ("test", "validation", "valid", "val", "dev")
    name: str = ""

    def __post_init__(self) -> None:
        if (self.read is None) == (self.generate is None):
            raise ValueError("a CorpusSpec has either read or generate")


def choice_example(prompt: str, choices: Sequence[str], answer: int, *, label: str, task: str) -> Example:
    return Example(prompt, choices[answer], label, task, tuple(choices), answer)


def keep_frequent_labels(examples: Iterable[Example], top: int, training: Sequence[Example]) -> list[Example]:
    """Relabels everything but the frequent labels as `other`, so that a long tail can be partitioned.

    Args:
        top: How many of the most frequent labels keep their name (ties: alphabetical).
        training: The training examples already relabelled, where `examples` are the test split:
            the labels that occur there are kept instead.
    """
    examples = list(examples)
    kept = {example.label for example in training}
    if not training:
        counts = Counter(example.label for example in examples)
        kept = set(sorted(counts, key=lambda label: (-counts[label], label))[:top])
    return [example if example.label in kept else replace(example, label=OTHER) for example in examples]
