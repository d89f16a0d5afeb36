"""Promises of the protocol, proved for every registered method: one table, one proof each.

`CASES` says under which small settings each method is looked at; a registered method that is not
in it fails. The proofs know nothing of any method.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedguild.config.training import TrainingSettings
from fedguild.core import layout
from fedguild.core.codec import decode, encode
from fedguild.core.errors import UploadError
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload
from fedguild.data.batches import SlotBatch
from fedguild.methods import METHODS, build_method
from fedguild.model.backbone import Backbone
from fedguild.model.plan import adapter_shapes
from fedguild.model.slots import SlotModel
from fedguild.runs import experiment
from fedguild.server import checkpoint
from fedguild.server.method import Method, Upload, always_sent, client_model, excerpt_of
from fedguild.server.validation import check_received, check_upload
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.runs.runs import Killed, assert_same, ended, kill_at, save_model, small_config

SGD_STEP = TrainingSettings(optimizer="sgd", learning_rate=0.5, batch_size=3, steps=1, max_grad_norm=None)
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


def train(
    federation: Federation, state: Payload, round: int = 1, settings: TrainingSettings = SGD_STEP, cohort: int = 4
) -> list[Upload]:
    """The uploads of all clients, `cohort` of them in a pass, their memory kept."""
    return federation.train(state, round, settings=settings, cohort=cohort)


def second_round(federation: Federation, settings: TrainingSettings, cohort: int) -> tuple[Payload, list[Upload]]:
    """The state after one round that all train together, and the uploads of the next, trained `cohort` at a time."""
    state = federation.start()
    state = federation.method.aggregate(state, iter(train(federation, state, settings=settings)))
    return state, train(federation, state, 2, settings, cohort)


def assert_same_tensors(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differing


def movement(sent: Upload, download: Payload) -> dict[str, dict[str, Tensor]]:
    """Part -> name -> what training changed of a tensor; the tensor itself where nothing like it was received."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in sent.payload.tensors.items():
        before = download.tensors.get(name)
        change = value.double() - before.double() if before is not None else value.double()
        found.setdefault(name.partition("/")[0], {})[name] = change
    return found


def norm(tensors: Iterator[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())


# What a real client is sent of the state


@pytest.mark.parametrize("label", cases_alike_long())
def test_a_client_has_its_model_from_what_it_is_sent(label: str, tmp_path: Path) -> None:
    """Before it ever took part and after each round, through the wire's bytes and back."""
    federation = fresh(label, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    for round in (1, 2, 3):
        for who in federation.clients:
            excerpt = excerpt_of(method, state, model, who)
            sent = Payload(*unpack(pack(excerpt.tensors, excerpt.scalars)))
            for memory in (Payload(), federation.memory.load(who.name, round)):
                found, expected = (client_model(method, one, model, who, memory) for one in (sent, excerpt))
                assert found.plan == expected.plan
                assert found.tensors.keys() <= adapter_shapes(model, found.plan).keys()
                assert_same_tensors(found.tensors, expected.tensors)
                assert_same_tensors(found.merged, expected.merged)
        state = method.aggregate(state, iter(train(federation, state, round)))


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
    """In fp32, to 1e-5 of the change of each part of an upload, in the first round and in the second."""
    together, alone = fresh(label, tmp_path / "together"), fresh(label, tmp_path / "alone")
    state = together.start()
    for round in (1, 2):
        pairs = zip(train(together, state, round), train(alone, state, round, cohort=1), strict=True)
        uploads = []
        for ours, theirs in pairs:
            download = together.method.download(state, together.model, ours.client)
            moved, expected = movement(ours, download), movement(theirs, download)
            assert ours.payload.tensors.keys() == theirs.payload.tensors.keys()
            assert ours.payload.scalars == theirs.payload.scalars
            for part, changes in expected.items():
                apart = norm(iter(moved[part][name] - change for name, change in changes.items()))
                whole = norm(iter(changes.values()))
                assert apart <= 1e-5 * whole + 1e-9, f"{ours.client.name}, {part}: {apart} of {whole}"
            kept = alone.memory.load(theirs.client.name, round + 1).tensors
            sizes = [norm(iter(part.values())) for part in (*expected.values(), kept) if part]
            assert max(sizes) > 1e-4, "the step moved nothing that the client sends or keeps"
            uploads.append(theirs)
        state = together.method.aggregate(state, iter(uploads))


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
    """Bit by bit, in its weights and in what it computes."""
    federation = fresh(label, tmp_path)
    model, tokens = federation.backbone.model, torch.arange(3, 13)[None]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        said = model(input_ids=tokens).logits
    state, _ = second_round(federation, SGD_STEP, cohort=2)
    deployed(federation, state)
    assert_same_tensors(model.state_dict(), before)
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.parameters())
    assert federation.backbone.runtime.current is None
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, said)


