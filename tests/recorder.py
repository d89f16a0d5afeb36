"""Recorder of what runs compute, so that a restructuring can be proven to change no bit.

Record on the old code, record on the new code on the same machine, compare:

    python -m tests.recorder record OLD.json [--only METHOD ...] [--jobs N] [--engines]
    python -m tests.recorder compare OLD.json NEW.json [--limit N]

Every method runs for a few rounds under small settings: on the embedded model, on a random mixture-of-experts
model with the option variants that take other paths, and on Switch and a dense Llama where it supports them. It runs
with every protection as well: secure sums, a robust mean, and differential privacy of either unit. Of each round are
stored the server state, each client's download, upload and memory (a digest of dtype, shape and bytes for a tensor,
the value of a scalar), the models that are scored, and the records of metrics.jsonl without timings, payload sizes
among them. Two more cases hold the defaults of all settings and what every preset of 0.3 resolves to.

A fact is named `round/what/who/name`, for example `2/upload/client-001/adapter/…lora_A`. What a method refuses is
recorded with the message, a case that fails with its error. `compare` exits with 1 where anything differs. `RENAMED`
and `EXPECTED` say what may.

The package is imported where it is needed: `compare` works without it, and a module that has moved fails the cases
that use it, no others.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import io
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, redirect_stdout
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

Facts = dict[str, str]
"""`round/what/who/name` -> a digest, or a value as JSON."""

RENAMED: dict[str, str] = {
    "state/merge_holders$": "state/server/merge_holders",
    "state/rescaler/([^/]+)/": r"state/budget/\1/rescaler/",
    "state/figures/([^/]+)/(idle|ratio)$": r"state/server/figures/\1/figures/\2",
}
"""Regular expression for the beginning of `what/name` in the old recording -> its replacement, for names that changed
on purpose, for example `{"state/pool/": "state/experts/"}`.
"""
EXPECTED: dict[str, str] = {}
"""Pattern of `case: round/what/who/name` (as a shell's) -> why this differs on purpose."""

STATE, DOWNLOAD, UPLOAD, MEMORY, RECORD, REFUSAL = "state", "download", "upload", "memory", "record", "refusal"
"""What facts are about; those about a scored model are named by its scope, `client` for a client's own."""
MEASURED = ("seconds", "phase_seconds", "peak_memory_bytes", "seal")
"""The fields of records that depend on the machine and the moment; a seal is a digest of a line with its times."""
DIGEST_DIGITS = 16
LONGEST_VALUE = 80
"""A value whose JSON is longer is stored as a digest."""


# The cases


@dataclass(frozen=True)
class Case:
    """A run.

    Attributes:
        model: `embedded` (the preset METHOD/tiny-tasks with fewer clients and steps), or a family of `tests.backbones`.
        options: The method's options, above the preset's.
        settings: Other settings of the config, above the common ones.
    """

    model: str = "embedded"
    options: Mapping[str, Any] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)


ALL_TARGETS = ["attention", "router", "experts"]
ACTIVE = {
    "embedded": (8, 4, 2, 1),
    "olmoe": (4, 3, 2, 1),
    "mixtral": (4, 3, 2, 1),
    "switch": (1,) * 4,
    "llama": (0,) * 4,
}
"""Active experts of the four budgets, by model."""
RANKS = {"embedded": (20, 12, 8, 6)}
SMALL_RANKS = (3, 2, 2, 1)
SHORT: Mapping[str, Any] = {
    "data": {
        "options": {"train_examples": 120, "test_examples": 16, "families": ["sum", "reverse", "topic"]},
        "partition": {"minimum": 6},
    },
    "federation": {"clients": 5, "rounds": 2, "cohort_size": 3, "save_total_limit": 9},
    "training": {"steps": 2, "batch_size": 2},
    "evaluation": {
        "every": 2,
        "clients": True,
        "trained": True,
        "received": True,
        "pooled": True,
        "perplexity": True,
        "max_examples": 3,
        "max_new_tokens": 2,
    },
}
"""Five clients, cohorts of three and two."""
RANDOM_MODEL: Mapping[str, Any] = {
    "data": {"dataset": "tasks", "partition": {"scheme": "dirichlet", "alpha": 0.5}},
    "federation": {"rounds": 3},
    "training": {"optimizer": "adam", "learning_rate": 0.02},
}
"""The settings that the embedded model's presets bring along."""
LITTLE_SCORED = {"evaluation": {"eval_on_start": False, "max_examples": 1, "pooled": False, "perplexity": False}}
HALF = {"federation": {"clients": 6, "rounds": 4, "client_fraction": 0.5}}
ALONE = {"federation": {"cohort_size": 1}}

