"""Promises of a method on which engines, checkpoints and servers rely, checked on small rounds in this process.

A plug-in's test of its method, all of it:

    from fedguild.testing import check_method

    def test_my_method_keeps_its_promises(tmp_path):
        check_method("flame/tiny-tasks", tmp_path, ["method=my_package.my_method:MyMethod", "method.rank=4"])

`PROMISES` are the single checks. Each trains a few clients by one step of SGD, through the engine, the cohorts and the
memory that a run has; what they send travels as bytes only where a check says so.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedguild.client.budget import ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config, load_config
from fedguild.config.training import TrainingSettings
from fedguild.core.codec import decode, encode
from fedguild.core.errors import ConfigError, UploadError
from fedguild.core.packing import pack, unpack
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.core.text import few
from fedguild.data.batches import Encoded
from fedguild.engines.cohorts import CohortSize
from fedguild.engines.local import LocalEngine
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import adapter_shapes
from fedguild.model.slots import SlotModel
from fedguild.runs.setup import prepare
from fedguild.runs.setup.fitting import fitted, method_of
from fedguild.server import checkpoint
from fedguild.server.engine import Delivery, Task
from fedguild.server.method import Method, Roster, always_sent, client_model, excerpt_of
from fedguild.server.schema import Schema
from fedguild.server.terms import Upload
from fedguild.server.validation import check_received, check_upload

ONE_STEP = {
    **{"optimizer": "sgd", "learning_rate": 0.5, "momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": None},
    **{"batch_size": 3, "gradient_accumulation_steps": 1, "steps": 1, "epochs": None},
}
"""A client's training in a round: one step of SGD, whose rounding is that of the gradient."""


@dataclass
class Rehearsal:
    """Clients with their examples and memory, and a method, without a run's files or its loop.

    Attributes:
        backbone: The model.
        method: The method.
        clients: All clients, by index.
        examples: Client index -> its training examples.
        folder: Where the clients' memory lies.
        settings: A client's training in a round.
    """

    backbone: Backbone
    method: Method
    clients: Sequence[ClientInfo]
    examples: Mapping[int, Sequence[Encoded]]
    folder: Path
    settings: TrainingSettings

    @property
    def model(self) -> ModelInfo:
        return self.backbone.info

    @cached_property
    def memory(self) -> ClientMemory:
        return ClientMemory(self.folder / "clients")

    def start(self) -> Payload:
        """Returns the state before the first round."""
        roster = Roster([who.budget for who in self.clients], self.clients)
        return self.method.start(self.model, roster, torch_rng(0, "start"))

    def deliver(
        self,
        state: Payload,
        round: int = 1,
        who: Collection[int] | None = None,
        settings: TrainingSettings | None = None,
        cohort: CohortSize = "auto",
    ) -> list[Delivery]:
        """Trains some clients (by index; all by default), `cohort` of them in a pass, and keeps their memory."""
        settings = settings or self.settings
        engine = LocalEngine(self.backbone, self.examples, settings, self.memory, cohort_size=cohort, seed=1)
        asked = [client for client in self.clients if who is None or client.index in who]
        tasks = [Task(round, client, self.method.download(state, self.model, client)) for client in asked]
        return sorted(engine.train(self.method, self.model, tasks), key=lambda one: one.task.client.index)

    def train(
        self,
        state: Payload,
        round: int = 1,
        who: Collection[int] | None = None,
        settings: TrainingSettings | None = None,
        cohort: CohortSize = "auto",
    ) -> list[Upload]:
        """Returns their uploads."""
        uploads = []
        for delivery in self.deliver(state, round, who, settings, cohort):
            assert delivery.upload is not None, f"{delivery.task.client.name}: {delivery.failure}"
            uploads.append(Upload(round, delivery.task.client, delivery.upload, delivery.task.download))
        return uploads

    def require_models(self, state: Payload, round: int) -> None:
        """Asserts that every model of a state after a round has the tensors of its plan, and loads them."""
        method, model = self.method, self.model
        models = [method.deploy(state, model, who.budget) for who in self.clients]
        assert {one is not None for one in models} == {method.facts.has_global_model}, (
            f"deploy returns a global model or none, other than facts.has_global_model={method.facts.has_global_model}"
        )
        for who in self.clients:
            excerpt = excerpt_of(method, state, model, who)
            for memory in (self.memory.load(who.name, round + 1), Payload()):
                models.append(client_model(method, excerpt, model, who, memory))
        for deployment in (one for one in models if one is not None):
            assert deployment.plan.merges or not deployment.merged, "deploy merges what its plan does not"
            shapes = {(name, tuple(value.shape)) for name, value in deployment.tensors.items()}
            wanted = {(name, tuple(shape)) for name, shape in adapter_shapes(model, deployment.plan).items()}
            others = {name for name, _ in shapes ^ wanted}
            assert not others, f"deploy returns other tensors than its plan's: {few(sorted(others))}"
            with SlotModel(self.backbone, [deployment.plan]) as slots:
                slots.load(0, deployment.tensors)

    def require_schema(self, sent: Upload, state: Payload) -> None:
        """Raises UploadError unless an upload is as the server expects it after this state."""
        download = self.method.download(state, self.model, sent.client)
        check_upload(sent.payload, self.method.schema(self.model, sent.client, download))


