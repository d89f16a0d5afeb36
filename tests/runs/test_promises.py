"""Methods that each break one promise of the protocol, and the message that their author gets."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.client.cohort import Cohort
from fedguild.config.training import TrainingSettings
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.payload import ADAPTER, Payload
from fedguild.model.backbone import Backbone
from fedguild.model.info import ModelInfo
from fedguild.model.plan import AdapterPlan
from fedguild.runs.promises import ONE_STEP, PROMISES
from fedguild.server.method import GLOBAL, Deployment, Method, Own
from fedguild.server.settings import LoraSettings
from fedguild.server.terms import Means, Upload
from fedguild.testing import check_method
from tests.backbones import tiny_backbone
from tests.methods.federation import LARGE, SMALL, Federation, client

CLIENTS = (client(0, LARGE, 4), client(1, SMALL, 5), client(2, SMALL, 3))


class Averaging(Method):
    Settings = LoraSettings

    def plan(self, model: ModelInfo, budget: Budget) -> AdapterPlan:
        return AdapterPlan((self.settings.lora,))


class DeploysMore(Averaging):
    def deploy(self, state: Payload, model: ModelInfo, budget: Budget, own: Own = GLOBAL) -> Deployment:
        return Deployment(self.plan(model, budget), {**state.part(ADAPTER), "other": torch.zeros(1)})


class TakesTheCohortsSize(Averaging):
    def local_update(self, cohort: Cohort) -> list[Payload]:
        return [
            Payload({name: value * len(cohort.work) for name, value in sent.tensors.items()})
            for sent in super().local_update(cohort)
        ]


class ChangesTheBackbone(Averaging):
    def local_update(self, cohort: Cohort) -> list[Payload]:
        next(cohort.model.backbone.model.parameters()).data.add_(1)
        return super().local_update(cohort)


class CountsRoundsInItself(Averaging):
    rounds = 0

    def update(self, state: Payload, means: Means) -> Payload:
        self.rounds += 1
        moved = super().update(state, means)
        return Payload({name: value / self.rounds for name, value in moved.tensors.items()})


class SendsMore(Averaging):
    def local_update(self, cohort: Cohort) -> list[Payload]:
        return [Payload({**sent.tensors, "other/x": torch.ones(1)}) for sent in super().local_update(cohort)]


class TakesTheLast(Averaging):
    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        for sent in uploads:
            last = {name: value.clone() for name, value in sent.payload.tensors.items()}
        return Payload(last)


class HoldsUploads(Averaging):
    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        return super().aggregate(state, list(uploads))


class DividesByOneLess(Averaging):
    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        parts = [{name: value.clone() for name, value in sent.payload.tensors.items()} for sent in uploads]
        return Payload({name: sum(part[name] for part in parts) / torch.tensor(len(parts) - 1) for name in parts[0]})


class CountsRounds(Averaging):
    """Keeps the promises."""

    def update(self, state: Payload, means: Means) -> Payload:
        return Payload(super().update(state, means).tensors, {"rounds": state.scalars.get("rounds", 0) + 1})

    def download(self, state: Payload, model: ModelInfo, client: ClientInfo) -> Payload:
        return state


class TakesThisRoundOnly(CountsRounds):
    def aggregate(self, state: Payload, uploads: Iterable[Upload]) -> Payload:
        held = list(uploads)
        assert {sent.round for sent in held} == {state.scalars.get("rounds", 0) + 1}, "an upload of another round"
        return super().aggregate(state, held)


class TrustsItsMemory(CountsRounds):
    def local_update(self, cohort: Cohort) -> list[Payload]:
        sent = super().local_update(cohort)
        for slot, work in enumerate(cohort.work):
            assert work.memory.tensors or not work.download.scalars, "it kept nothing"
            cohort.keep(slot, sent[slot].part(ADAPTER))
        return sent


def rehearsal(kind: type[Method], backbone: Backbone, folder: Path) -> Federation:
    federation = Federation(backbone, kind(LoraSettings(rank=2, targets=("attention",))), CLIENTS, folder)
    federation.settings = TrainingSettings.model_validate(ONE_STEP)
    return federation


@pytest.mark.parametrize("promise", PROMISES)
@pytest.mark.parametrize("kind", [Averaging, CountsRounds])
def test_a_method_in_order_keeps_every_promise(kind: type[Method], promise: str, tmp_path: Path) -> None:
    backbone = tiny_backbone("olmoe")
    PROMISES[promise](lambda folder: rehearsal(kind, backbone, folder), tmp_path)


BROKEN = (
    ("clients_have_their_models_from_what_they_are_sent", DeploysMore, "tensors that its plan lacks: other"),
    ("clients_train_alike_in_company", TakesTheCohortsSize, "client-000 in round 1: part adapter is .* apart of"),
    ("the_backbone_stays_as_it_was", ChangesTheBackbone, "the backbone differ in model.embed_tokens.weight"),
    ("the_state_survives_its_checkpoint", CountsRoundsInItself, "the state of the next round differ in adapter/"),
    ("uploads_are_as_the_server_expects", SendsMore, "the upload has unknown 'other/x'"),
    ("aggregation_knows_no_order_and_holds_no_upload", TakesTheLast, "adapter/.* depends on the order of uploads"),
    ("aggregation_knows_no_order_and_holds_no_upload", HoldsUploads, "the state from uploads that are gone differ in"),
    ("a_round_goes_without_some_clients", DividesByOneLess, "adapter/.* is not finite after a round of 1 of 3 clients"),
    ("a_late_upload_counts_in_the_next_round", TakesThisRoundOnly, "an upload of another round"),
    ("a_client_may_lose_its_memory", TrustsItsMemory, "it kept nothing"),
)


def test_every_promise_is_broken_by_one() -> None:
    assert {promise for promise, *_ in BROKEN} == set(PROMISES)


@pytest.mark.parametrize(("promise", "kind", "told"), BROKEN)
def test_a_broken_promise_is_found(promise: str, kind: type[Method], told: str, tmp_path: Path) -> None:
    backbone = tiny_backbone("olmoe")
    with pytest.raises((AssertionError, FedGuildError), match=told):
        PROMISES[promise](lambda folder: rehearsal(kind, backbone, folder), tmp_path)


def test_a_class_by_its_name_is_checked_with_a_config(tmp_path: Path) -> None:
    small = ["federation.clients=3", "method.rank=2", "method.targets=[attention]"]
    check_method("flame/tiny-tasks", tmp_path / "good", [f"method={__name__}:Averaging", *small])
    with pytest.raises(AssertionError) as broken:
        check_method("flame/tiny-tasks", tmp_path / "bad", [f"method={__name__}:TakesTheLast", *small])
    assert str(broken.value).startswith(
        f"{__name__}:TakesTheLast breaks a promise: Uploads are read once, front to back, in any order"
    )
    with pytest.raises(ConfigError, match="two clients"):
        check_method("flame/tiny-tasks", tmp_path / "one", ["federation.clients=1"])
