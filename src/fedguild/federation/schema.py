"""Schema of every message between the server and a client: bounded, typed, checked before anything uses it.

A message is a header (JSON) and a body (an encoded payload, `fedguild.core.codec`). `read_header` checks the header's
size, nesting and fields. The rest of the header is its metadata. It has a model for every kind of answer
(`HelloAnswer`, `TrainAnswer`, `ScoreAnswer`, `DeliverAnswer`) and of request (`Request`, `ScoreRequest`); keys that no
model names are never read. Text that is shown or recorded has no control characters.

The process that forwards a client's messages does nothing else, so this module must not import torch.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import from_json

from fedguild.core.errors import UploadError
from fedguild.core.score_names import names_of
from fedguild.core.text import is_plain, printable

MessageKind = Literal["hello", "train", "score", "deliver", "secure"]

HEADER_BYTES = 2**24
"""Largest header; one with the activation frequencies of 60 layers with 256 experts has about 400 kB."""
HEADER_DEPTH = 24
"""Deepest nesting of a header's values; a config has 6 levels."""
REFUSED = "refused by its site: "
"""The beginning of a site's refusal, which asking once more does not change."""
LARGEST_ROUND = LARGEST_CLIENT = 10**6
LARGEST_STEPS = 10**9
LARGEST_EXAMPLES = 10**9
LARGEST_TOKENS = 10**13
LARGEST_SECONDS = 1e9
LARGEST_BYTES = 2**50
LARGEST_LOSS = 1e6
"""Nats per token; that of a uniform guess over a vocabulary of a million words is 14."""
LARGEST_METRIC = 1e30
LARGEST_TASKS = 1024
"""Most tasks of a score, also where it is a mean over more examples."""


def _plain(text: str) -> str:
    if not is_plain(text):
        raise ValueError("has control characters")
    return text


Text = Annotated[str, Field(max_length=300), AfterValidator(_plain)]
Task = Annotated[str, Field(max_length=100), AfterValidator(_plain)]
Name = Annotated[str, Field(min_length=1, max_length=200), AfterValidator(_plain)]
Count = Annotated[int, Field(ge=0, le=LARGEST_EXAMPLES)]
Share = Annotated[float, Field(ge=0, le=1 + 1e-6, allow_inf_nan=False)]
Metric = Annotated[float, Field(ge=-LARGEST_METRIC, le=LARGEST_METRIC, allow_inf_nan=False)]


class _Part(BaseModel):
    """A part of a message. Strict: no number is parsed from text, no integer from a fraction."""

    model_config = ConfigDict(strict=True, frozen=True, extra="ignore", protected_namespaces=())


class Header(_Part):
    """Everything of a message except its body; `fedguild.federation.flower.message.Message` documents the fields."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    kind: MessageKind
    run: str = Field(max_length=64, pattern=r"^[0-9a-z-]*$")
    round: int = Field(default=0, ge=0, le=LARGEST_ROUND)
    client: int = Field(default=-1, ge=-1, le=LARGEST_CLIENT)
    codec: Literal["fp32", "bf16", "int8"] = "fp32"
    failure: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class Request(_Part):
    """The metadata of every request: the run's config, which `fedguild.config` checks."""

    config: dict[str, Any]


class ScoreRequest(Request):
    """The request for the scores of a client's models on its own examples."""

    scope: Literal["client", "trained", "received"]
    split: Literal["test", "validation"]


class SecureSession(_Part):
    """The public parameters of a secure aggregation (`fedguild.privacy.secure_sum.session.Session`)."""

    run: str = Field(max_length=64, pattern=r"^[0-9a-z-]*$")
    round: int = Field(ge=0, le=LARGEST_ROUND)
    nonce: str = Field(pattern=r"^[0-9a-f]{32}$")
    form: str = Field(pattern=r"^[0-9a-f]{64}$")
    share: float = Field(gt=0.5, le=1, allow_inf_nan=False)
    fewest: int = Field(ge=3, le=LARGEST_CLIENT)
    unheld: Literal["omit", "zeros"]


class SecureRequest(Request):
    """A step of a secure aggregation; the body holds its arrays, whose form the client's session checks."""

    session: SecureSession
    step: Literal["join", "share", "check", "weigh", "open_weights", "send", "agree", "open"]


class Sizes(_Part):
    """The number of a client's examples by split."""

    train: int = Field(ge=1, le=LARGEST_EXAMPLES)
    validation: Count
    test: Count


class HelloAnswer(_Part):
    """A client's description of itself.

    Attributes:
        model: Digest of its backbone's form (`fedguild.federation.trainer_service.model_digest`).
        method: The package of the run's method, and its version.
        texts: How its texts are written and what of them is learned, the same for sites that agree; empty in a private
            run.
        summary: All of this for the operator, in a phrase.
    """

    budget: Name
    sizes: Sizes
    fedguild: Name
    model: Name
    method: Text = ""
    texts: Text = ""
    summary: Text = "no details"


