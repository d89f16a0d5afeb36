"""Examples, and the corpus of them that every dataset is read into."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedguild.config.data import SpecialTokens, TrainOn


@dataclass(frozen=True, slots=True)
class Message:
    """One message of a conversation.

    Attributes:
        role: `system`, `user`, `assistant` or `tool`.
        content: Its text; empty for an assistant's turn that only calls tools.
        more: Further fields that a chat template may read (`tool_calls`, `name`, ...), as a JSON object; or empty.
        learned: Whether an assistant's turn is trained on; false for a message of weight 0.
    """

    role: str
    content: str
    more: str = ""
    learned: bool = True

    def as_dict(self) -> dict[str, Any]:
        """Returns the message as chat templates take it."""
        return {"role": self.role, "content": self.content, **(json.loads(self.more) if self.more else {})}


@dataclass(frozen=True, slots=True)
class Example:
    """One instruction with its response, or one conversation; or a preference pair of two of them.

    Attributes:
        prompt: The whole text before the response, template applied, ending where the response
            begins (so that `prompt + response` is the training text). Of a conversation, its turns before
            the last, for people; of a plain text, empty.
        response: The text that the model should produce; of a conversation, its last turn.
        label: The attribute that a Dirichlet partition draws over (a class, a category, a task).
        task: The name that scores are grouped by (a task family, a test set).
        choices: The candidate responses, where the answer is scored by likelihood; empty where
            the response is generated.
        answer: Index of the correct one in `choices`; None for a generated response.
        document: The document that the by-document partition keeps together; empty where there is none.
        messages: The messages of a conversation, which ends with the assistant; the model's chat template writes them.
            Empty for a prompt with a response.
        tools: The tools that the assistant may call, as a JSON list of their schemas; or empty.
        train_on: The tokens that the loss covers.
        special_tokens: What a text that spells a control token is encoded as.
        rejected: The same prompt with the response that was not preferred to this one; None where there is none.
    """

    prompt: str
    response: str
    label: str
    task: str
    choices: tuple[str, ...] = ()
    answer: int | None = None
    document: str = ""
    messages: tuple[Message, ...] = ()
    tools: str = ""
    train_on: TrainOn = "all_turns"
    special_tokens: SpecialTokens = "text"
    rejected: Example | None = None

    @property
    def is_open(self) -> bool:
        """Whether a response is generated to be scored: there are neither choices nor a rejected one."""
        return not self.choices and self.rejected is None


@dataclass(frozen=True, slots=True)
class Corpus:
    """A dataset as read: training examples, and test examples where the source has its own split.

    Attributes:
        name: The corpus's registered name, as in the config.
        train: Examples to partition over the clients.
        test: Examples of the source's own test split; empty where it has none, in which case
            each client's split provides them.
        dropped: Why examples were left out -> how many, for example `training rows without a response`.
        changed: The same for examples that are used, but not whole.
        layout: What the training data was recognised as, with the columns used; empty where there is one layout.
    """

    name: str
    train: tuple[Example, ...]
    test: tuple[Example, ...] = ()
    dropped: Mapping[str, int] = field(default_factory=dict)
    changed: Mapping[str, int] = field(default_factory=dict)
    layout: str = ""


ELSEWHERE = Corpus("remote", (), ())
"""The corpus of a server whose clients read their own data."""


def shared_turns(one: Sequence[Message], other: Sequence[Message]) -> int:
    """Returns the number of turns with which two conversations begin alike, less than either has."""
    most = max(0, min(len(one), len(other)) - 1)
    pairs = enumerate(zip(one[:most], other[:most], strict=True))
    return next((index for index, (a, b) in pairs if a != b), most)