# The server


@pytest.mark.parametrize("label", cases_alike_long())
def test_the_state_survives_its_checkpoint(label: str, tmp_path: Path) -> None:
    """Bit by bit, and so does the round that follows from it."""
    federation = fresh(label, tmp_path)
    state = federation.start()
    for round in (1, 2):
        checkpoint.save(tmp_path / "checkpoints", round, state, fingerprint="x")
        restored = checkpoint.load(tmp_path / "checkpoints", round, fingerprint="x").state
        assert restored.scalars == state.scalars
        assert_same_tensors(restored.tensors, state.tensors)
        uploads, again = train(federation, state, round), train(federation, restored, round)
        for ours, theirs in zip(again, uploads, strict=True):
            assert_same_tensors(ours.payload.tensors, theirs.payload.tensors)
            assert ours.payload.scalars == theirs.payload.scalars
        state = federation.method.aggregate(state, iter(uploads))
        after = federation.method.aggregate(restored, iter(again))
        assert after.scalars == state.scalars
        assert_same_tensors(after.tensors, state.tensors)


@pytest.mark.parametrize("label", cases_variants_long())
def test_uploads_are_what_the_server_expects(label: str, tmp_path: Path) -> None:
    """Before and after the wire; one tensor less, one more, or one of another shape is refused."""
    federation = fresh(label, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    for round in (1, 2):
        uploads = train(federation, state, round)
        for sent in uploads:
            download = method.download(state, model, sent.client)
            needed = always_sent(method, model, [who.budget for who in federation.clients], sent.client)
            check_received(download, needed, "the download")
            check_received(excerpt_of(method, state, model, sent.client), needed, "the state")
            for payload in (download, sent.payload):
                travelled = decode(encode(payload))
                assert_same_tensors(travelled.tensors, payload.tensors)
                assert travelled.scalars == payload.scalars
            expected = method.schema(model, sent.client, download)
            check_upload(sent.payload, expected)
            tensors, name = sent.payload.tensors, next(iter(expected.needed.tensors))
            for wrong in (
                {key: value for key, value in tensors.items() if key != name},
                {**tensors, "other/tensor": torch.zeros(1)},
                {**tensors, name: torch.zeros(1, 1, *tensors[name].shape)},
            ):
                with pytest.raises(UploadError, match=r"the upload lacks|other/tensor|has the shape"):
                    check_upload(Payload(wrong), expected)
        state = method.aggregate(state, iter(uploads))


@pytest.mark.parametrize("label", cases_alike_long())
def test_aggregation_neither_depends_on_the_order_nor_holds_on_to_uploads(label: str, tmp_path: Path) -> None:
    """An iterator is read once, front to back; an upload may be overwritten as soon as the next is asked for."""
    federation = fresh(label, tmp_path)
    state, uploads = second_round(federation, SGD_STEP, cohort=4)
    aggregate = federation.method.aggregate
    expected = aggregate(state, uploads)

    def overwritten(members: list[Upload]) -> Iterator[Upload]:
        for sent in members:
            tensors = {name: value.clone() for name, value in sent.payload.tensors.items()}
            yield replace(sent, payload=Payload(tensors, sent.payload.scalars))
            for value in tensors.values():
                value.fill_(float("nan") if value.is_floating_point() else 0)

    found = aggregate(state, overwritten(uploads))
    assert found.scalars == expected.scalars
    assert_same_tensors(found.tensors, expected.tensors)
    for order in itertools.islice(itertools.permutations(uploads), 5, 24, 6):
        turned = aggregate(state, iter(order))
        assert turned.scalars == expected.scalars
        assert turned.tensors.keys() == expected.tensors.keys()
        for name, value in expected.tensors.items():
            torch.testing.assert_close(turned.tensors[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("label", cases_variants_long())
def test_a_round_without_some_clients(label: str, tmp_path: Path) -> None:
    """One client alone, then the others, then all: nothing is lost, nothing is not a number."""
    federation = fresh(label, tmp_path)
    state = federation.start()
    for round, who in ((1, (1,)), (2, (0, 2, 3)), (3, (0, 1, 2, 3))):
        state = federation.method.aggregate(state, iter(federation.train(state, round, who)))
        assert all(bool(value.isfinite().all()) for value in state.tensors.values() if value.is_floating_point())
        for seen in federation.method.observe(state, federation.model):
            sizes = (len(seen.rows), len(seen.columns)) if seen.columns else (len(seen.rows),)
            assert tuple(seen.values.shape) == sizes, seen.name
        deployed(federation, state, round)


@pytest.mark.parametrize("label", cases_alike_long())
def test_an_upload_of_the_round_before_arrives_in_the_next(label: str, tmp_path: Path) -> None:
    """It is aggregated behind the others' or by itself, and whoever sent it takes part again like anybody else."""
    federation = fresh(label, tmp_path)
    method, model = federation.method, federation.model
    late, state = federation.train(federation.start(), 1, (0,)), federation.start()
    state = method.aggregate(state, iter(federation.train(state, 1, (1, 2, 3))))
    others = federation.train(state, 2, (1, 2, 3))
    for arrived in (others + late, late):
        after = method.aggregate(state, iter(arrived))
        for sent in train(federation, after, 3):
            expected = method.schema(model, sent.client, method.download(after, model, sent.client))
            check_upload(sent.payload, expected)
            assert not sent.payload.scalars.get("lost"), f"{sent.client.name} was taken for one that has what it needs"
        deployed(federation, after, 3)


@pytest.mark.parametrize("label", cases_alike_long())
def test_a_client_that_lost_its_memory_takes_part_again(label: str, tmp_path: Path) -> None:
    federation = fresh(label, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    state = method.aggregate(state, iter(train(federation, state)))
    shutil.rmtree(federation.memory.folder / CLIENTS[1].name, ignore_errors=True)
    uploads = train(federation, state, 2)
    for sent in uploads:
        expected = method.schema(model, sent.client, method.download(state, model, sent.client))
        check_upload(sent.payload, expected)
    deployed(federation, method.aggregate(state, iter(uploads)))


def deployed(federation: Federation, state: Payload, round: int = 2) -> None:
    """Asserts that every model of a state has the tensors of its plan, and loads them."""
    method, model = federation.method, federation.model
    models = [method.deploy(state, model, who.budget) for who in federation.clients]
    assert {one is not None for one in models} == {method.facts.has_global_model}
    for who in federation.clients:
        excerpt = excerpt_of(method, state, model, who)
        for memory in (federation.memory.load(who.name, round + 1), Payload()):
            models.append(client_model(method, excerpt, model, who, memory))
    for deployment in (one for one in models if one is not None):
        assert deployment.plan.merges or not deployment.merged
        shapes = {name: tuple(value.shape) for name, value in deployment.tensors.items()}
        assert shapes == {name: tuple(shape) for name, shape in adapter_shapes(model, deployment.plan).items()}
        with SlotModel(federation.backbone, [deployment.plan]) as slots:
            slots.load(0, deployment.tensors)


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
