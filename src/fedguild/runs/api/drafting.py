"""A first config from six answers: checked, with a comment on every line that is likely to be changed."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fedguild.config import Config, load_config
from fedguild.config.loading import default_name
from fedguild.config.yaml_reading import parse
from fedguild.core.errors import ConfigError, DataError, FedGuildError, nearest
from fedguild.data.corpora import CORPORA, corpus_spec
from fedguild.data.corpora.source import HubDataset, Source, is_here, locate
from fedguild.data.corpora.table import read_table
from fedguild.data.layouts import ACCEPTED, COLUMNS, recognise
from fedguild.methods import METHODS
from fedguild.model.packaged import PACKAGED

if TYPE_CHECKING:
    from fedguild.model.info import ModelInfo

Where = Literal["local", "ray", "federation"]
FEWEST_ROWS = 3
"""Rows that a client needs at least: one each to train, to validate and to test on."""
LARGEST_RANK = 8


@dataclass(frozen=True)
class Data:
    """The data of a draft.

    Attributes:
        train: File, folder or hub id; None for data that comes with the corpus.
        options: Options of the corpus.
        rows: Number of training rows; None if the data is not on this machine.
        layout: What it was recognised as; empty if the data is not on this machine.
        labelled: Whether rows have labels over which a partition can be drawn.
        chat: Whether it is conversations.
    """

    corpus: str
    train: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    rows: int | None = None
    layout: str = ""
    labelled: bool = True
    chat: bool = False

    def summary(self) -> str:
        """Returns what was found, as one sentence; empty if the data was not read."""
        return "" if self.rows is None else f"{self.train}: {self.rows} rows of {self.layout}."


@dataclass(frozen=True)
class Answers:
    """The answers to the six questions.

    Attributes:
        model: A `model.path`.
        clients: Number of clients.
        budgets: Active experts of each tier of clients, or LoRA ranks for a dense model, largest first.
        method: Name of the method.
        where: Where the clients train.
    """

    model: str
    data: Data
    clients: int
    budgets: tuple[int, ...]
    method: str
    where: Where = "local"


def describe_model(path: str) -> ModelInfo | None:
    """Returns a model's description; None if its config is not on this machine.

    Raises:
        ModelError: the model is not supported.
        ConfigError: there is no such folder.
    """
    from fedguild.model.backbone import describe_config, is_at_hand

    if path.startswith(("/", ".", "~")) and not Path(path).exists():
        raise ConfigError(
            f"There is no folder {path}.", "A model is embedded, english, a hub id (owner/name) or a folder."
        )

    return describe_config(path) if is_at_hand(path) else None


def look_at_data(answer: str, columns: Mapping[str, str] | None = None) -> Data:
    """Returns the data that an answer names: a corpus, a file or folder, which is read, or a dataset on the hub.

    Args:
        answer: A name in `fedguild.data.CORPORA`, a path, or `owner/name`.
        columns: Content of a column (`instruction`, `response`, `input`, `label`) -> its name, if it is not a usual
            one.

    Raises:
        DataError: there is no such data, it cannot be read, or no column can be the instruction or the response.
    """
    named = dict(columns or {})
    if answer in CORPORA and not Path(answer).exists():
        spec = corpus_spec(answer)
        if spec.generate is None and spec.hub is None:
            raise DataError(f"The corpus '{answer}' has no dataset of its own: give a file or a folder.")
        return Data(answer)
    if "/" not in answer and not is_here(answer):
        raise DataError(f"There is no corpus, file or folder '{answer}'.", nearest(answer, CORPORA))
    where = locate(answer)
    options = {f"{key}_column": name for key, name in named.items()}
    if isinstance(where, HubDataset):
        return Data("instructions", answer, options, labelled="label" in named)
    spec = corpus_spec("instructions")
    table = read_table(Source(where, spec.train_splits))
    rows = sum(1 for _ in table.rows)
    try:
        layout = recognise(table, named)
    except DataError as error:
        keys = [key for key in ("instruction", "response") if key not in named and table.find(COLUMNS[key]) is None]
        raise DataError(
            error.message,
            f"Its {rows} rows have {', '.join(table.columns)}. Name the columns with --columns "
            f"{','.join(f'{key}=COLUMN' for key in keys or named)}. Without that, accepted: {ACCEPTED}.",
        ) from error
    return Data("instructions", answer, options, rows, str(layout), "label" in layout.columns, layout.is_chat)


def default_budgets(model: ModelInfo | None) -> tuple[int, ...]:
    """Returns the first tiers: halves of the model's active experts, or of a LoRA rank."""
    largest = model.top_k if model is not None and model.moe else LARGEST_RANK
    return tuple(largest >> step for step in range(4) if largest >> step)


