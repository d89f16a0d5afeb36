"""Every method's models as trained and as received, against what clients' slots held in training."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedguild.client.cohort import Cohort, Step
from fedguild.client.memory import ClientMemory
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded, collate
from fedguild.methods import METHODS
from fedguild.model.plan import AdapterPlan
from fedguild.model.slots import SlotModel
from fedguild.server.method import Deployment, client_model, excerpt_of
from tests.methods.federation import LARGE, Federation, client
from tests.methods.test_matrix import CASES, cases_alike_long, fresh, train

ROW = Encoded((1, 9, 4, 17, 22, 8, 30, 5), 2)
"""What every model is asked."""

Seen = dict[int, list[Tensor]]
"""Client index -> the answers of its slot, a training after the other."""


def losses(model: SlotModel) -> list[Tensor]:
    """Every slot's losses on `ROW`."""
    model.dropout.seed(None)
    with torch.no_grad():
        whole = model.token_losses(collate([[ROW]] * model.slots, 0, model.seq2seq))
    return list(whole.split(len(ROW.input_ids) - ROW.prompt_length))


def asked(federation: Federation, deployment: Deployment) -> Tensor:
    """A deployed model's losses on `ROW`."""
    with (
        federation.backbone.merged(deployment.merged),
        SlotModel(federation.backbone, [deployment.plan]) as model,
    ):
        model.load(0, deployment.tensors)
        return losses(model)[0]


