"""The log of a run: typed records, one JSON object per line of `metrics.jsonl`, written, read and followed.

The lines are hash-chained (`fedguild.core.chained`): a line that was damaged, removed or moved is found when the log is
read. Logs of 0.2.0 have no seals and are read without this check.

Each record belongs to a round (0 is before training), so a resumed run can truncate the file after its last complete
round and continue with the same lines as an uninterrupted run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from fedguild.core import chained
from fedguild.core.errors import CheckpointError, FedGuildError
from fedguild.core.files import PRIVATE_FILE, make_folder, write_bytes
from fedguild.core.score_names import Scope
from fedguild.core.tail import Tail


class _Row(BaseModel):
    """A JSON object without additional fields; NaN and infinity are written as strings.

    A `client` is an index, a `budget` its name, and rounds count from 1.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings", protected_namespaces=())


class Rejection(_Row):
    """An upload that was not aggregated; `reason` is one sentence."""

    client: int
    reason: str


class StrayUpload(_Row):
    """An unexpected upload.

    Attributes:
        round: The round that it belongs to.
        dropped: Why it was not aggregated; empty if it was, in the round of this record.
    """

    round: int
    client: int
    upload_bytes: int
    dropped: str = ""


class RoundRecord(_Row):
    """A complete round.

    Attributes:
        seconds: Wall time of the whole round.
        phase_seconds: Wall time by phase, for example `train`, `evaluate`, `aggregate`.
        participants: Indices of the clients that were asked.
        rejected: Clients that failed, and uploads that were not aggregated.
        unneeded: Indices of the clients that the engine did not wait for because enough others had delivered.
        retried: Indices of the clients that were asked more than once.
        strays: Uploads that arrived late, twice or unrequested.
        faults: Errors of clients in a secure aggregation that the others could repair.
    """

    kind: Literal["round"] = "round"
    round: int = Field(ge=1)
    seconds: float
    phase_seconds: dict[str, float] = Field(default_factory=dict)
    participants: list[int]
    rejected: list[Rejection] = Field(default_factory=list)
    unneeded: list[int] = Field(default_factory=list)
    retried: list[int] = Field(default_factory=list)
    strays: list[StrayUpload] = Field(default_factory=list)
    faults: list[Rejection] = Field(default_factory=list)


class ClientRecord(_Row):
    """One client's local training in one round.

    Attributes:
        active_experts: Active experts per token while training; 0 for a dense model.
        rank: LoRA rank while training.
        examples: Number of the client's training examples; None if withheld for privacy.
        steps: Optimizer steps; None if withheld, as below.
        tokens: Tokens of the batches, padding excluded.
        train_loss: Mean loss over the steps, nats per response token; of dpo, per preference pair.
        upload_parts: Bytes of the upload's tensors by part, for example `adapter`.
        training_flops: Floating-point operations of the local update: its training, with what gradient checkpointing
            computes again, dpo's reference, and the forward passes that the method makes beside its training.
        peak_memory_bytes: Peak memory of the client's cohort: allocated on a GPU, resident in the process on a CPU.
        seconds: Wall time of the local update of the client's cohort times the client's share of its tokens.
    """

    kind: Literal["client"] = "client"
    round: int = Field(ge=1)
    client: int
    budget: str
    active_experts: int
    rank: int
    examples: int | None
    steps: int | None
    tokens: int | None
    train_loss: float | None
    upload_bytes: int
    download_bytes: int
    upload_parts: dict[str, int] = Field(default_factory=dict)
    training_flops: float | None
    peak_memory_bytes: int | None = None
    seconds: float | None


class PrivacyRecord(_Row):
    """The privacy that every client has spent after a round.

    Attributes:
        unit: What is protected, `client` or `example`.
        delta: delta of the guarantees.
        clients: Indices of all clients.
        epsilon: Spent by each of them since the run began.
        noise_multiplier: sigma of each of them.
        stopped: Those whose budget does not reach for another round.
    """

    kind: Literal["privacy"] = "privacy"
    round: int = Field(ge=1)
    unit: str
    delta: float
    clients: list[int]
    epsilon: list[float]
    noise_multiplier: list[float]
    stopped: list[int] = Field(default_factory=list)


class TrafficRecord(_Row):
    """The bytes of a round under `federation.byte_limit`.

    Attributes:
        planned_bytes: What it could have transferred without further attempts, both ways.
        round_bytes: What it transferred, further attempts and late uploads included.
        total_bytes: What the run has transferred so far.
        limit_bytes: What the run may transfer.
    """

    kind: Literal["traffic"] = "traffic"
    round: int = Field(ge=1)
    planned_bytes: int
    round_bytes: int
    total_bytes: int
    limit_bytes: int