class TrainAnswer(_Part):
    """The report of a client's training (`fedguild.engines.client_report.ClientReport`).

    Attributes:
        tokens: Training tokens, padding excluded.
        examples: Examples seen, repeats counted.
        loss: Mean loss, nats per response token.
        first_loss: The same of the first step alone; None where it is not known.
        frequency: [L, M] share of its tokens that activated each expert; None for a dense model.
        peak_memory_bytes: Peak memory of its cohort; None where it was not measured.
        withheld: Whether the figures are withheld for privacy, and so 0 or None.
        reference_tokens: Tokens that the backbone without the adapter has read, for preference pairs.
        forward_tokens: Tokens read without gradients beside the training.
    """

    steps: int = Field(ge=0, le=LARGEST_STEPS)
    tokens: int = Field(ge=0, le=LARGEST_TOKENS)
    examples: int = Field(ge=0, le=LARGEST_TOKENS)
    loss: float = Field(ge=-LARGEST_LOSS, le=LARGEST_LOSS, allow_inf_nan=False)
    seconds: float = Field(ge=0, le=LARGEST_SECONDS, allow_inf_nan=False)
    frequency: list[list[Share]] | None
    peak_memory_bytes: Annotated[int, Field(ge=0, le=LARGEST_BYTES)] | None
    withheld: bool = False
    first_loss: Annotated[float, Field(ge=-LARGEST_LOSS, le=LARGEST_LOSS, allow_inf_nan=False)] | None = None
    reference_tokens: int = Field(default=0, ge=0, le=LARGEST_TOKENS)
    forward_tokens: int = Field(default=0, ge=0, le=LARGEST_TOKENS)

    def shape(self) -> tuple[int, int] | None:
        """Returns (L, M) of the frequencies; None without any.

        Raises:
            UploadError: the layers differ in their number of experts.
        """
        if self.frequency is None:
            return None
        widths = {len(layer) for layer in self.frequency}
        if len(widths) != 1:
            raise UploadError("A reply has no readable training report (frequency is no [layers, experts]).")
        return len(self.frequency), widths.pop()


class Score(_Part):
    """A client's score of one of its models; the fields are those of `EvaluationRecord`."""

    round: int = Field(ge=0, le=LARGEST_ROUND)
    scope: Literal["client", "trained", "received"]
    name: Name
    split: Literal["test", "validation"]
    score: float = Field(ge=0, le=1 + 1e-9, allow_inf_nan=False)
    metric: Name | Literal[""] = ""
    metrics: dict[Name, Metric | Literal["Infinity"]] = Field(default_factory=dict, max_length=64)
    by_task: dict[Task, Share] = Field(default_factory=dict, max_length=LARGEST_TASKS)
    task_metrics: dict[Task, Name] = Field(default_factory=dict, max_length=LARGEST_TASKS)
    examples: Count | None = None
    active_experts: Annotated[int, Field(ge=0, le=LARGEST_CLIENT)] | None = None
    inference_flops_per_token: Annotated[float, Field(ge=0, le=LARGEST_METRIC, allow_inf_nan=False)] | None = None


class ScoreAnswer(_Part):
    """One client's score, for the round, scope and split that were asked for."""

    records: list[Score] = Field(min_length=1, max_length=1)

    def of(self, client: str, round: int, scope: str, split: str) -> Score:
        """Returns the record.

        Raises:
            UploadError: it does not match what this client was asked for.
        """
        record = self.records[0]
        wanted = {"name": client, "round": round, "scope": scope, "split": split}
        for field, value in wanted.items():
            if (found := getattr(record, field)) != value:
                raise UploadError(f"its scores are of {field} {found!r}, but {value!r} was asked for.")
        return record

    def require_of_run(self, metrics: Collection[str], most_examples: int | None) -> None:
        """Checks that a record holds nothing that the run does not measure; it is kept as long as the run.

        Args:
            metrics: The names of the run's metrics.
            most_examples: Most examples of a score, each of which has one task; None for any number.

        Raises:
            UploadError: it holds more.
        """
        record = self.records[0]
        named = {name for metric in (record.metric, *record.task_metrics.values()) for name in names_of(metric)}
        unknown = sorted({*record.metrics, *named} - set(metrics))
        if unknown:
            known = ", ".join(sorted(metrics))
            raise UploadError(f"its scores have the metric '{unknown[0]}', but the run's are {known}.")
        tasks = len({*record.by_task, *record.task_metrics})
        if most_examples is not None and tasks > most_examples:
            raise UploadError(
                f"its scores have {tasks} tasks, but are means over at most {most_examples} "
                "examples (evaluation.max_examples)."
            )


class DeliverAnswer(_Part):
    """Path and format of the model that a client saved for itself."""

    folder: Text
    form: Text


_Model = TypeVar("_Model", bound=_Part)


def read_header(header: str) -> Header:
    """Returns a message's header.

    Raises:
        UploadError: it is too large, too deep, no JSON object, or a field is missing, unknown or out of range.
    """
    size_bytes = len(header) if header.isascii() else len(header.encode("utf-8", "surrogatepass"))
    if size_bytes > HEADER_BYTES:
        raise UploadError(f"A message has a header of {size_bytes} bytes, beyond the limit of {HEADER_BYTES}.")
    try:
        values = from_json(header, allow_inf_nan=True)
    except ValueError as error:
        raise UploadError(f"A message has an unreadable header ({printable(str(error), 200)}).") from error
    if _depth(values) > HEADER_DEPTH:
        raise UploadError(f"A message has a header that is nested more than {HEADER_DEPTH} levels deep.")
    return _validated(Header, values, "A message has a header of the wrong form")


def read_metadata(model: type[_Model], metadata: Mapping[str, Any], fault: str) -> _Model:
    """Returns what a message carries besides the fields of its header.

    Args:
        fault: How the error message begins.

    Raises:
        UploadError: a field is missing, of another type, or out of range.
    """
    return _validated(model, metadata, fault)


def _validated(model: type[_Model], values: Any, fault: str) -> _Model:
    try:
        return model.model_validate(values)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        where = printable(".".join(str(part) for part in first["loc"]), 80)
        raise UploadError(f"{fault} ({f'{where}: ' if where else ''}{printable(first['msg'], 200)}).") from error


def _depth(values: Any) -> int:
    """Returns the depth of nested objects and arrays, without recursion."""
    depth, level = 0, [values]
    while level:
        level = [
            inner
            for value in level
            if isinstance(value, dict | list)
            for inner in (value.values() if isinstance(value, dict) else value)
        ]
        depth += 1
    return depth - 1
