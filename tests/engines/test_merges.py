"""The local engine trains on the backbone that the downloads are about, and gives it back as it was."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedguild.client.merge_ledger import MergeLedger
from fedguild.config.federation import FederationSettings
from fedguild.core.codec import decode
from fedguild.core.payload import Payload
from fedguild.engines.local import LocalEngine
from fedguild.methods.flora import Flora, FloraSettings
from fedguild.model.backbone import Backbone
from fedguild.server import merge_history
from fedguild.server.engine import Task
from fedguild.server.low_rank import Factors
from fedguild.server.merge_history import appended, echo, no_merges
from fedguild.server.merge_history import delivery as delivery_of
from fedguild.server.method import Upload
from fedguild.server.round import RoundSetup
from fedguild.server.rounds import run_round
from tests.methods.federation import LARGE, SETTINGS, SMALL, Federation, client

CLIENTS = [client(0, LARGE, 4), client(1, SMALL, 4), client(2, LARGE, 4)]
RULES = FederationSettings()


@pytest.fixture
def federation(olmoe_backbone: Backbone, tmp_path: Path) -> Federation:
    return Federation(olmoe_backbone, Flora(FloraSettings()), CLIENTS, tmp_path)


def engine_of(federation: Federation, cohort: int = 1, ledger: MergeLedger | None = None) -> LocalEngine:
    return LocalEngine(
        federation.backbone, federation.examples, SETTINGS, federation.memory, cohort_size=cohort, seed=1, ledger=ledger
    )


def tasks_of(federation: Federation, state: Payload) -> list[Task]:
    return [Task(2, who, federation.method.download(state, federation.model, who)) for who in CLIENTS]


def after_a_round(federation: Federation) -> Payload:
    state = federation.start()
    return federation.method.aggregate(state, federation.train(state))


def test_the_weights_are_merged_once_for_all_cohorts(federation: Federation, monkeypatch: pytest.MonkeyPatch) -> None:
    state, merged, seen = after_a_round(federation), Backbone.merged, []

    def watched(backbone: Backbone, merges: dict[str, torch.Tensor]):
        seen.append(len(merges))
        return merged(backbone, merges)

    monkeypatch.setattr(Backbone, "merged", watched)
    before = federation.backbone.fingerprint()
    arriving = engine_of(federation).train(federation.method, federation.model, tasks_of(federation, state))
    prints = []
    for delivery in arriving:
        assert delivery.upload is not None
        prints.append(federation.backbone.fingerprint())
    assert len(seen) == 1
    assert seen[0] > 0
    assert len(set(prints)) == 1
    assert prints[0] != before
    assert federation.backbone.fingerprint() == before


def test_whoever_lacks_changes_fails_and_says_so(federation: Federation, tmp_path: Path) -> None:
    """The others of the round would go on; this site gets the whole history next time."""
    state = after_a_round(federation)
    state = federation.method.aggregate(state, federation.train(state, 2))
    engine = engine_of(federation, ledger=MergeLedger(tmp_path / "elsewhere"))
    deliveries = list(engine.train(federation.method, federation.model, tasks_of(federation, state)))
    assert [delivery.task.client for delivery in deliveries] == CLIENTS
    for delivery in deliveries:
        assert delivery.upload is None
        assert "elsewhere lacks 1 of the 2 versions of the backbone's changes" in delivery.failure
        assert delivery.plan.rank == delivery.task.client.budget.rank
    newcomer = client(7, LARGE, 4)
    task = Task(3, newcomer, federation.method.download(state, federation.model, newcomer))
    engine.examples = {7: federation.examples[0]}
    (delivery,) = engine.train(federation.method, federation.model, [task])
    assert delivery.failure == ""
    assert delivery.upload is not None


def test_a_round_that_fails_half_way_gives_the_backbone_back(federation, monkeypatch):
    """While the error is still being handled, with its frames alive."""
    state, before = after_a_round(federation), federation.backbone.fingerprint()

    def broken(self: Flora, state: Payload, uploads):
        next(iter(uploads))
        raise RuntimeError("the disk is full")

    monkeypatch.setattr(Flora, "aggregate", broken)
    engine = engine_of(federation)
    with pytest.raises(RuntimeError, match="the disk is full") as caught:
        run_round(2, state, CLIENTS, RoundSetup(federation.method, federation.model, engine, RULES, 1))
    assert caught.traceback
    assert not federation.backbone.is_merged
    assert federation.backbone.fingerprint() == before


def test_each_version_is_encoded_once_for_all_rounds_of_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray's store gets the new ones of a round, and forgets those that were folded."""
    ray = pytest.importorskip("fedguild.engines.ray", reason="Ray is an extra")
    monkeypatch.setattr(merge_history, "FLOOR", 0)
    put: list[bytes] = []
    stored = ray.StoredVersions(lambda content: put.append(content) or content)
    ledger, state, who = MergeLedger(tmp_path), no_merges(), client(0, LARGE, 4)
    for round in range(1, 12):
        change = {"m": Factors(torch.full((2, 20), float(round)), torch.ones(10, 2))}
        state = appended(state, change, [Upload(round, who, Payload({}, echo(delivery_of(state, who))))])
        merges = ledger.receive(delivery_of(state, who))
        before = len(put)
        references = stored.references(merges, ledger.contents)
        folds = sum(name.endswith(".change") for name in merges)
        assert len(put) - before <= 1 + folds
        assert len(put) > before
        found = {name: tensor for content in references for name, tensor in decode(content).tensors.items()}
        assert found.keys() == merges.keys()
        assert all(torch.equal(found[name], tensor) for name, tensor in merges.items())
        assert stored.references(merges, ledger.contents) == references
    assert len(put) < 11 + 11 // 3
    assert folds == 1