class EvaluationRecord(_Row):
    """A score after a round.

    Attributes:
        round: Number of the round; 0 is before training.
        scope: `budget` for the global model as a client of a budget runs it, `client` for a
            client's own model on its own data, `trained` for the model that its training left on its own
            data, `received` for the model with which it would begin its next round on its own data,
            `pooled` for the latter on all clients' data, `summary` for a mean over one of them.
        name: Name of the budget, name of the client (`client-000`), or for a summary one of
            `fedguild.core.score_names.SCORES`.
        split: `test` or `validation`.
        score: The primary score, 0 to 1.
        metric: The metric that the score is the mean of, or several joined by `and`; empty in older logs.
        metrics: Every metric by name, for example `accuracy`, `rouge_l`, `perplexity`; of a mean over
            clients `deviation`, the sample standard deviation over them.
        by_task: The primary score by task.
        task_metrics: The metric of each task's score, where they differ.
        examples: Number of examples scored.
        active_experts: Active experts per token in this evaluation.
        inference_flops_per_token: Forward FLOPs of the evaluated model for a token, adapters merged.
    """

    kind: Literal["evaluation"] = "evaluation"
    round: int = Field(ge=0)
    scope: Scope
    name: str
    split: Literal["test", "validation"]
    score: float
    metric: str = ""
    metrics: dict[str, float] = Field(default_factory=dict)
    by_task: dict[str, float] = Field(default_factory=dict)
    task_metrics: dict[str, str] = Field(default_factory=dict)
    examples: int | None = None
    active_experts: int | None = None
    inference_flops_per_token: float | None = None


class ObservationRecord(_Row):
    """A figure that the method itself reports after a round.

    Attributes:
        rows: A label for each row of `values`.
        columns: A label for each column; empty if a row has one value.
        values: One list for each row.
        unit: The unit of the values; empty for a pure number.
    """

    kind: Literal["observation"] = "observation"
    round: int = Field(ge=1)
    name: str
    rows: list[str]
    columns: list[str] = Field(default_factory=list)
    values: list[list[float]]
    unit: str = ""


class RoutingRecord(_Row):
    """The experts that the clients' tokens activated in a round.

    Attributes:
        layers: L, mixture-of-experts layers.
        experts: M, experts per layer.
        clients: Indices of the clients, in the order of `frequency`.
        frequency: [clients, L, M] share of a client's tokens that activated an expert; a row sums to
            the client's active experts.
        entropy: [L] entropy of the pooled activations, nats.
        normalised_entropy: [L] the same divided by ln M.
        gini: [L] Gini coefficient of the pooled activations.
    """

    kind: Literal["routing"] = "routing"
    round: int = Field(ge=0)
    layers: int
    experts: int
    clients: list[int]
    frequency: list[list[list[float]]]
    entropy: list[float]
    normalised_entropy: list[float]
    gini: list[float]

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        if len(self.frequency) != len(self.clients):
            raise ValueError(f"frequency has {len(self.frequency)} rows for {len(self.clients)} clients")
        for client in self.frequency:
            if len(client) != self.layers or any(len(layer) != self.experts for layer in client):
                raise ValueError(f"frequency of a client is not {self.layers} layers × {self.experts} experts")
        if {len(self.entropy), len(self.normalised_entropy), len(self.gini)} != {self.layers}:
            raise ValueError(f"entropy, normalised_entropy and gini must have {self.layers} values each")
        return self


class PartitionRecord(_Row):
    """The distribution of the data over the clients; the content of `partition.json`.

    Attributes:
        labels: The labels that the partition is drawn over: classes, categories or tasks.
        counts: [clients, labels] examples of a label that a client holds.
        split: Split name -> [clients] examples of that split.
        dropped: Why examples of the source were left out -> how many.
        cut: How many of the clients' training `texts` lose a part of their `prompts` or `responses` to
            `data.max_length`, and of the `scored_prompts` to that and `evaluation.max_new_tokens`; empty if the texts
            are on other machines.
        digest: SHA-256 of the clients' examples (`PreparedData.digest`); empty if they are on other machines.
    """

    labels: list[str]
    counts: list[list[int]]
    split: dict[str, list[int]] = Field(default_factory=dict)
    dropped: dict[str, int] = Field(default_factory=dict)
    cut: dict[str, int] = Field(default_factory=dict)
    digest: str = ""

    @model_validator(mode="after")
    def _shapes_agree(self) -> Self:
        for client, row in enumerate(self.counts):
            if len(row) != len(self.labels):
                raise ValueError(f"client {client} has {len(row)} counts for {len(self.labels)} labels")
        return self


Record = (
    RoundRecord | ClientRecord | EvaluationRecord | RoutingRecord | ObservationRecord | PrivacyRecord | TrafficRecord
)
_ANY_RECORD: TypeAdapter[Record] = TypeAdapter(Annotated[Record, Field(discriminator="kind")])