@pytest.fixture
def at_start(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The slots' answers before the first step of their newest trainings."""
    seen: Seen = {}
    steps = Cohort.steps

    def watched(cohort: Cohort, *arguments: object, pairs: bool = False) -> Iterator[Step]:
        for who, answer in zip(cohort.clients, losses(cohort.model), strict=True):
            seen.setdefault(who.index, []).append(answer)
        return steps(cohort, *arguments, pairs=pairs)

    monkeypatch.setattr(Cohort, "steps", watched)
    return seen


@pytest.fixture
def at_end(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The slots' answers after the last step of their newest trainings."""
    seen: Seen = {}
    finish = Cohort.finish

    def watched(cohort: Cohort) -> None:
        for who, answer in zip(cohort.clients, losses(cohort.model), strict=True):
            seen.setdefault(who.index, []).append(answer)
        finish(cohort)

    monkeypatch.setattr(Cohort, "finish", watched)
    return seen


def after_two_rounds(label: str, folder: Path, seen: Seen) -> tuple[Federation, Payload]:
    """The federation and its state; `seen` has the second round alone."""
    federation = fresh(label, folder)
    federation.memory = ClientMemory(folder / "clients", trained=True)
    state = federation.start()
    for round in (1, 2):
        seen.clear()
        state = federation.method.aggregate(state, iter(train(federation, state, round)))
    return federation, state


def assert_among(found: Tensor, expected: list[Tensor]) -> None:
    apart = [float((found - value).abs().max()) for value in expected]
    assert min(apart) < 2e-5, (
        f"The model is not what the slot held, by {apart}: leave nothing and override deploy. Where that is meant, "
        "say so in the method's case in tests/methods/test_matrix.py (mixes, runs_whole), and test it in its own file."
    )


@pytest.mark.parametrize("label", cases_alike_long())
def test_as_trained_is_what_the_slot_held_after_the_last_step(label: str, tmp_path: Path, at_end: Seen) -> None:
    """On the backbone of that round, with the aggregation of the round already in the state."""
    federation, state = after_two_rounds(label, tmp_path, at_end)
    method, model, memory = federation.method, federation.model, federation.memory
    assert memory.trained is not None
    for who in federation.clients:
        excerpt, kept, left = (
            excerpt_of(method, state, model, who),
            memory.load(who.name, 3),
            memory.trained.load(who.name, 3),
        )
        found = asked(federation, client_model(method, excerpt, model, who, kept, "trained", left))
        if not CASES[label].mixes:
            assert_among(found, at_end[who.index])
            received = asked(federation, client_model(method, excerpt, model, who, kept, "received"))
            assert not torch.allclose(found, received, atol=1e-6), "the average changed nothing"


@pytest.mark.parametrize("label", cases_alike_long())
def test_as_received_is_what_the_slot_holds_before_the_next_first_step(
    label: str, tmp_path: Path, at_start: Seen
) -> None:
    federation, state = after_two_rounds(label, tmp_path, at_start)
    method, model = federation.method, federation.model
    found = {
        who.index: asked(
            federation,
            client_model(
                method,
                excerpt_of(method, state, model, who),
                model,
                who,
                federation.memory.load(who.name, 3),
                "received",
            ),
        )
        for who in federation.clients
    }
    if CASES[label].mixes or CASES[label].runs_whole:
        assert all(bool(answer.isfinite().all()) for answer in found.values())
        return
    at_start.clear()
    train(federation, state, 3)
    for index, answer in found.items():
        assert_among(answer, at_start[index])


@pytest.mark.parametrize("name", METHODS)
def test_before_the_first_round_every_model_is_the_published_one(name: str, tmp_path: Path) -> None:
    """With all of the model's experts active; but a prompt is there from the start, and UB-SMoE renormalises."""
    federation = fresh(name, tmp_path)
    method, model, state = federation.method, federation.model, federation.start()
    who = client(0, LARGE)
    found = asked(federation, client_model(method, excerpt_of(method, state, model, who), model, who, Payload()))
    plain = asked(federation, Deployment(AdapterPlan(()), {}))
    assert torch.allclose(found, plain, atol=2e-5) == (name not in ("fedprompt", "fedptuning", "ub-smoe"))


def kept_and_left(label: str, folder: Path) -> tuple[Federation, list[Payload], dict[str, tuple[Payload, Payload]]]:
    """A case after two rounds: its states 0 to 2, and each client's memory and what its last training left."""
    federation = fresh(label, folder)
    federation.memory = ClientMemory(folder / "clients", trained=True)
    assert federation.memory.trained is not None
    states = [federation.start()]
    for round in (1, 2):
        states.append(federation.method.aggregate(states[-1], iter(train(federation, states[-1], round))))
    both = (federation.memory, federation.memory.trained)
    return federation, states, {who.name: tuple(m.load(who.name, 3) for m in both) for who in federation.clients}


def test_fdlora_fuses_what_it_received_as_trained_and_what_it_receives_next(tmp_path: Path) -> None:
    """w1 theta_s + w2 theta_p with the client's own w and theta_p: theta_s of the round, and of after it."""
    federation, states, memories = kept_and_left("fdlora on experts", tmp_path)
    method, model = federation.method, federation.model
    for who in federation.clients:
        kept, left = memories[who.name]
        weights = torch.tensor([0.5, -0.25])  # the search may have found w1 = 0, in which nothing could be seen
        memory = Payload({**kept.tensors, "fusion/weights": weights})
        found = client_model(method, states[-1], model, who, memory, "received")
        for name, personal in kept.part("personal").items():
            expected = 0.5 * states[-1].part("adapter")[name] - 0.25 * personal
            torch.testing.assert_close(found.tensors[name], expected)
        first, second = kept.tensors["fusion/weights"].tolist()
        trained = client_model(method, states[-1], model, who, kept, "trained", left)
        for name, personal in kept.part("personal").items():
            torch.testing.assert_close(
                trained.tensors[name], first * states[1].part("adapter")[name] + second * personal
            )


def test_pfl_moe_mixes_its_own_adapter_and_gate_with_either_theta(tmp_path: Path) -> None:
    federation, states, memories = kept_and_left("pfl-moe", tmp_path)
    method, model = federation.method, federation.model
    for who in federation.clients:
        kept, left = memories[who.name]
        trained = client_model(method, states[2], model, who, kept, "trained", left)
        received = client_model(method, states[2], model, who, kept, "received")
        assert trained.plan == received.plan
        assert trained.tensors.keys() == received.tensors.keys()
        for name, value in received.tensors.items():
            theta = name in states[2].part("adapter")
            assert torch.equal(value, states[2].part("adapter")[name] if theta else trained.tensors[name])
            if theta:
                assert torch.equal(trained.tensors[name], states[1].part("adapter")[name])
        assert any(bool((trained.tensors[name] != received.tensors[name]).any()) for name in states[2].part("adapter"))


def test_a_method_never_sees_what_is_kept_for_scoring(tmp_path: Path) -> None:
    """The same uploads and memories, whether the models as trained are kept or not."""
    plain, kept = fresh("flame", tmp_path / "plain"), fresh("flame", tmp_path / "kept")
    kept.memory = ClientMemory(tmp_path / "kept" / "clients", trained=True)
    for federation in (plain, kept):
        train(federation, federation.start())
    files = [{path.name: path.read_bytes() for path in f.memory.folder.rglob("*.memory")} for f in (plain, kept)]
    assert files[0] == files[1]
    assert not (tmp_path / "plain" / "trained").exists()


def test_old_models_as_trained_are_forgotten(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path / "clients", trained=True)
    assert memory.trained is not None
    for round in (1, 2, 3):
        memory.trained.save("client-000", round, Payload({"x": torch.ones(1)}))
    memory.forget(3)
    assert len(list((tmp_path / "trained").rglob("*.memory"))) == 1