Fresh = Callable[[Path], Rehearsal]
"""Makes a rehearsal whose method is new, with its memory in a folder."""


def check_method(config: str | Config, folder: Path, overrides: Sequence[str] = ()) -> None:
    """Checks that the method of a config keeps all promises (`PROMISES`), with the config's model, clients and data.

    Choose a small model in fp32, such as that of `flame/tiny-tasks`: updates are compared to 1e-5. Of the config's
    training settings, those of `ONE_STEP` are replaced. Whether the method computes what its paper says is not checked.

    Args:
        config: A config, a preset or a YAML file, with at least two clients.
        folder: An empty folder, such as pytest's `tmp_path`.
        overrides: Settings of the config to change, `key=value`.

    Raises:
        AssertionError: a promise is broken; the message names it.
        ConfigError: the config has one client, or cannot run.
        FedGuildError: as in a run, for example an upload that the server would reject (UploadError).
    """
    config = load_config(config, overrides) if isinstance(config, str) else config
    if config.federation.clients < 2:
        raise ConfigError("check_method needs two clients or more.", "Set federation.clients=4.")
    experiment = prepare(config, folder / "run")
    settings = TrainingSettings.model_validate({**config.training.model_dump(), **ONE_STEP})

    def fresh(at: Path) -> Rehearsal:
        method = fitted(method_of(config), config, experiment.backbone.info)
        return Rehearsal(experiment.backbone, method, experiment.clients, experiment.encoded, at, settings)

    for name, check in PROMISES.items():
        try:
            check(fresh, folder / name)
        except AssertionError as broken:
            told = " ".join((check.__doc__ or "").split())
            raise AssertionError(f"{experiment.method.name} breaks a promise: {told}\n{broken}") from broken


def clients_have_their_models_from_what_they_are_sent(fresh: Fresh, folder: Path) -> None:
    """A client's model is deployed from its excerpt of the state, as it was and as it arrives through the wire."""
    rehearsal = fresh(folder)
    method, model, state = rehearsal.method, rehearsal.model, rehearsal.start()
    for round in (1, 2, 3):
        for who in rehearsal.clients:
            excerpt = excerpt_of(method, state, model, who)
            sent = Payload(*unpack(pack(excerpt.tensors, excerpt.scalars)))
            for memory in (Payload(), rehearsal.memory.load(who.name, round)):
                found, expected = (client_model(method, one, model, who, memory) for one in (sent, excerpt))
                assert found.plan == expected.plan, f"{who.name} has another plan from what arrived"
                unknown = found.tensors.keys() - adapter_shapes(model, found.plan).keys()
                assert not unknown, f"{who.name}'s model has tensors that its plan lacks: {few(sorted(unknown))}"
                require_equal(found.tensors, expected.tensors, f"{who.name}'s model")
                require_equal(found.merged, expected.merged, f"{who.name}'s changes of the backbone")
        state = method.aggregate(state, iter(rehearsal.train(state, round)))


def clients_train_alike_in_company(fresh: Fresh, folder: Path) -> None:
    """Four clients in one pass send, to 1e-5 of each part's change, what they send if each trains alone."""
    together, alone = fresh(folder / "together"), fresh(folder / "alone")
    state = together.start()
    for round in (1, 2):
        pairs = zip(together.train(state, round, cohort=4), alone.train(state, round, cohort=1), strict=True)
        uploads = []
        for ours, theirs in pairs:
            download = together.method.download(state, together.model, ours.client)
            moved, expected = _movement(ours, download), _movement(theirs, download)
            assert ours.payload.tensors.keys() == theirs.payload.tensors.keys(), f"{ours.client.name} sends others"
            assert ours.payload.scalars == theirs.payload.scalars, (
                f"{ours.client.name} sends {dict(ours.payload.scalars)}, alone {dict(theirs.payload.scalars)}"
            )
            for part, changes in expected.items():
                apart = _norm(moved[part][name] - change for name, change in changes.items())
                whole = _norm(changes.values())
                assert apart <= 1e-5 * whole + 1e-9, (
                    f"{ours.client.name} in round {round}: part {part} is {apart:.3g} apart of a change of {whole:.3g}"
                )
            kept = alone.memory.load(theirs.client.name, round + 1).tensors
            sizes = [_norm(part.values()) for part in (*expected.values(), kept) if part]
            assert max(sizes, default=0) > 1e-4, "the step moved nothing that the client sends or keeps"
            uploads.append(theirs)
        state = together.method.aggregate(state, iter(uploads))