def default_method(model: ModelInfo | None, budgets: tuple[int, ...]) -> str:
    """Returns the first method: FLAME for unequal budgets of experts, FlexLoRA for ranks, else FedIT."""
    if len(budgets) < 2:
        return "fedit"
    return "flame" if model is not None and model.moe else "flexlora"


def draft(answers: Answers, file: Path) -> str:
    """Returns a commented config, not yet checked, for a new `file`."""
    model, data = describe_model(answers.model), answers.data
    small = answers.model in ("embedded", "english")
    experts = bool(model is None or model.moe)
    pad = max(8, data.rows or 0)
    lines = [
        f"# Written by `fedguild init {file}`. A run of it: `fedguild run {file}`",
        f"# Its costs: `fedguild profile {file}`; who gets which data: `fedguild partition {file}`",
        "# Every setting, with its default and meaning: `fedguild presets --settings`",
        "",
        "method:",
        f"  name: {answers.method}".ljust(34) + f"# `fedguild methods {answers.method}` lists its options",
        *_method_options(answers, experts),
        "",
        "model:",
        f"  path: {_text(answers.model)}".ljust(34) + "# embedded, english, a hub id or a folder",
        *([] if small else ["  dtype: auto".ljust(34) + "# bfloat16 on a GPU, float32 on a CPU"]),
        "",
        "data:",
        f"  dataset: {data.corpus}".ljust(34) + "# `instructions` reads conversations, instructions and text",
        *([f"  train: {_text(data.train)}"] if data.train else []),
        *([f"  options: {_flow(data.options)}"] if data.options else []),
        *(_chat_lines(answers.model) if data.chat else []),
        f"  max_length: {256 if small else 512}".ljust(34) + "# longer texts lose the beginning of their prompt",
        *_partition(answers, pad),
        "",
        "federation:",
        f"  clients: {answers.clients}",
        f"  rounds: {3 if small else 10}",
        "  client_fraction: 1.0".ljust(34) + "# share of the clients that each round asks",
        "  budgets:".ljust(34) + "# tiers of clients, in turn; `share: 2` gives a tier twice as many",
        *_budgets(answers.budgets, experts),
        *(
            ["  engine: {name: ray}".ljust(34) + "# the GPUs and machines that Ray sees"]
            if answers.where == "ray"
            else []
        ),
        "",
        "training:",
        f"  optimizer: {'adam' if small else 'adamw'}",
        f"  learning_rate: {5e-3 if answers.model == 'embedded' else 2e-3 if small else 2e-4:g}",
        f"  batch_size: {8 if small else 16}",
        *(
            ["  steps: 15".ljust(34) + "# optimizer steps of a client in a round, or `epochs`"]
            if small
            else ["  epochs: 1"]
        ),
        "  round_schedule: constant".ljust(34) + "# cosine or linear: anneal the learning rate over the rounds",
        "",
        "evaluation:",
        "  every: 1".ljust(34) + "# rounds from one evaluation to the next",
        "  max_examples: 100".ljust(34) + "# null: all",
        f"  max_new_tokens: {16 if small else 128}".ljust(34) + "# longest generated answer",
    ]
    return "\n".join(lines) + "\n"


