"""Promises of the protocol, proved for every registered method: one table, one proof each.

`CASES` says under which small settings each method is looked at; a registered method that is not
in it fails. The proofs know nothing of any method.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core import layout
from fedguild.core.payload import Payload
from fedguild.data.batches import SlotBatch
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import Backbone
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment, promises
from fedguild.server import checkpoint
from fedguild.server.method import Method, Upload, excerpt_of
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.runs.runs import Killed, assert_same, ended, kill_at, save_model, small_config

SGD_STEP = TrainingSettings.model_validate(promises.ONE_STEP)
TEN_STEPS = TrainingSettings(optimizer="adam", learning_rate=0.01, batch_size=2, steps=10, max_grad_norm=None)
CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, MIDDLE, 3), client(3, SMALL, 6))
"""Every client has examples of other lengths than the others, so that a pass over several is padded."""


@dataclass(frozen=True)
class Case:
    """Small settings of a method.

    The fields with a default say what few methods do; the test that needs one of them names it when it fails.

    Attributes:
        options: The method's options.
        family: A family of `tests.backbones`.
        refuses: Models of `tests/methods/test_defaults.py` that the method refuses, beside the dense ones where it
            needs experts.
        mixes: Whether a client uses a mixture of what its slot held and of what it keeps, tested in the method's own
            file.
        runs_whole: Whether a client trains on from a part of a global model that it runs whole.
        is_product: Whether the aggregate is a product, of which noise as large as in tests makes anything.
        reads_backbone: Whether a client also reads its examples by the backbone alone, outside its slots.
        secure: The options under which secure rounds are compared with plain ones; None for `options`.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    family: str = "olmoe"
    refuses: frozenset[str] = frozenset()
    mixes: bool = False
    runs_whole: bool = False
    is_product: bool = False
    reads_backbone: bool = False
    secure: Mapping[str, Any] | None = None