FLOWER = {"federation": {"engine": {"name": "flower"}}, "evaluation": {"pooled": False}}
FLOWER_SECURE = {
    "federation": {**FLOWER["federation"], "secure": True},
    "evaluation": dict.fromkeys(("clients", "trained", "received", "pooled"), False),
}
NOISE = {"unit": "client", "clip": 0.5, "noise_multiplier": 0.3, "public": ["scores"]}
CENTRAL_NOISE = {**NOISE, "trust_model": "central"}

_MOLE = {"rank": 2, "experts": 6, "active_experts": 2, "experts_per_client": 4, "embedding_share": 0.3}
_MOLE |= {"scale_clients_per_expert": True}
_FEDMOE = {"rank": 2, "stage_one_rounds": 1, "held_out": 0.4, "memory": {"b3": 0.75, "b4": 0.75}, "patience": 1}
_FDLORA = {"rank": 2, "synchronise_every": 2, "held_out": 0.3, "fusion_batches": 2}
_GATE_ONLY = {"rank": 2, "gate": "none", "experts": "none", "targets": ["attention"]}

TWO_BUDGETS = [{"name": "large", "active_experts": 8, "rank": 20}, {"name": "small", "active_experts": 4, "rank": 8}]
"""By the names that the embedded model's preset of FedMoE knows."""