def check(text: str, file: Path) -> Config:
    """Returns a draft's config after every check that needs no network.

    Data on this machine is partitioned as in a run.

    Raises:
        FedGuildError: the method does not fit the model or the budgets, or there is too little data for the clients.
    """
    from fedguild.runs.setup import check_config, prepare_data

    config = load_config({**parse(text, str(file)), "name": default_name(file)})
    check_config(config)
    if config.data.train is None and corpus_spec(config.data.dataset).generate is None:
        return config
    if config.data.train is None or is_here(config.data.train):
        prepare_data(config)
    return config


def write(text: str, file: Path) -> None:
    """Writes a config to a new file.

    Raises:
        ConfigError: the file exists, or cannot be written.
    """
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with open(file, "x", encoding="utf-8") as stream:
            stream.write(text)
    except FileExistsError as error:
        raise ConfigError(
            f"{file} exists, and is left as it is.", "Give another name: fedguild init NAME.yaml."
        ) from error
    except OSError as error:
        raise ConfigError(f"Cannot write {file}: {error.strerror or error}.") from error


def require_method(name: str) -> None:
    if name not in METHODS:
        raise ConfigError(f"There is no method '{name}'.", nearest(name, METHODS))


def _method_options(answers: Answers, experts: bool) -> list[str]:
    from fedguild.config.reference import settings_of

    known = {option.key for option in settings_of(METHODS.load(answers.method).Settings)}
    rank = max(_ranks(answers.budgets, experts))
    lines = []
    if {"rank", "alpha"} <= known:  # without an alpha it is not LoRA's
        lines.append(f"  rank: {rank}".ljust(34) + "# LoRA rank: larger learns more and sends more")
    if "rank_by_budget" in known and len(answers.budgets) > 1 and not experts:
        lines.append("  rank_by_budget: true".ljust(34) + "# each client at its budget's rank")
    return lines


def _ranks(budgets: tuple[int, ...], experts: bool) -> list[int]:
    """Returns a LoRA rank for each tier: in proportion to its experts, or the tier itself for a dense model."""
    return [max(1, math.ceil(LARGEST_RANK * one / budgets[0])) if experts else one for one in budgets]


def _budgets(budgets: tuple[int, ...], experts: bool) -> list[str]:
    ranks = _ranks(budgets, experts)
    names = [f"b{number}" for number in range(1, len(budgets) + 1)] if len(budgets) > 1 else ["all"]
    return [
        f"    - {{name: {name}, {f'active_experts: {one}, ' if experts else ''}rank: {rank}}}"
        for name, one, rank in zip(names, budgets, ranks, strict=True)
    ]


def _partition(answers: Answers, rows: int) -> list[str]:
    fewest = FEWEST_ROWS if answers.data.rows is not None and rows < 40 * answers.clients else 16
    if not answers.data.labelled:
        return [f"  partition: {{scheme: iid, minimum: {fewest}}}".ljust(50) + "# no labels: dealt at random"]
    comment = "# smaller alpha: clients differ more"
    return [f"  partition: {{scheme: dirichlet, alpha: 0.5, minimum: {fewest}}}  {comment}"]


def _chat_lines(model: str) -> list[str]:
    """Returns the settings of conversations; a packaged model has no chat template of its own."""
    own = model in PACKAGED
    return [
        *(
            ["  chat_template: plain".ljust(34) + "# null: the model's own; or a file with a Jinja template"]
            if own
            else []
        ),
        "  train_on: all_turns".ljust(34) + "# last_turn: the last answer alone; everything: all tokens",
    ]


def _text(value: str | None) -> str:
    """Returns a text as YAML, quoted if it could be read as something else."""
    try:
        plain = parse(str(value), "") == value and "#" not in str(value)
    except FedGuildError:
        plain = False
    return str(value) if plain else json.dumps(value)


def _flow(options: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in options.items()) + "}"
