"""Profile of a config, without any data, weights or device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import Config
from fedguild.config.data import GIVEN
from fedguild.core.errors import FedGuildError
from fedguild.data.corpora import corpus_spec
from fedguild.data.corpora.source import is_here
from fedguild.measuring.costs.profile import Profile, profile
from fedguild.measuring.costs.secure import session_bytes
from fedguild.measuring.costs.tiers import Workload
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import DTYPES, describe_config
from fedguild.model.info import ModelInfo
from fedguild.runs.guarantee import rules_of
from fedguild.runs.setup import budgets_of, check_fit, fitted, prepare_data, tell_fitted
from fedguild.server.method import Method, secure_form
from fedguild.server.secure_round import whole_form

EXAMPLES = 1000
"""Training examples of a client where the config does not say how many it has."""
WireDtype = Literal["fp32", "bf16"]
WIRE_DTYPES: dict[str, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16}


def profile_config(
    config: Config,
    *,
    examples: int | None = None,
    tokens: int | None = None,
    context: int | None = None,
    wire_dtype: WireDtype | None = None,
    checkpointing: bool | None = None,
    tell: Callable[[str], None] | None = None,
) -> Profile:
    """Returns the costs of a config's federation, for each tier of clients in one round.

    Args:
        config: The config; data on the hub is not read.
        examples: Training examples of a client; None for 1000; see `known_examples`.
        tokens: Tokens of one forward pass; None for `training.batch_size` sequences.
        context: Length of a sequence; None for `data.max_length`, the maximum.
        wire_dtype: The dtype as which every number on the wire is counted, as papers do; None for the bytes that
            `federation.wire_dtype` sends.
        checkpointing: Whether activations are recomputed; None for the config's setting.
        tell: Receives a line for every option whose value differs from the config or the default.

    Raises:
        ConfigError: the method's options do not fit the model or the clients.
        ModelError: there is no such model, or it lacks experts that the method needs.
    """
    model = describe_config(
        config.model.path,
        revision=config.model.revision,
        trust_remote_code=config.model.trust_remote_code,
        attention=config.model.attention,
    )
    options = {**config.method.options, **METHODS.load(config.method.name).facts.costs.bound}
    given = build_method(config.method.name, options)
    method = fitted(given, config, model)
    check_fit(method, config, model)
    budgets = budgets_of(config, model)
    if tell is not None:
        tell_fitted(given, method, tell)
    context_tokens = context or config.data.max_length
    count, rules = examples or EXAMPLES, rules_of(config)
    work = Workload(
        examples=count,
        tokens=tokens or config.training.rows * context_tokens,
        context_tokens=context_tokens,
        training=config.training,
        dtype=DTYPES.get(config.model.dtype, torch.bfloat16),
        any_dtype=config.model.dtype == "auto",
        checkpointing=config.model.gradient_checkpointing if checkpointing is None else checkpointing,
        four_bit=config.model.load_in_4bit,
        sample_rate=rules.probability(count) if rules is not None and rules.per_example else None,
        codec=config.federation.wire_dtype,
        wire_dtype=None if wire_dtype is None else WIRE_DTYPES[wire_dtype],
    )
    clients = [
        ClientInfo(index, budgets[tier.name], work.examples)
        for index, tier in enumerate(config.federation.budget_per_client())
    ]
    participants = config.federation.wanted_uploads
    counted = profile(method, model, clients, work, participants=participants, budgets=list(budgets.values()))
    if not config.federation.secure:
        return counted
    return replace(counted, session=_session(method, model, list(budgets.values()), config))


def _session(method: Method, model: ModelInfo, budgets: Sequence[Budget], config: Config) -> tuple[int, int]:
    """Returns the bytes that a client receives and sends in a round's session, the mean over rounds that alternate."""
    sessions = []
    for round_index in range(method.facts.costs.rounds, method.facts.costs.rounds + method.facts.costs.period):
        form, _ = secure_form(method, model, budgets, round_index)
        form = whole_form(form, model) if config.privacy.unit == "none" else form
        sessions.append(session_bytes(form, config.federation.wanted_uploads, config.federation.secure_share))
    down, up = (round(sum(each) / len(sessions)) for each in zip(*sessions, strict=True))
    return down, up


def known_examples(config: Config) -> int | None:
    """Returns the number of a client's training examples; None if only data on the hub has it.

    Data that is generated or on this machine is read and partitioned as for a run, and the mean over the clients is
    returned. For data on the hub, the config's limits give the maximum.
    """
    data = config.data
    generated = corpus_spec(data.dataset).generate is not None and data.train is None
    here = is_here(data.train)
    if (generated or here) and not data.partition.scheme.startswith(GIVEN):
        try:
            sizes = prepare_data(config).sizes()["train"]
        except FedGuildError:
            sizes = []  # `fedguild partition` and `run` say what is wrong with it
        if sizes:
            return max(1, round(sum(sizes) / len(sizes)))
    if data.split.max_train_samples is not None:
        return data.split.max_train_samples
    return None if data.max_samples is None else max(1, data.max_samples // config.federation.clients)