CASES: dict[str, Case] = {
    # The embedded model, at the presets' options
    "a3smoe": Case(),
    "fdlora": Case(options={"held_out": 0.3}, settings={"federation": {"rounds": 3}}),
    "fed-sb": Case(),
    "fedalign-moe": Case(),
    "fedamole": Case(options={"scale_clients_per_expert": True}),
    "fedavg": Case(),
    "fedex-lora": Case(),
    "fedit": Case(),
    "fedmoe": Case(options={"stage_one_rounds": 1, "held_out": 0.3}, settings={"federation": {"budgets": TWO_BUDGETS}}),
    "fedprompt": Case(),
    "fedprox": Case(),
    "fedptuning": Case(),
    "ffa-lora": Case(),
    "flame": Case(),
    "flexlora": Case(),
    "flora": Case(),
    "florist": Case(),
    "hetlora": Case(),
    "pfl-moe": Case(options={"gate_epochs": 1}),
    "smoe-llb": Case(),
    "trivial": Case(),
    "ub-smoe": Case(),
    # Option variants, on random models
    "a3smoe, router": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS}),
    "fdlora, experts": Case("olmoe", {**_FDLORA, "targets": ["q_proj", "experts"], "dropout": 0.0}),
    "fedalign-moe, lora": Case("olmoe", {"rank": 2, "targets": ["attention"]}),
    "fedalign-moe, full experts": Case("olmoe", {"experts": "full", "gate": "averaged"}),
    "fedalign-moe, uploaded gates": Case(
        "olmoe", {"rank": 2, "gate": "uploaded", "divergence": "bernoulli", "aggregation": "index"}
    ),
    "fedalign-moe, by size": Case("olmoe", {"rank": 2, "aggregation": "size", "consistency_weights": False}),
    "fedalign-moe, products": Case(
        "olmoe", {"rank": 2, "direction": "product", "adaptive_weights": False, "fixed_threshold": 0.2}
    ),
    "fedalign-moe, no direction": Case("mixtral", {"rank": 2, "direction": "none", "statistics_tokens": 16}),
    "fedamole, vanilla": Case("olmoe", {**_MOLE, "router": "vanilla", "assignment": "random"}),
    "fedamole, noise": Case("olmoe", {**_MOLE, "privacy_eta": 5.0, "privacy_bound": 1.0, "score_scale": "hidden"}),
    "fedamole, fixed": Case("olmoe", {**_MOLE, "assignment": "fixed", "renormalise": False, "shared_expert": False}),
    "fedavg, lora gate": Case("olmoe", {"rank": 2, "gate": "lora", "targets": ["attention"]}),
    "fedavg, full experts": Case("olmoe", {"experts": "full", "personal": True}),
    "fed-sb, router": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS, "step_size": 0.05}),
    "fed-sb, sketch": Case("olmoe", {"rank": 2, "start": "sketch", "sketch_rank": 6, "step_size": 0.05}),
    "fed-sb, random": Case("olmoe", {"rank": 3, "start": "random", "send_basis": "always"}),
    "fedit, ranks by budget": Case("olmoe", {"rank": 3, "targets": ALL_TARGETS, "rank_by_budget": True}),
    "fedit, active experts by budget": Case("olmoe", {"rank": 2, "active_experts": "budget", "weights": "uniform"}),
    "fedprox, strong": Case("olmoe", {"rank": 2, "mu": 0.5, "targets": ["attention"]}),
    "fedprox, full experts": Case("olmoe", {"experts": "full", "gate": "lora", "personal": True}),
    "fedmoe, two stages": Case("olmoe", _FEDMOE, {"federation": {"rounds": 4}}),
    "fedmoe, by loss": Case("mixtral", {**_FEDMOE, "targets": [], "gain": "loss"}, {"federation": {"rounds": 4}}),
    "fedmoe, first stage": Case("olmoe", {"rank": 2, "targets": [], "gain": "loss", "held_out": 0.4}),
    "fedprompt, olmoe": Case("olmoe", {"tokens": 3}),
    "fedptuning, olmoe": Case("olmoe", {"tokens": 3, "width": 8}),
    "fedex-lora, olmoe": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS}),
    "ffa-lora, olmoe": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS}),
    "flame, olmoe": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS}),
    "flame, by steps": Case("olmoe", {"rank": 2, "rescaler": "shared", "frequency": "step"}),
    "flame, static": Case("mixtral", {"rank": 2, "rescaler": "static", "temperature": 0}),
    "flame, no rescaler": Case("olmoe", {"rank": 2, "rescaler": "none"}),
    "flexlora, olmoe": Case("olmoe", {"rank": 3, "targets": ALL_TARGETS}),
    "hetlora, olmoe": Case("olmoe", {"rank": 3, "targets": ALL_TARGETS, "penalty_weight": 0.1}),
    "hetlora, prunes hard": Case("olmoe", {"rank": 3, "penalty_weight": 10.0, "gamma": 0.7, "norm_scope": "module"}),
    "hetlora, unpruned": Case("olmoe", {"rank": 3, "pruning": False, "weights": "size", "minimum_rank": 2}),
    "smoe-llb, olmoe": Case("olmoe", {"rank": 2, "balance_weight": 0.5, "z_weight": 0.1}),
    "trivial, olmoe": Case("olmoe", {"targets": ALL_TARGETS}),
    "flora, olmoe": Case("olmoe", {"targets": ALL_TARGETS, "scale": 2.0}),
    "florist, olmoe": Case("olmoe", {"targets": ALL_TARGETS}),
    "florist, truncated": Case("olmoe", {"targets": ALL_TARGETS, "next_round": "truncate"}),
    "pfl-moe, olmoe": Case("olmoe", {"rank": 2, "targets": ["q_proj", "experts"]}),
    "pfl-moe, second round": Case(
        "olmoe", {"rank": 2, "personal_from": 2, "personal_epochs": 1, "personal_learning_rate": 0.01}
    ),
    "ub-smoe, router": Case("olmoe", {"rank": 2, "targets": ALL_TARGETS, "candidates": 3}),
    "ub-smoe, by tokens": Case(
        "olmoe", {"rank": 2, "pseudo_gradient": "token", "send_pseudo_gradient": "always", "measure_cosine": True}
    ),
    "ub-smoe, preserve": Case(
        "olmoe", {"rank": 2, "modulation": "preserve", "gating": "native", "penalty": "square", "scaling": "linear"}
    ),
    "ub-smoe, fixed phi": Case(
        "mixtral", {"rank": 2, "phi": "fixed", "penalty": "none", "scaling": "log", "pseudo_gradient_clip": None}
    ),
    "ub-smoe, plain": Case(
        "olmoe", {"rank": 2, "modulation": "none", "pseudo_gradient": "none", "utilisation_update": False}
    ),
    # An encoder-decoder with experts
    "a3smoe on switch": Case("switch", {"rank": 2, "targets": ALL_TARGETS}),
    "fedalign-moe on switch": Case("switch", {"rank": 2, "experts": "full"}),
    "fedavg on switch": Case("switch", {"experts": "full", "personal": True}),
    "fed-sb on switch": Case("switch", {"rank": 2, "targets": ALL_TARGETS, "step_size": 0.05}),
    "fedex-lora on switch": Case("switch", {"rank": 2, "targets": ALL_TARGETS}),
    "fedamole on switch": Case("switch", {**_MOLE, "targets": ["q", "v"]}),
    "fdlora on switch": Case("switch", {**_FDLORA, "targets": ["q", "v"]}),
    "fedit on switch": Case("switch", {"rank": 3, "targets": ALL_TARGETS}),
    "fedmoe on switch": Case("switch", _FEDMOE, {"federation": {"rounds": 4}}),
    "fedprox on switch": Case("switch", {"rank": 2, "mu": 0.5}),
    "ffa-lora on switch": Case("switch", {"rank": 2, "targets": ALL_TARGETS}),
    "flame on switch": Case("switch", {"rank": 2, "targets": ALL_TARGETS}),
    "flexlora on switch": Case("switch", {"rank": 3, "targets": ALL_TARGETS}),
    "flora on switch": Case("switch", {"targets": ALL_TARGETS}),
    "florist on switch": Case("switch", {"targets": ALL_TARGETS}),
    "hetlora on switch": Case("switch", {"rank": 3, "targets": ALL_TARGETS, "penalty_weight": 0.1}),
    "pfl-moe on switch": Case("switch", {"rank": 2, "targets": ["experts"]}),
    "smoe-llb on switch": Case("switch", {"rank": 2}),
    "trivial on switch": Case("switch", {"targets": ALL_TARGETS}),
    "ub-smoe on switch": Case("switch", {"rank": 2, "candidates": 1}),
    # A dense model
    "fdlora on llama": Case("llama", _FDLORA),
    "fedamole on llama": Case("llama", _MOLE),
    "fedavg on llama": Case("llama", _GATE_ONLY),
    "fed-sb on llama": Case(
        "llama", {"rank": 2, "targets": ["attention"], "start": "dense", "step_size": 0.05, "weights": "uniform"}
    ),
    "fedex-lora on llama": Case("llama", {"rank": 2, "targets": ["attention", "mlp"]}),
    "fedit on llama": Case("llama", {"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "personal": True}),
    "fedprompt on llama": Case("llama", {"tokens": 3, "personal": True}),
    "fedprox on llama": Case("llama", {**_GATE_ONLY, "mu": 0.5}),
    "fedptuning on llama": Case("llama", {"tokens": 3, "width": 8, "personal": True}),
    "ffa-lora on llama": Case("llama", {"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "weights": "uniform"}),
    "flexlora on llama": Case("llama", {"rank": 4, "targets": ["attention", "mlp"], "dropout": 0.2}),
    "flora on llama": Case("llama", {"targets": ["q_proj", "v_proj"], "scale": 2.0, "dropout": 0.3}),
    "florist on llama": Case("llama", {"targets": ["attention"], "dropout": 0.1}),
    "hetlora on llama": Case("llama", {"rank": 3, "targets": ["attention", "mlp"], "dropout": 0.1}),
    "pfl-moe on llama": Case(
        "llama", {"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "features": "embedding", "personal_epochs": 1}
    ),
    "trivial on llama": Case("llama", {"targets": ["q_proj", "mlp"], "dropout": 0.2}),
    # Half of the clients in a round: memories grow old, merges and buffers are sent late
    "fdlora, half": Case("llama", _FDLORA, HALF),
    "fed-sb, half": Case("olmoe", {"rank": 2, "step_size": 0.05}, HALF),
    "fedalign-moe, half": Case("olmoe", {"rank": 2}, HALF),
    "fedamole, half": Case("llama", _MOLE, HALF),
    "fedavg, half": Case("olmoe", {"rank": 2, "personal": True}, HALF),
    "fedex-lora, half": Case("olmoe", {"rank": 2}, HALF),
    "fedit, half": Case("olmoe", {"rank": 2, "personal": True}, HALF),
    "fedmoe, half": Case("olmoe", _FEDMOE, HALF),
    "ffa-lora, half": Case("olmoe", {"rank": 2}, HALF),
    "flame, half": Case("olmoe", {"rank": 2}, HALF),
    "flora, half": Case("olmoe", {}, HALF),
    "florist, half": Case("olmoe", {}, HALF),
    "hetlora, half": Case("olmoe", {"rank": 3, "penalty_weight": 1.0}, HALF),
    "pfl-moe, half": Case("olmoe", {"rank": 2}, HALF),
    "trivial, half": Case("olmoe", {}, HALF),
    "ub-smoe, half": Case("olmoe", {"rank": 2}, HALF),
    # One client at a time
    "fedalign-moe, alone": Case("olmoe", {"rank": 2}, ALONE),
    "fedamole, alone": Case("llama", _MOLE, ALONE),
    "fedmoe, alone": Case("olmoe", _FEDMOE, ALONE),
    "flame, alone": Case("olmoe", {"rank": 2}, ALONE),
    "pfl-moe, alone": Case("llama", {"rank": 2, "targets": ["q_proj"]}, ALONE),
    "ub-smoe, alone": Case("olmoe", {"rank": 2}, ALONE),
    # Other settings of the run
    "fedit, bf16": Case(settings={"federation": {"wire_dtype": "bf16"}}),
    "flame, int8": Case(settings={"federation": {"wire_dtype": "int8"}}),
    "ub-smoe, int8": Case(settings={"federation": {"wire_dtype": "int8"}}),
    "florist, bf16": Case(settings={"federation": {"wire_dtype": "bf16"}}),
    "fedit, epochs": Case(
        "olmoe",
        {"rank": 2},
        {
            "training": {
                "optimizer": "adamw",
                "steps": None,
                "epochs": 0.6,
                "gradient_accumulation_steps": 2,
                "betas": [0.8, 0.95],
                "eps": 1e-5,
                "weight_decay": 0.1,
                "lr_scheduler": "cosine",
                "warmup": 0.3,
                "round_decay": 0.5,
                "max_grad_norm": 0.1,
            },
            "data": {"partition": {"scheme": "power_law", "alpha": 1.0}, "split": {"test_source": "corpus"}},
        },
    ),
    "flame, sgd": Case(
        "olmoe",
        {"rank": 2},
        {
            "federation": {"clients": 3},
            "training": {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01, "lr_scheduler": "linear"},
            "data": {
                "partition": {"scheme": "label"},
                "split": {"max_train_samples": 9, "max_test_samples": 4},
                "max_length": 24,
            },
            "evaluation": {"active_experts": "method", "answer_mode": "generation", "split": "validation"},
        },
    ),
    "fedit, rejected": Case(
        "olmoe",
        {"rank": 3, "rank_by_budget": True},
        {
            "federation": {
                "max_update_norm": 7.0,
                "client_fraction": 0.8,
                "quorum": 0.01,
                "over_selection": 0.3,
                "retries": 1,
            },
            "evaluation": {"length_normalization": "sum"},
            "seed": 3,
        },
    ),
    # Protections by themselves and together
    "fedit, norm factor": Case(settings={"federation": {"norm_factor": 1.05}}),
    "fedit, trimmed mean": Case(settings={"federation": {"aggregator": "trimmed_mean"}}),
    "fedit, clipped": Case(settings={"federation": {"aggregator": "clipped", "max_update_norm": 40.0}}),
    "fedit, secure noise": Case(settings={"federation": {"secure": True}, "privacy": NOISE}),
    "ffa-lora, secret sampling": Case(
        settings={"federation": {"client_fraction": 0.6}, "privacy": {**CENTRAL_NOISE, "sampling": "secret"}}
    ),
    "flame, norm factor": Case("olmoe", {"rank": 2}, {"federation": {"norm_factor": 1.05}}),
    "flame, secure zeros": Case("olmoe", {"rank": 2}, {"federation": {"secure": True, "secure_unheld": "zeros"}}),
    "hetlora, secure share": Case("olmoe", {"rank": 3}, {"federation": {"secure": True, "max_update_norm": 7.0}}),
    # Real clients, by messages in this process
    "fedit, flower": Case(settings=FLOWER),
    "fedit, flower secure": Case(settings=FLOWER_SECURE),
    "fedmoe, flower": Case("olmoe", _FEDMOE, FLOWER),
    "flame, flower": Case("olmoe", {"rank": 2}, FLOWER),
    "ub-smoe, flower": Case("olmoe", {"rank": 2}, FLOWER),
}
"""A method's name, and after it the particulars -> the run. A method without a case runs as its preset says."""
PROTECTED: dict[str, Mapping[str, Any]] = {
    "secure": {"federation": {"secure": True, "secure_disclose": ["activation", "validation"]}},
    "median": {"federation": {"aggregator": "median"}},
    "central noise": {"privacy": CENTRAL_NOISE},
    "local noise": {"privacy": NOISE},
    "private examples": {"privacy": {**NOISE, "unit": "example", "public": ["sizes", "scores"]}},
}
"""With each of these every method runs once more."""
ON_RAY = {"federation": {"engine": {"name": "ray"}}}
ENGINES = {
    "fedit, ray": Case(settings=ON_RAY),
    "flame, ray": Case("olmoe", {"rank": 2}, ON_RAY),
    "fedit, ray noise": Case(settings={**ON_RAY, "privacy": NOISE}),
}
"""The cases of `--engines`, which take longer."""


def method_of(label: str) -> str:
    """Returns the method's name, with which a case's label begins."""
    return label.replace(",", " ").split()[0]


def config_settings(label: str, models: Path) -> dict[str, Any]:
    """Returns a case's settings, as its YAML file holds them."""
    name = method_of(label)
    case = {**CASES, **ENGINES}.get(label) or CASES.get(name, Case())
    ranks = RANKS.get(case.model, SMALL_RANKS)
    budgets = [
        {"name": f"b{number}", "active_experts": active, "rank": rank}
        for number, (active, rank) in enumerate(zip(ACTIVE[case.model], ranks, strict=True), start=1)
    ]
    method = {"name": name, **case.options}
    settings = merged(SHORT, {"method": method, "model": {"dtype": "float32", "device": "cpu"}})
    if case.model == "embedded":
        settings["extends"] = f"{name}/tiny-tasks"
    else:
        settings = merged(settings, merged(RANDOM_MODEL, {"model": {"path": str(models / case.model)}}))
    settings = merged(settings, merged({"federation": {"budgets": budgets}}, case.settings))
    protection = PROTECTED.get(label.removeprefix(f"{name}, "))
    return merged(settings, merged(LITTLE_SCORED, protection)) if protection else settings


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested settings with others on top."""
    return {
        **below,
        **{
            key: merged(below[key], value)
            if isinstance(value, Mapping) and isinstance(below.get(key), Mapping)
            else value
            for key, value in above.items()
        },
    }


def save_models(folder: Path) -> Facts:
    """Writes the random models that the cases need, each with a byte-level tokenizer; returns their digests."""
    from transformers.utils import logging

    from tests.backbones import tiny_model
    from tools.tiny.tokenizer import train_tokenizer

    logging.disable_progress_bar()
    facts: Facts = {}
    for family in sorted({case.model for case in CASES.values()} - {"embedded"}):
        tokenizer = train_tokenizer(["The quick brown fox."])
        tokens = {"pad_token_id": tokenizer.pad_token_id, "eos_token_id": tokenizer.eos_token_id}
        sizes: dict[str, Any] = {"max_position_embeddings": 1024, "initializer_range": 0.2}
        if family == "switch":
            sizes = {"initializer_factor": 1.0, "expert_capacity": 1024}
        model = tiny_model(family, vocab_size=len(tokenizer), **sizes, **tokens)
        model.save_pretrained(folder / family)
        tokenizer.save_pretrained(folder / family)
        facts |= payload_facts(f"0/model/{family}", model.state_dict(), {})
    return facts


# What a run leaves


def record_run(label: str, models: Path) -> Facts:
    """Runs a case in a folder of its own and returns its facts."""
    from fedguild.client.memory import ClientMemory
    from fedguild.config import load_config
    from fedguild.core.errors import ConfigError
    from fedguild.engines.local import LocalEngine
    from fedguild.federation.testing import drive
    from fedguild.runs import experiment, scoring
    from fedguild.server import checkpoint

    experiment.write_report = lambda folder: folder / "report.html"  # which takes longer than the run
    facts: Facts = {}
    with tempfile.TemporaryDirectory() as root, pytest.MonkeyPatch.context() as patch:
        path = Path(root) / "case.yaml"
        path.write_text(json.dumps(config_settings(label, models)))
        folder = Path(root) / "run"
        patch.setattr(LocalEngine, "train", recording(LocalEngine.train, facts))
        patch.setattr(scoring, "_models", recording_models(scoring._models, facts))
        patch.setattr(scoring, "_scored", recording_models(scoring._scored, facts))
        try:
            config = load_config(str(path))
            if config.federation.engine.name == "flower":
                with redirect_stdout(io.StringIO()):
                    driven = drive(config, folder, server_evaluation=config.federation.secure)
                if driven.error is not None:
                    raise driven.error
                folder = driven.folder
            else:
                experiment.run(config, folder)
        except ConfigError as refusal:
            return {f"0/{REFUSAL}/config/message": refusal.message}
        clients = [f"client-{index:03d}" for index in range(config.federation.clients)]
        fingerprint = load_config(str(folder / "config.yaml")).fingerprint()
        for number in range(config.federation.rounds + 1):
            state = checkpoint.load(folder / "checkpoints", number, fingerprint=fingerprint).state
            facts |= payload_facts(f"{number}/{STATE}/server", state.tensors, state.scalars)
            for client in clients if number else ():
                kept = ClientMemory(folder / "clients").load(client, number + 1)
                facts |= payload_facts(f"{number}/{MEMORY}/{client}", kept.tensors, kept.scalars)
        facts |= value_facts(f"0/{RECORD}/partition", json.loads((folder / "partition.json").read_text()))
        facts |= record_facts((folder / "metrics.jsonl").read_text())
    return facts


def recording(train: Callable[..., Iterator[Any]], facts: Facts) -> Callable[..., Iterator[Any]]:
    """Returns an engine's `train` that also notes each download, and each upload as the client hands it over."""

    @functools.wraps(train)
    def noting(*arguments: Any, **named: Any) -> Iterator[Any]:
        for task in next(filter(are_tasks, [*arguments, *named.values()]), ()):
            facts.update(task_facts(DOWNLOAD, task, task.download))
        for delivery in train(*arguments, **named):
            if delivery.upload is not None:
                facts.update(task_facts(UPLOAD, delivery.task, delivery.upload))
            yield delivery

    return noting


def recording_models(compute: Callable[..., Any], facts: Facts) -> Callable[..., Any]:
    """Returns a function of the scoring that also notes the models that it returns or gets, by scope and round."""

    @functools.wraps(compute)
    def noting(*arguments: Any, **named: Any) -> Any:
        result = compute(*arguments, **named)
        models, scope, number = models_in([result, *arguments, *named.values()])
        for name, _, deployment in () if scope == "pooled" else models:  # those received
            prefix = f"{number}/{scope}/{name}"
            facts.update(payload_facts(prefix, deployment.tensors, {"active_experts": deployment.plan.active_experts}))
            facts.update(payload_facts(f"{prefix}/merged", deployment.merged, {}))
        return result

    return noting


def models_in(values: Sequence[Any]) -> tuple[Sequence[Any], str, int]:
    """Returns the models among a function's result and arguments, their scope and their round, wherever they stand."""
    flat = [part for value in values for part in (value if is_where(value) else [value])]
    models = next(value for value in flat if isinstance(value, list) and all(map(is_model, value)))
    scope = next(value for value in flat if isinstance(value, str))
    return models, scope, next(value for value in flat if isinstance(value, int))


def is_where(value: Any) -> bool:
    """Returns whether a value says what is scored: (scope, round, split)."""
    return isinstance(value, tuple) and bool(value) and isinstance(value[0], str)


def is_model(value: Any) -> bool:
    """Returns whether a value is a model as the scoring names it: (name, budget, deployment)."""
    return isinstance(value, tuple) and hasattr(value[-1], "merged")


def are_tasks(argument: Any) -> bool:
    """Returns whether an argument of `train` is the sequence of tasks, wherever it stands."""
    return isinstance(argument, Sequence) and all(hasattr(task, "download") for task in argument)


def task_facts(what: str, task: Any, payload: Any) -> Facts:
    """Returns the facts of a payload that crossed a client's boundary."""
    return payload_facts(f"{task.round}/{what}/client-{task.client.index:03d}", payload.tensors, payload.scalars)


def payload_facts(prefix: str, tensors: Mapping[str, Tensor], scalars: Mapping[str, Any]) -> Facts:
    """Returns a digest of each tensor, and each scalar's value."""
    facts = {f"{prefix}/{name}": digest_of_tensor(tensor) for name, tensor in tensors.items()}
    return facts | {f"{prefix}/{name}": shortened(value) for name, value in scalars.items()}


def record_facts(lines: str) -> Facts:
    """Returns the fields of all records but the measured ones; a record is named by its place in its round and kind."""
    facts: Facts = {}
    seen: Counter[tuple[int, str]] = Counter()
    for record in map(json.loads, lines.splitlines()):
        round, kind = record.pop("round"), record.pop("kind")
        comparable = {name: value for name, value in record.items() if name not in MEASURED}
        facts |= value_facts(f"{round}/{RECORD}/{kind}-{seen[round, kind]:03d}", comparable)
        seen[round, kind] += 1
    return facts


def value_facts(prefix: str, values: Mapping[str, Any]) -> Facts:
    """Returns the fields of an object, those of mappings in it one by one."""
    facts: Facts = {}
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            facts |= value_facts(f"{prefix}/{name}", value)
        else:
            facts[f"{prefix}/{name}"] = shortened(value)
    return facts


def shortened(value: Any) -> str:
    """Returns a value as JSON, or a digest of it where that is long."""
    text = json.dumps(value, sort_keys=True)
    return text if len(text) <= LONGEST_VALUE else f"{text[:40]}… {digest(text.encode())}"


def digest_of_tensor(tensor: Tensor) -> str:
    """Returns dtype, shape and a digest of the bytes, for example `float32[2, 3] 0123456789abcdef`."""
    import torch

    plain = tensor.detach().cpu().contiguous()
    content = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
    return f"{str(plain.dtype).removeprefix('torch.')}{list(plain.shape)} {digest(content)}"


def digest(content: bytes) -> str:
    """Returns the beginning of the SHA-256 of some bytes."""
    return hashlib.sha256(content).hexdigest()[:DIGEST_DIGITS]


# What needs no run


def defaults() -> Facts:
    """Returns the default of every option of every method, and of every other setting."""
    from fedguild.config import load_config
    from fedguild.config.renamed import with_old_names
    from fedguild.methods import build_method

    facts: Facts = {}
    for name in sorted({method_of(label) for label in CASES}):
        facts |= value_facts(f"0/options/{name}", build_method(name, {}).settings.model_dump(mode="json"))
    with tempfile.TemporaryDirectory() as root:
        path = Path(root) / "defaults.yaml"
        path.write_text("method: fedit")
        return facts | value_facts("0/config/all", with_old_names(load_config(str(path)).model_dump(mode="json")))


def presets() -> Facts:
    """Returns what every preset of 0.3 resolves to."""
    from fedguild.config import load_config
    from fedguild.config.renamed import with_old_names

    facts: Facts = {}
    for name in json.loads((Path(__file__).parent / "config" / "presets_of_0.3.json").read_text("utf-8"))["presets"]:
        facts |= value_facts(
            f"0/preset/{name.replace('/', ':')}", with_old_names(load_config(name).model_dump(mode="json"))
        )
    return facts


WITHOUT_RUN: dict[str, Callable[[], Facts]] = {"defaults": defaults, "presets": presets}


# Recording and comparing


def record(output: Path, only: Sequence[str], jobs: int, *, engines: bool) -> None:
    """Records the cases of some methods, or those with these labels (all by default), in so many processes."""
    from fedguild.methods import METHODS

    protected = [f"{method}, {protection}" for method in METHODS for protection in PROTECTED]
    known = dict.fromkeys([*WITHOUT_RUN, *CASES, *METHODS, *protected, *(ENGINES if engines else ())])
    labels = [label for label in known if not only or {label, method_of(label)} & set(only)]
    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    started = time.perf_counter()
    cases: dict[str, Any] = {}
    with ExitStack() as stack:
        models = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        run: Callable[..., Iterator[dict[str, Any]]] = map
        if jobs > 1:
            run = stack.enter_context(ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn"))).map
        (cases["models"],) = run(record_models, [models])
        for label, result in zip(labels, run(record_case, labels, [models] * len(labels)), strict=True):
            cases[label] = result
            print(f"{result['seconds']:6.1f} s  {label}  {result['error'] or len(result['facts'])}", flush=True)
    output.write_text(json.dumps(cases, indent=0, sort_keys=True))
    facts = sum(len(case["facts"]) for case in cases.values())
    failed = [label for label, case in cases.items() if case["error"]]
    print(f"{len(cases)} cases, {facts} facts, {len(failed)} failed, {time.perf_counter() - started:.0f} s: {output}")


def record_case(label: str, models: Path) -> dict[str, Any]:
    """Returns a case's facts, or its error."""
    return outcome(WITHOUT_RUN.get(label) or functools.partial(record_run, label, models))


def record_models(models: Path) -> dict[str, Any]:
    """Returns the digests of the random models, which it writes."""
    return outcome(functools.partial(save_models, models))


def outcome(compute: Callable[[], Facts]) -> dict[str, Any]:
    """Returns what a function computes, its CPU time, and why it failed where it did."""
    started = time.process_time()
    facts, error = {}, ""
    try:
        facts = compute()
    except Exception as failure:
        error = f"{type(failure).__name__}: {failure}"
    return {"facts": facts, "error": error, "seconds": round(time.process_time() - started, 2)}


def compare(old: Path, new: Path, limit: int) -> int:
    """Prints every difference between two recordings, up to a limit; returns the exit status."""
    before, after = (json.loads(path.read_text()) for path in (old, new))
    shared = [label for label in before if label in after]
    differences: list[str] = []
    agreeing, failing, expected = 0, 0, Counter[str]()
    for label in shared:
        errors = [recording[label]["error"] for recording in (before, after)]
        if any(errors):
            failing += 1
            differences += [f"{label}: {errors[0] or 'ran'} -> {errors[1] or 'ran'}"] if errors[0] != errors[1] else []
            continue
        olds, news = facts_of(before[label], RENAMED), facts_of(after[label], {})
        agreeing += sum(news.get(name) == value for name, value in olds.items())
        for name in sorted(olds.keys() | news.keys()):
            if olds.get(name) == news.get(name):
                continue
            reason = next((why for pattern, why in EXPECTED.items() if fnmatchcase(f"{label}: {name}", pattern)), "")
            if reason:
                expected[reason] += 1
            else:
                differences.append(f"{label}: {name}: {olds.get(name, 'absent')} -> {news.get(name, 'absent')}")
    for difference in differences[:limit]:
        print(difference)
    if len(differences) > limit:
        print(f"… and {len(differences) - limit} more differences")
    for label, count in Counter(difference.partition(": ")[0] for difference in differences).items():
        print(f"{count:6} differences in {label}")
    for reason, count in expected.items():
        print(f"{count:6} expected differences: {reason}")
    left_out = (before.keys() | after.keys()) - set(shared)
    print(f"{len(shared)} cases ({failing} failed, {len(left_out)} more in one recording only), ", end="")
    print(f"{agreeing} facts agree, {len(differences)} differ")
    return 1 if differences else 0


def facts_of(case: Mapping[str, Any], renamed: Mapping[str, str]) -> Facts:
    """Returns a case's facts under today's names."""
    facts = {normalised(name, renamed): value for name, value in case["facts"].items()}
    if len(facts) != len(case["facts"]):
        raise ValueError("RENAMED gives two facts the same name.")
    return facts


def normalised(fact: str, renamed: Mapping[str, str]) -> str:
    """Returns a fact's name as of today."""
    round, what, who, name = fact.split("/", 3)
    for old, new in renamed.items():
        what, _, name = re.sub(f"^(?:{old})", new, f"{what}/{name}").partition("/")
    return "/".join((round, what, who, name))


def main() -> int:
    """Reads the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.recorder", description=(__doc__ or "").split("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    recorder = commands.add_parser("record")
    recorder.add_argument("output", type=Path)
    recorder.add_argument("--only", nargs="+", default=[], metavar="METHOD")
    recorder.add_argument("--jobs", type=int, default=1)
    recorder.add_argument("--engines", action="store_true", help="Run on Ray, too.")
    comparer = commands.add_parser("compare")
    comparer.add_argument("old", type=Path)
    comparer.add_argument("new", type=Path)
    comparer.add_argument("--limit", type=int, default=40)
    arguments = parser.parse_args()
    if arguments.command == "record":
        record(arguments.output, arguments.only, arguments.jobs, engines=arguments.engines)
        return 0
    return compare(arguments.old, arguments.new, arguments.limit)


if __name__ == "__main__":
    sys.exit(main())
