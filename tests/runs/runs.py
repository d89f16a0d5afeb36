"""Small runs on a random model: two budgets, a few clients, two steps a round."""

from __future__ import annotations

import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch

from fedguild.config import Config, load_config
from fedguild.core.layout import CHECKPOINTS, MEMORY
from fedguild.core.payload import Payload
from fedguild.measuring.log.records import Record, RunLog
from fedguild.model.backbone import Backbone
from fedguild.runs.setup import preparation
from fedguild.server import checkpoint
from tests.backbones import tiny_model
from tools.tiny.tokenizer import train_tokenizer

SETTINGS = (
    "federation.clients=4",
    "federation.rounds=3",
    "federation.budgets=[{name: large, active_experts: 4, rank: 3}, {name: small, active_experts: 1, rank: 1}]",
    "training.steps=2",
    "training.batch_size=2",
    "method.rank=3",
    "data.options={train_examples: 96, test_examples: 12, families: [sum, reverse, topic]}",
    "data.partition.minimum=4",
    "evaluation.every=1",
    "evaluation.max_new_tokens=2",
)
"""Two clients can run 4 active experts, two of them 1."""
MEASURED_FIELDS = frozenset({"seconds", "phase_seconds", "peak_memory_bytes"})
"""The fields of records that depend on the machine and on timing; all others are the same in every repetition."""


def save_model(folder: Path, family: str = "olmoe", make: Callable[..., Any] = tiny_model, **changes: Any) -> Path:
    """Writes a random model of a family with a byte-level tokenizer, as a folder of the hub."""
    tokenizer = train_tokenizer(["The quick brown fox."])
    tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
    sizes = {"vocab_size": len(tokenizer), "max_position_embeddings": 1024, "initializer_range": 0.2}
    make(family, **{**sizes, **tokens, **changes}).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_config(model: Path, *overrides: str, base: str = "flame/tiny-tasks") -> Config:
    """Returns a config of a few seconds: FLAME with a rescaler per layer, unless overridden."""
    return load_config(base, small_settings(model, *overrides))


def small_settings(model: Path, *overrides: str) -> list[str]:
    return [f"model.path={model}", "model.dtype=float32", "model.device=cpu", *SETTINGS, *overrides]


_LOADED: dict[str, Backbone] = {}


def load_models_once(monkeypatch: pytest.MonkeyPatch, *modules: str) -> None:
    """Lets `load_model` in these modules of FedGuild load every model once for all runs in this process."""
    load_model = preparation.load_model

    def load(config: Config) -> Backbone:
        key = config.model.model_dump_json()
        if key not in _LOADED:
            _LOADED[key] = load_model(config)
        return _LOADED[key]

    for module in modules:
        monkeypatch.setattr(f"fedguild.{module}.load_model", load)


def comparable(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Returns the records as plain objects, without times and memory figures.

    The result is equal for any two runs of one config and seed, interrupted or not.
    """
    return [record.model_dump(mode="json", exclude=set(MEASURED_FIELDS)) for record in records]


@dataclass(frozen=True)
class Ended:
    """What a finished run leaves behind."""

    records: list[dict[str, Any]]
    state: Payload
    memory: dict[str, bytes]


def ended(folder: Path) -> Ended:
    config = load_config(str(folder / "config.yaml"))
    saved = checkpoint.load(folder / CHECKPOINTS, config.federation.rounds, fingerprint=config.fingerprint())
    memory = {str(path.relative_to(folder)): path.read_bytes() for path in sorted((folder / MEMORY).rglob("*.memory"))}
    return Ended(comparable(RunLog(folder).read()), saved.state, memory)


def assert_same(found: Ended, expected: Ended) -> None:
    assert found.records == expected.records
    assert found.state.scalars == expected.state.scalars
    assert found.state.tensors.keys() == expected.state.tensors.keys()
    differing = [n for n, tensor in expected.state.tensors.items() if not torch.equal(found.state.tensors[n], tensor)]
    assert not differing
    assert found.memory == expected.memory


def says(text: str, *parts: str) -> None:
    """Asserts that every part is in a message, which names them all or tells nobody what to do."""
    missing = [part for part in parts if part not in text]
    assert not missing, text


class Killed(BaseException):
    """Stands for the end of the process: nothing that runs catches it."""


def kill_at(patch: pytest.MonkeyPatch, target: str, call: int, *, after: bool = False) -> None:
    """Ends the process, as it were, at the n-th call of a function, before or after it does its work."""
    owner, name = target.rsplit(".", 1)
    original = getattr(pkgutil.resolve_name(owner), name)
    calls = count(1)

    def dying(*arguments: Any, **named: Any) -> Any:
        last = next(calls) == call
        if last and not after:
            raise Killed
        result = original(*arguments, **named)
        if last:
            raise Killed
        return result

    patch.setattr(target, dying)