def the_backbone_stays_as_it_was(fresh: Fresh, folder: Path) -> None:
    """Two rounds and the deployment of their models leave the backbone's weights and outputs, bit by bit."""
    rehearsal = fresh(folder)
    model, tokens = rehearsal.backbone.model, torch.arange(3, 13)[None].to(rehearsal.backbone.device)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        said = model(input_ids=tokens).logits
    state, _ = _second_round(rehearsal, cohort=2)
    rehearsal.require_models(state, 2)
    require_equal(model.state_dict(), before, "the backbone")
    assert not any(weight.requires_grad or weight.grad is not None for weight in model.parameters()), (
        "a weight of the backbone trains, or has a gradient"
    )
    assert rehearsal.backbone.runtime.current is None, "an adapter is still attached"
    with torch.no_grad():
        assert torch.equal(model(input_ids=tokens).logits, said), "the backbone computes something else"


def the_state_survives_its_checkpoint(fresh: Fresh, folder: Path) -> None:
    """A server that starts again from a checkpoint has the same next round, bit by bit: all state is in the payload."""
    rehearsal = fresh(folder)
    state = rehearsal.start()
    for round in (1, 2):
        checkpoint.save(folder / "checkpoints", round, state, fingerprint="x")
        restored, other = checkpoint.load(folder / "checkpoints", round, fingerprint="x").state, fresh(folder)
        _require_same(restored, state, "the state")
        uploads, again = rehearsal.train(state, round, cohort=4), other.train(restored, round, cohort=4)
        for ours, theirs in zip(again, uploads, strict=True):
            _require_same(ours.payload, theirs.payload, f"the upload of {ours.client.name}")
        state = rehearsal.method.aggregate(state, iter(uploads))
        _require_same(other.method.aggregate(restored, iter(again)), state, "the state of the next round")


def uploads_are_as_the_server_expects(fresh: Fresh, folder: Path) -> None:
    """Uploads have the tensors of `schema` before and after the wire; one less, more or of another shape is refused."""
    rehearsal = fresh(folder)
    method, model, state = rehearsal.method, rehearsal.model, rehearsal.start()
    for round in (1, 2):
        uploads = rehearsal.train(state, round, cohort=4)
        for sent in uploads:
            download = method.download(state, model, sent.client)
            needed = always_sent(method, model, [who.budget for who in rehearsal.clients], sent.client)
            check_received(download, needed, "the download")
            check_received(excerpt_of(method, state, model, sent.client), needed, "the state")
            for what, payload in (("download", download), ("upload", sent.payload)):
                _require_same(decode(encode(payload)), payload, f"the {what} of {sent.client.name}")
            expected = method.schema(model, sent.client, download)
            check_upload(sent.payload, expected)
            tensors, name = sent.payload.tensors, next(iter(expected.needed.tensors))
            for what, wrong in (
                ("without", {key: value for key, value in tensors.items() if key != name}),
                ("with a tensor beside", {**tensors, "other/tensor": torch.zeros(1)}),
                ("of another shape in", {**tensors, name: torch.zeros(1, 1, *tensors[name].shape)}),
            ):
                assert _is_refused(Payload(wrong), expected), f"an upload {what} {name} is not refused"
        state = method.aggregate(state, iter(uploads))


def aggregation_knows_no_order_and_holds_no_upload(fresh: Fresh, folder: Path) -> None:
    """Uploads are read once, front to back, in any order; each may be overwritten when the next is asked for."""
    rehearsal = fresh(folder)
    state, uploads = _second_round(rehearsal, cohort=4)
    aggregate = rehearsal.method.aggregate
    expected = aggregate(state, uploads)

    def overwritten() -> Iterator[Upload]:
        for sent in uploads:
            tensors = {name: value.clone() for name, value in sent.payload.tensors.items()}
            yield replace(sent, payload=Payload(tensors, sent.payload.scalars))
            for value in tensors.values():
                value.fill_(float("nan") if value.is_floating_point() else 0)

    _require_same(aggregate(state, overwritten()), expected, "the state from uploads that are gone")
    for order in (uploads[1:] + uploads[:1], uploads[::-1], uploads[::2] + uploads[1::2]):
        turned = aggregate(state, iter(order))
        assert turned.scalars == expected.scalars, "the state's scalars depend on the order of uploads"
        assert turned.tensors.keys() == expected.tensors.keys(), "the state's tensors depend on the order of uploads"
        for name, value in expected.tensors.items():
            assert torch.allclose(turned.tensors[name], value, rtol=1e-5, atol=1e-6), (
                f"{name} depends on the order of uploads"
            )