class RunLog:
    """The append-only `metrics.jsonl` of a run folder.

    A line that a killed process left incomplete is never read, and is dropped by the next append.
    """

    FILE: ClassVar[str] = "metrics.jsonl"

    def __init__(self, folder: Path) -> None:
        self.path = folder / self.FILE

    def append(self, *records: Record) -> None:
        """Writes the records and waits until they are on disk.

        Raises:
            FedGuildError: they cannot be written (disk full, no permission); the earlier lines are kept.
        """
        try:
            make_folder(self.path.parent)
            with open(self.path, "a+b", buffering=0, opener=_private) as stream:
                chained.append(stream, (record.model_dump_json() for record in records))
        except OSError as error:
            raise FedGuildError(
                f"Cannot write {self.path}: {error.strerror or error}.",
                "The records before it are untouched; free some space or check the permissions, then resume.",
            ) from error

    def read(self) -> list[Record]:
        """Returns every complete record in the order of writing; none if there is no file.

        Raises:
            CheckpointError: a complete line is damaged.
        """
        return [record for record, _ in self._lines()]

    def follow(self, *kinds: type[Record]) -> FollowedLog:
        """Returns a reader of the present and future records of some kinds."""
        return FollowedLog(self.path, kinds)

    @property
    def seal(self) -> str:
        """The seal of the last line, which identifies the whole log."""
        return chained.seal_of(self.path)

    @contextmanager
    def truncating_after(self, round: int, seal: str | None = None) -> Iterator[None]:
        """Drops the records of every round after `round`, atomically and at the end of the block.

        The block is entered only if the log can be truncated.

        Args:
            round: The last round whose records are kept.
            seal: The log's seal after that round, if it is known. Everything after it is dropped too, such as the
                scores of a run that was killed after it ended early and before their checkpoint.

        Raises:
            CheckpointError: a complete line that is not dropped is damaged, or records of a kept round are missing from
                the end.
            FedGuildError: the file cannot be written; its content is unchanged.
        """
        if not self.path.exists() and seal in (None, chained.START):
            yield
            return
        kept = [content for record, content in self._lines(seal) if record.round <= round]
        lines, seals = _chain(kept, chained.START)
        if seal is not None and seal not in seals:
            raise CheckpointError(
                f"{self.path} does not end round {round} with the record that it had when the round was complete: "
                "records are missing.",
                "Restore the file, or go back to an earlier round with `fedguild resume FOLDER --round N`.",
            )
        yield
        write_bytes(self.path, b"".join(lines if seal is None else lines[: seals.index(seal)]))

    def _lines(self, last: str | None = None) -> list[tuple[Record, bytes]]:
        """Returns every complete record with its line, without its seal; none after the line with the seal `last`."""
        content = self.path.read_bytes() if self.path.exists() else b""
        lines = content.split(b"\n")[:-1]
        records, seal = [], chained.START
        begun = False
        for number, line in enumerate(lines, start=1):
            if seal == last:
                break
            begun = begun or chained.is_sealed(line)
            if begun:
                try:
                    line, seal = chained.unsealed(line, seal)
                except ValueError as error:
                    if not chained.is_sealed(line):
                        self._parse(line, number)
                    raise self._damaged(number, str(error)) from error
            records.append((self._parse(line, number), line))
        return records

    def _damaged(self, number: int, fault: str) -> CheckpointError:
        return CheckpointError(
            f"{self.path}, line {number} is not a record of a run: {fault}.",
            "The file was damaged or edited; restore it, or remove that line and those after it and go back to an "
            "earlier round with `fedguild resume FOLDER --round N`.",
        )

    def _parse(self, line: bytes, number: int) -> Record:
        try:
            return _ANY_RECORD.validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            raise self._damaged(number, f"{f'{where}: ' if where else ''}{first['msg']}") from error


class FollowedLog:
    """The records of some kinds of a log that another process writes, each once.

    Seals are not checked, and a damaged line is skipped: `RunLog.read` reports it.
    """

    def __init__(self, path: Path, kinds: Iterable[type[Record]]) -> None:
        self._tail = Tail(path)
        self._wanted = tuple(f'{{"kind":"{kind.model_fields["kind"].default}"'.encode() for kind in kinds)
        """What else a log holds (expert activations above all) may be most of it, and is not parsed."""

    def read(self) -> tuple[list[Record], bool]:
        """Returns the next records, and whether those that were read before are void."""
        records: list[Record] = []
        began = False
        while not records:
            lines, restarted = self._tail.read()
            began = began or restarted
            if not lines:
                break
            for line in lines:
                if line.startswith(self._wanted):
                    with suppress(ValidationError):
                        records.append(_ANY_RECORD.validate_json(chained.content_of(line)))
        return records, began

    def close(self) -> None:
        self._tail.close()


def _chain(contents: Sequence[bytes], before: str) -> tuple[list[bytes], list[str]]:
    """Returns sealed lines, and the seals: `before`, then that of each line."""
    lines, seals = [], [before]
    for content in contents:
        line, seal = chained.sealed(content.decode(), seals[-1])
        lines.append(line)
        seals.append(seal)
    return lines, seals


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, PRIVATE_FILE)