_EVERYTHING = ["attention", "router", "experts"]
_SIGMOID = frozenset({"deepseek-v3"})
"""Whose routers are no softmax."""
_ENCODER_DECODER = frozenset({"switch-base-16"})
_MOLE = {"rank": 2, "experts": 6, "active_experts": 2, "experts_per_client": 4, "embedding_share": 0.3}
CASES = {
    "a3smoe": Case({"rank": 2, "targets": _EVERYTHING}),
    "fdlora": Case(
        {"rank": 2, "synchronise_every": 2, "held_out": 0.3, "fusion_batches": 2, "fusion_budget": 3},
        "llama",
        mixes=True,
    ),
    "fdlora on experts": Case(
        {"rank": 2, "targets": ["q_proj", "experts"], "held_out": 0.3, "dropout": 0.0}, mixes=True
    ),
    "fedalign-moe": Case({"rank": 2, "targets": ["attention"]}),
    "fedalign-moe with full experts": Case({"experts": "full", "gate": "averaged"}),
    "fedamole": Case(_MOLE, "llama"),
    "fedamole with vanilla routers": Case({**_MOLE, "router": "vanilla", "assignment": "random"}, "llama"),
    "fedavg": Case({"rank": 2, "gate": "lora", "targets": ["attention"]}),
    "fedavg on full experts": Case({"experts": "full", "personal": True}),
    "fedavg on a dense model": Case({"rank": 2, "gate": "none", "experts": "none", "targets": ["attention"]}, "llama"),
    "fed-sb": Case({"rank": 2, "targets": _EVERYTHING, "step_size": 0.05}),
    "fed-sb from sketches": Case({"rank": 2, "targets": _EVERYTHING, "step_size": 0.05, "start": "sketch"}),
    "fed-sb from whole gradients": Case(
        {"rank": 2, "targets": ["attention"], "start": "dense", "step_size": 0.05, "weights": "uniform"}, "llama"
    ),
    "fed-sb from random factors": Case({"rank": 3, "start": "random", "send_basis": "always"}),
    "fedit": Case({"rank": 3, "targets": _EVERYTHING, "rank_by_budget": True}, secure={"rank": 2}),
    "fedit with the budget's experts": Case({"rank": 2, "active_experts": "budget"}),
    "fedit with personal adapters": Case({"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "personal": True}, "llama"),
    "fedprox": Case({"rank": 2, "mu": 0.5, "targets": ["attention"]}),
    "fedprox on full experts": Case({"experts": "full", "gate": "lora", "personal": True}),
    "fedmoe": Case(
        {"rank": 2, "stage_one_rounds": 1, "held_out": 0.4, "memory": {"small": 0.75}, "patience": 1},
        refuses=_SIGMOID,
        secure={
            "rank": 2,
            "stage_one_rounds": 1,
            "memory": {"small": 0.75},
            "memory_share": 1.0,
            "patience": 1,
            "gain": "loss",
        },
    ),
    "fedmoe in its first stage": Case({"rank": 2, "targets": [], "gain": "loss", "held_out": 0.4}, "mixtral"),
    "fedprompt": Case({"tokens": 3}, "llama", refuses=_ENCODER_DECODER),
    "fedptuning": Case({"tokens": 3, "width": 8}, "llama", refuses=_ENCODER_DECODER),
    "fedex-lora": Case({"rank": 2, "targets": _EVERYTHING}),
    "fedsa-lora": Case({"rank": 2, "targets": _EVERYTHING}),
    "ffa-lora": Case({"rank": 2, "targets": _EVERYTHING}, secure={"rank": 2}),
    "ffa-lora on a dense model": Case(
        {"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "weights": "uniform"}, "llama"
    ),
    "flame": Case({"rank": 2, "targets": _EVERYTHING}, secure={"rank": 2}),
    "flame by steps": Case({"rank": 2, "rescaler": "shared", "frequency": "step"}),
    "flex": Case({"rank": 2, "graft_rank": 2, "selection_examples": 3}),
    "flex that mixes": Case({"rank": 2, "graft_rank": 3, "combine": "mix", "targets": ["q_proj", "router"]}),
    "flexlora": Case({"rank": 3, "targets": _EVERYTHING}),
    "flexlora on a dense model": Case({"rank": 4, "targets": ["attention", "mlp"], "dropout": 0.2}, "llama"),
    "guild": Case({"rank": 2, "targets": _EVERYTHING}),
    "hfedmoe": Case({"rank": 2, "experts": {"small": 0.25}, "threshold": 0.6}),
    "hetlora": Case(
        {"rank": 3, "targets": _EVERYTHING, "penalty_weight": 0.1},
        secure={"rank": 3, "penalty_weight": 0.1, "gamma": 0.7},
    ),
    "hetlora that prunes hard": Case({"rank": 3, "penalty_weight": 10.0, "gamma": 0.7, "norm_scope": "module"}),
    "rolora": Case({"rank": 2, "targets": _EVERYTHING}),
    "smoe-llb": Case({"rank": 2, "balance_weight": 0.5, "z_weight": 0.1}),
    "trivial": Case({"targets": _EVERYTHING}),
    "trivial on a dense model": Case({"targets": ["q_proj", "mlp"], "dropout": 0.2}, "llama"),
    "flora": Case({"targets": _EVERYTHING}, is_product=True),
    "flora on a dense model": Case({"targets": ["q_proj", "v_proj"], "scale": 2.0, "dropout": 0.3}, "llama"),
    "florist": Case({"targets": _EVERYTHING}, is_product=True),
    "florist by truncation": Case({"targets": _EVERYTHING, "next_round": "truncate"}, runs_whole=True, is_product=True),
    "pfl-moe": Case({"rank": 2, "targets": ["q_proj", "experts"]}, mixes=True, reads_backbone=True),
    "pfl-moe with embeddings": Case(
        {"rank": 2, "targets": ["q_proj"], "dropout": 0.3, "features": "embedding", "personal_epochs": 1},
        "llama",
        mixes=True,
    ),
    "ub-smoe": Case(
        {"rank": 2, "targets": _EVERYTHING, "candidates": 3},
        refuses=_SIGMOID,
        secure={"rank": 2, "targets": ["attention", "experts"]},
    ),
    "ub-smoe by tokens": Case(
        {"rank": 2, "pseudo_gradient": "token", "send_pseudo_gradient": "always", "measure_cosine": True}
    ),
}
"""A method's name, and after it what is particular about the settings -> the settings."""


def test_every_registered_method_has_its_case() -> None:
    missing = set(METHODS) - {label.partition(" ")[0] for label in CASES}
    assert not missing, f"Give {', '.join(sorted(missing))} small settings in CASES, so that the proofs cover it."


ALIKE = (
    *("a3smoe", "fedavg", "fedex-lora", "fedprompt", "fedprox", "fedptuning", "fedsa-lora", "ffa-lora", "flexlora"),
    *("fedit", "flex", "flora", "florist", "guild", "hetlora", "hfedmoe", "rolora", "smoe-llb", "trivial"),
)
"""Methods whose runs keep and send nothing of a kind that another's do not.

Their training beside others, their uploads and rounds without some clients are proven in `make test`; what else is
proven of a method, by whole runs and over Flower too, in `make test-long`. All others, new ones among them, have all of
it in `make test`.
"""


def cases() -> list[str]:
    """The cases of the methods that are registered."""
    return [label for label in CASES if label.partition(" ")[0] in METHODS]


def cases_variants_long() -> list[Any]:
    """The same; a method's further cases, with other options, belong to `make test-long`."""
    return [pytest.param(label, marks=pytest.mark.long if " " in label else ()) for label in cases()]


def cases_alike_long() -> list[Any]:
    """The same; so do the cases of methods like others."""
    return [pytest.param(label, marks=pytest.mark.long if " " in label or label in ALIKE else ()) for label in cases()]


WHOLE_RUNS = [pytest.param(label, marks=pytest.mark.long if label in ALIKE else ()) for label in sorted(METHODS)]


def method_of(label: str) -> Method:
    return build_method(label.partition(" ")[0], CASES[label].options)


def backbone_of(label: str, dtype: torch.dtype = torch.float32) -> Backbone:
    """The case's model, with a tokenizer that reads letters, for methods that start from a text."""
    backbone = tiny_backbone(CASES[label].family, dtype=dtype)
    backbone.tokenizer.encode = lambda text, **_: [1 + ord(letter) % 31 for letter in text]
    return backbone


def fresh(label: str, folder: Path, dtype: torch.dtype = torch.float32) -> Federation:
    """The case's federation, before its first round."""
    return Federation(backbone_of(label, dtype), method_of(label), CLIENTS, folder)


def rehearsed(label: str) -> promises.Fresh:
    """What makes the case's federation, whose clients train by one step of SGD."""

    def by_one_step(folder: Path) -> Federation:
        federation = fresh(label, folder)
        federation.settings = SGD_STEP
        return federation

    return by_one_step


def train(
    federation: Federation, state: Payload, round: int = 1, settings: TrainingSettings = SGD_STEP, cohort: int = 4
) -> list[Upload]:
    """The uploads of all clients, `cohort` of them in a pass, their memory kept."""
    return federation.train(state, round, settings=settings, cohort=cohort)


# What a real client is sent of the state


@pytest.mark.parametrize("label", cases_alike_long())
def test_a_client_has_its_model_from_what_it_is_sent(label: str, tmp_path: Path) -> None:
    promises.clients_have_their_models_from_what_they_are_sent(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_variants_long())
def test_what_a_client_is_sent_has_no_row_for_each_client(label: str, tmp_path: Path) -> None:
    """In a state of 23 clients, a number that no layer has, nothing that a client is sent is so long."""
    clients = [replace(CLIENTS[index % len(CLIENTS)], index=index) for index in range(23)]
    options = dict(CASES[label].options)
    if "experts_per_client" in options:
        options["scale_clients_per_expert"] = True
    method = build_method(label.partition(" ")[0], options)
    federation = Federation(tiny_backbone(CASES[label].family), method, clients, tmp_path)
    state = federation.start()
    sent = excerpt_of(method, state, federation.model, clients[5])
    assert not [name for name, value in sent.tensors.items() if 23 in value.shape]
    assert not [name for name in sent.tensors if "holders" in name]


# A client in a cohort gets the update that it gets alone


@pytest.mark.parametrize("label", cases_variants_long())
def test_one_step_together_and_alone(label: str, tmp_path: Path) -> None:
    promises.clients_train_alike_in_company(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_variants_long())
def test_the_passes_beside_the_training_are_counted(
    label: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token that a client reads without gradients is in its report."""
    read = []
    logits = SlotModel.logits

    def counted(model: SlotModel, batch: SlotBatch) -> Tensor:
        if not torch.is_grad_enabled():
            read.append(int(batch.mask.sum()))
        return logits(model, batch)

    monkeypatch.setattr(SlotModel, "logits", counted)
    federation = fresh(label, tmp_path)
    state = federation.start()
    for round in (1, 2):
        uploads = []
        for who in federation.clients:
            read.clear()
            (delivery,) = federation.deliver(state, round, [who.index], TEN_STEPS.model_copy(update={"steps": 2}))
            passes = 3 / 2 if CASES[label].reads_backbone else 1  # beside each two in its slot
            assert delivery.report.forward_tokens == passes * sum(read)
            assert delivery.report.seconds > 0
            assert delivery.upload is not None
            uploads.append(Upload(round, who, delivery.upload, delivery.task.download))
        state = federation.method.aggregate(state, iter(uploads))


@pytest.mark.parametrize("label", cases_alike_long())
def test_ten_steps_in_double_precision_together_and_alone(label: str, tmp_path: Path) -> None:
    """Two cohorts of two, against one after the other; figures that travel in fp32 agree to its rounding."""
    federations = [fresh(label, tmp_path / name, torch.float64) for name in ("together", "alone")]
    found = [
        train(federation, federation.start(), settings=TEN_STEPS, cohort=cohort)
        for federation, cohort in zip(federations, (2, 1), strict=True)
    ]
    for ours, theirs in zip(*found, strict=True):
        assert ours.payload.tensors.keys() == theirs.payload.tensors.keys()
        for name, value in theirs.payload.tensors.items():
            limit = 1e-8 if value.dtype is torch.float64 else 1e-6
            torch.testing.assert_close(ours.payload.tensors[name], value, rtol=limit, atol=limit)
        kept = [federation.memory.load(ours.client.name, 2).tensors for federation in federations]
        assert kept[0].keys() == kept[1].keys()
        for name, value in kept[1].items():
            torch.testing.assert_close(kept[0][name], value, rtol=1e-6, atol=1e-6)


# The backbone


@pytest.mark.parametrize("label", cases_alike_long())
def test_a_round_leaves_the_backbone_as_it_was(label: str, tmp_path: Path) -> None:
    promises.the_backbone_stays_as_it_was(rehearsed(label), tmp_path)


# The server


@pytest.mark.parametrize("label", cases_alike_long())
def test_the_state_survives_its_checkpoint(label: str, tmp_path: Path) -> None:
    promises.the_state_survives_its_checkpoint(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_variants_long())
def test_uploads_are_what_the_server_expects(label: str, tmp_path: Path) -> None:
    promises.uploads_are_as_the_server_expects(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_alike_long())
def test_aggregation_neither_depends_on_the_order_nor_holds_on_to_uploads(label: str, tmp_path: Path) -> None:
    promises.aggregation_knows_no_order_and_holds_no_upload(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_variants_long())
def test_a_round_without_some_clients(label: str, tmp_path: Path) -> None:
    promises.a_round_goes_without_some_clients(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_alike_long())
def test_an_upload_of_the_round_before_arrives_in_the_next(label: str, tmp_path: Path) -> None:
    promises.a_late_upload_counts_in_the_next_round(rehearsed(label), tmp_path)


@pytest.mark.parametrize("label", cases_alike_long())
def test_a_client_that_lost_its_memory_takes_part_again(label: str, tmp_path: Path) -> None:
    promises.a_client_may_lose_its_memory(rehearsed(label), tmp_path)


# The whole run


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Family -> the folder of a random model with a tokenizer."""
    root = tmp_path_factory.mktemp("models")
    return {family: save_model(root / family, family) for family in {case.family for case in CASES.values()}}


@pytest.mark.parametrize("label", WHOLE_RUNS)
def test_a_run_stopped_after_a_round_ends_like_one_that_was_not(
    label: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its records, its final state and what its clients keep; killed before the checkpoint of round 2."""
    monkeypatch.setattr("fedguild.runs.experiment.write_report", lambda folder: folder / "report.html")
    case = CASES[label]
    settings = [
        "evaluation.every=2",
        "evaluation.max_examples=2",
        "evaluation.clients=true",
        "evaluation.received=true",
    ]
    settings += ["federation.rounds=2", "federation.cohort_size=3"]
    config = small_config(folders[case.family], *settings)
    config = config.model_copy(update={"method": type(config.method)(name=label, **case.options)})
    if case.family == "llama":
        budgets = tuple(budget.model_copy(update={"active_experts": 0}) for budget in config.federation.budgets)
        config = config.model_copy(update={"federation": config.federation.model_copy(update={"budgets": budgets})})
    experiment.run(config, tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, "fedguild.server.checkpoint.save", 3)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "cut")
    assert checkpoint.latest(tmp_path / "cut" / layout.CHECKPOINTS) == 1
    experiment.resume(tmp_path / "cut")
    assert_same(ended(tmp_path / "cut"), ended(tmp_path / "whole"))
