"""Settings of the data: its source, and its partition over the clients."""

from __future__ import annotations

from typing import Any, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from fedguild.config.base import Section
from fedguild.core.errors import nearest
from fedguild.core.plugins import installed_plugins

Scheme = Literal["iid", "dirichlet", "label", "document", "quantity", "power_law"]
TrainOn = Literal["all_turns", "last_turn", "everything"]
SpecialTokens = Literal["text", "token"]
PARTITIONS_GROUP = "fedguild.partitions"
"""The entry-point group of other packages' partition schemes."""
GIVEN = "given:"
"""Prefix of a partition and of data that were given in Python, and lie in the run's folder."""


class PartitionSettings(Section):
    """Distribution of the training examples over the clients."""

    scheme: Scheme | str = Field(
        default="dirichlet",
        description="iid: at random, in equal sizes; dirichlet: every label spread by Dirichlet(alpha); label: "
        "different labels for every client (one task per client); document: documents kept whole; quantity: at "
        "random, sizes drawn from Dirichlet(alpha); power_law: at random, the i-th client's size proportional to i to "
        "the power -alpha; or one that an installed package adds.",
    )
    alpha: float = Field(
        default=0.5,
        gt=0,
        description="Concentration of dirichlet and quantity (100 is nearly even, 0.1 strongly skewed); exponent of "
        "power_law.",
    )
    minimum: int = Field(default=8, ge=1, description="Minimum number of examples per client.")

    @field_validator("scheme")
    @classmethod
    def _is_known(cls, scheme: str) -> str:
        known = get_args(Scheme)
        if scheme in known or scheme.startswith(GIVEN):
            return scheme
        added = [plugin.name for plugin in installed_plugins(PARTITIONS_GROUP)]
        if scheme not in added:
            raise ValueError(f"must be a partition scheme, got '{scheme}'. {nearest(scheme, [*known, *added])}")
        return scheme


class SplitSettings(Section):
    """Split of each client's examples into training, validation and test."""

    validation: float = Field(
        default=0.1, ge=0, lt=1, description="Share of a client's examples held out for validation."
    )
    test: float = Field(default=0.1, ge=0, lt=1, description="Share of a client's examples held out for its own test.")
    test_source: Literal["client", "corpus"] = Field(
        default="client",
        description="client: every client holds out a share of its own examples; corpus: the source's test "
        "split, from which a client's own test follows its label distribution.",
    )
    max_train_samples: int | None = Field(
        default=None, ge=1, description="Maximum training examples per client; null: all."
    )
    max_validation_samples: int | None = Field(
        default=None, ge=1, description="Maximum validation examples per client; null: all."
    )
    max_test_samples: int | None = Field(default=None, ge=1, description="Maximum test examples per client; null: all.")

    @model_validator(mode="after")
    def _leave_something_to_train(self) -> Self:
        held_out = self.validation + self.own_test
        if held_out >= 1:
            raise ValueError(f"validation and test together must be below 1, got {held_out:g}")
        return self

    @property
    def own_test(self) -> float:
        """Fraction of a client's examples that becomes its test split: 0 if the corpus's test split is used."""
        return self.test if self.test_source == "client" else 0.0


class DataSettings(Section):
    """The corpus, its prompt template, and its partition over the clients."""

    dataset: str = Field(
        default="tasks", min_length=1, description="Name of a data set; `tasks` generates its examples itself."
    )
    train: str | list[str] | None = Field(
        default=None,
        description="Training data: a file, a pattern (data/*.jsonl) or list of files, a folder, or a Hugging Face hub "
        "id (owner/name, owner/name:config@split); null: the corpus's usual hub id.",
    )
    test: str | list[str] | None = Field(
        default=None, description="Test data, given like `train`; null: the test split of the source, if it has one."
    )
    template: str | None = Field(
        default=None,
        description="Prompt template of instructions; chat: the model's chat template; null: the corpus's usual one.",
    )
    chat_template: str | None = Field(
        default=None,
        description="Chat template that writes conversations: a file, Jinja text, or plain (`### User:`, for models "
        "without one); null: the model's own. Exported models keep it.",
    )
    train_on: TrainOn = Field(
        default="all_turns",
        description="Tokens that the loss covers: of every assistant turn, of the last one, or all tokens. Turns "
        "include their end token.",
    )
    special_tokens: SpecialTokens = Field(
        default="text",
        description="How a control token spelled out in the data, as `<|im_end|>`, is encoded: as text or as itself.",
    )
    max_samples: int | None = Field(
        default=None, ge=1, description="Maximum number of examples read from each of train and test; null: all."
    )
    max_length: int = Field(
        default=512,
        ge=8,
        description="Longest training text in tokens; of longer ones, the start of the prompt is cut off.",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="Options of the corpus, for example `max_tasks` of natural_instructions."
    )
    partition: PartitionSettings = Field(default_factory=PartitionSettings, description="Partition over the clients.")
    split: SplitSettings = Field(default_factory=SplitSettings, description="Training, validation and test.")
