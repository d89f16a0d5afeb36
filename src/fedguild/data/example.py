"""Examples, and the corpus of them that every dataset is read into."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its response.

    Attributes:
        prompt: The whole text before the response, template applied, ending where the response
            begins (so that `prompt + response` is the training text).
        response: The text that the model should produce; the loss covers its tokens only.
        label: The attribute that a Dirichlet partition draws over (a class, a category, a task).
        task: The name that scores are grouped by (a task family, a test set).
        choices: The candidate responses, where the answer is scored by likelihood; empty where
            the response is generated.
        answer: Index of the correct one in `choices`; None for a generated response.
        document: The document that the by-document partition keeps together; empty where there is none.
    """

    prompt: str
    response: str
    label: str
    task: str
    choices: tuple[str, ...] = ()
    answer: int | None = None
    document: str = ""


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset as read: training examples, and test examples where the source has its own split.

    Attributes:
        name: The corpus's registered name, as in the config.
        train: Examples to partition over the clients.
        test: Examples of the source's own test split; empty where it has none, in which case
            each client's split provides them.
        dropped: Why examples were left out -> how many, for example `training rows without a response`.
    """

    name: str
    train: tuple[Example, ...]
    test: tuple[Example, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