def a_round_goes_without_some_clients(fresh: Fresh, folder: Path) -> None:
    """One client alone, then all others, then all: nothing is lost, nothing is NaN or infinite."""
    rehearsal = fresh(folder)
    state, who = rehearsal.start(), [client.index for client in rehearsal.clients]
    for round, present in ((1, who[1:2]), (2, who[:1] + who[2:]), (3, who)):
        state = rehearsal.method.aggregate(state, iter(rehearsal.train(state, round, present)))
        for name, value in state.tensors.items():
            assert not value.is_floating_point() or bool(value.isfinite().all()), (
                f"{name} is not finite after a round of {len(present)} of {len(who)} clients"
            )
        for seen in rehearsal.method.observe(state, rehearsal.model):
            sizes = (len(seen.rows), len(seen.columns)) if seen.columns else (len(seen.rows),)
            assert tuple(seen.values.shape) == sizes, f"the figure '{seen.name}' is not as large as its labels"
        rehearsal.require_models(state, round)


def a_late_upload_counts_in_the_next_round(fresh: Fresh, folder: Path) -> None:
    """An upload of the round before is aggregated behind the others' or by itself, and its client goes on."""
    rehearsal = fresh(folder)
    method, (first, *others) = rehearsal.method, [client.index for client in rehearsal.clients]
    late, state = rehearsal.train(rehearsal.start(), 1, [first]), rehearsal.start()
    state = method.aggregate(state, iter(rehearsal.train(state, 1, others)))
    in_time = rehearsal.train(state, 2, others)
    for arrived in (in_time + late, late):
        after = method.aggregate(state, iter(arrived))
        for sent in rehearsal.train(after, 3, cohort=4):
            rehearsal.require_schema(sent, after)
            assert not sent.payload.scalars.get("lost"), f"{sent.client.name} was taken for one that lost its memory"
        rehearsal.require_models(after, 3)


def a_client_may_lose_its_memory(fresh: Fresh, folder: Path) -> None:
    """A client whose memory is gone after a round takes part in the next."""
    rehearsal = fresh(folder)
    method, state = rehearsal.method, rehearsal.start()
    state = method.aggregate(state, iter(rehearsal.train(state, cohort=4)))
    shutil.rmtree(rehearsal.memory.folder / rehearsal.clients[1].name, ignore_errors=True)
    uploads = rehearsal.train(state, 2, cohort=4)
    for sent in uploads:
        rehearsal.require_schema(sent, state)
    rehearsal.require_models(method.aggregate(state, iter(uploads)), 2)


PROMISES: Mapping[str, Callable[[Fresh, Path], None]] = {
    check.__name__: check
    for check in (
        clients_have_their_models_from_what_they_are_sent,
        clients_train_alike_in_company,
        the_backbone_stays_as_it_was,
        the_state_survives_its_checkpoint,
        uploads_are_as_the_server_expects,
        aggregation_knows_no_order_and_holds_no_upload,
        a_round_goes_without_some_clients,
        a_late_upload_counts_in_the_next_round,
        a_client_may_lose_its_memory,
    )
}
"""The checks by name; each takes what makes a rehearsal, and an empty folder."""


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: str = "the tensors") -> None:
    """Asserts that tensors are equal, bit by bit; `what` they are of begins the message."""
    assert found.keys() == expected.keys(), f"{what} differ in {few(sorted(found.keys() ^ expected.keys()))}"
    differing = [name for name, value in expected.items() if not torch.equal(found[name], value)]
    assert not differing, f"{what} differ in {few(differing)}"


def _require_same(found: Payload, expected: Payload, what: str) -> None:
    assert found.scalars == expected.scalars, f"{what} has other scalars: {found.scalars}, not {expected.scalars}"
    require_equal(found.tensors, expected.tensors, what)


def _is_refused(payload: Payload, expected: Schema) -> bool:
    try:
        check_upload(payload, expected)
    except UploadError:
        return True
    return False


def _second_round(rehearsal: Rehearsal, cohort: int) -> tuple[Payload, list[Upload]]:
    """Returns the state after one round, and the uploads of the next."""
    state = rehearsal.start()
    state = rehearsal.method.aggregate(state, iter(rehearsal.train(state, cohort=cohort)))
    return state, rehearsal.train(state, 2, cohort=cohort)


def _movement(sent: Upload, download: Payload) -> dict[str, dict[str, Tensor]]:
    """Returns part -> name -> what training changed of a tensor; all of it where nothing like it was received."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, value in sent.payload.tensors.items():
        before = download.tensors.get(name)
        change = value.double() - before.double() if before is not None else value.double()
        found.setdefault(name.partition("/")[0], {})[name] = change
    return found


def _norm(tensors: Iterable[Tensor]) -> float:
    return float(torch.stack([tensor.double().square().sum() for tensor in tensors]).sum().sqrt())
