"""Training of cohorts as `local` and `ray` share it: selection, order, and serialisation for an actor."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.client.cohort import LocalReport
from fedguild.core.codec import encode
from fedguild.core.errors import ConfigError, FedGuildError
from fedguild.core.packing import unpack
from fedguild.core.payload import Payload
from fedguild.data.batches import Encoded
from fedguild.engines import cohorts as cohorts_module
from fedguild.engines import local
from fedguild.engines.client_report import ClientReport
from fedguild.engines.cohorts import FittingCohorts, Trained
from fedguild.engines.ray_actor import (
    CohortActor,
    CohortJob,
    decode_result,
    encode_payloads,
    pack_examples,
    unpack_rows,
)
from fedguild.methods import build_method
from fedguild.privacy.dp.dp_sgd import DpSgd
from fedguild.privacy.dp.noise import Noise
from fedguild.runs.setup import prepare
from fedguild.server.engine import Wait
from fedguild.server.method import Roster
from tests.engines.test_local import CLIENTS, deliver, engine_of, kept_rounds, tasks_of
from tests.methods.federation import LARGE, SETTINGS, client
from tests.runs.runs import save_model, small_config


@pytest.fixture
def flame():
    return build_method("flame", {"rank": 3})


def test_enough_trains_so_many_and_tells_the_others_in_client_order(olmoe_backbone, flame, tmp_path):
    everybody = deliver(olmoe_backbone, flame, tmp_path / "all", 1)
    engine = engine_of(olmoe_backbone, flame, tmp_path / "some", 1)
    deliveries = list(engine.train(flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone), Wait(enough=2)))
    assert [delivery.task.client for delivery in deliveries] == list(CLIENTS)
    needed = [index for index, delivery in enumerate(deliveries) if delivery.needed]
    assert len(needed) == 2
    for index, delivery in enumerate(deliveries):
        if index in needed:
            expected = everybody[index].upload.tensors
            assert all(torch.equal(delivery.upload.tensors[name], tensor) for name, tensor in expected.items())
        else:
            assert delivery.upload is None
            assert delivery.failure == "not needed: 2 others were faster"
    trained = {name for name, files in kept_rounds(tmp_path / "some").items() if "round-00002.memory" in files}
    assert trained == {CLIENTS[index].name for index in needed}


def test_every_cohort_gives_back_memory_that_is_scarce(olmoe_backbone, flame, tmp_path, monkeypatch):
    given_back = []
    monkeypatch.setattr(cohorts_module, "give_back_if_scarce", lambda: given_back.append(None))
    engine = engine_of(olmoe_backbone, flame, tmp_path, 2)
    list(engine.train(flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone), Wait()))
    assert len(given_back) == math.ceil(len(CLIENTS) / 2)


def test_no_cohort_begins_after_the_deadline_and_one_that_has_begun_is_waited_for(
    olmoe_backbone, flame, tmp_path, monkeypatch
):
    now = [0.0]
    monkeypatch.setattr(local.time, "monotonic", lambda: now[0])
    engine = engine_of(olmoe_backbone, flame, tmp_path, 2)
    arriving = engine.train(flame, olmoe_backbone.info, tasks_of(flame, olmoe_backbone), Wait(deadline_seconds=60.0))
    deliveries = [next(arriving)]
    now[0] = 60.5
    deliveries += list(arriving)
    late = "did not answer within 60 s"
    assert [delivery.failure for delivery in deliveries] == ["", "", late, late, late]
    assert [delivery.task.client for delivery in deliveries] == list(CLIENTS)
    assert all(delivery.needed for delivery in deliveries)


def test_cohorts_keep_the_smaller_size_and_the_order():
    cohorts, tried, done = FittingCohorts(range(11), 8, torch.device("cpu")), [], []
    for cohort in cohorts:
        tried.append(len(cohort))
        with cohorts.fitting():
            if len(cohort) > 3:
                raise torch.OutOfMemoryError("no room")
            done += cohort
    assert done == list(range(11))
    assert tried == [8, 4, 2, 2, 2, 2, 2, 1]


def test_cohorts_shrink_to_what_their_members_are_measured_to_take(monkeypatch):
    """Room for 100 bytes; a member takes 20, then 50, then 10, in addition to the 7 that are in use."""
    taken, peak = iter([20, 50, 10, 10, 10]), []
    monkeypatch.setattr(cohorts_module, "used_bytes", lambda _: 7)
    monkeypatch.setattr(cohorts_module, "peak_bytes", lambda _: peak[-1])
    cohorts, tried = FittingCohorts(range(14), 6, torch.device("cpu"), room=100), []
    for cohort in cohorts:
        tried.append(len(cohort))
        with cohorts.fitting():
            peak.append(7 + next(taken) * len(cohort))
    assert tried == [6, 5, 2, 1]


ROWS = {0: [Encoded((5, 6, 7), 1), Encoded((9,), 0)], 3: [Encoded((1, 2), 2)], 7: []}


def test_examples_survive_the_way_to_an_actor():
    tensors, scalars = unpack(pack_examples(ROWS))
    assert scalars == {}
    for index, rows in ROWS.items():
        assert unpack_rows(tensors, index) == rows


@pytest.mark.parametrize("memory", [None, Payload({"gate": torch.ones(3)}, {"steps": 2})])
@pytest.mark.parametrize("frequency", [None, torch.rand(2, 3, 8)[:, 1]])
def test_a_result_survives_the_way_back(memory, frequency):
    training = LocalReport(
        steps=3,
        tokens=40,
        examples=6,
        loss=0.1 + 0.2,
        first_loss=0.7,
        seconds=1.5,
        reference_tokens=3,
        forward_tokens=7,
    )
    report = ClientReport(training, frequency, 77)
    left = None if memory is None else Payload({"a": torch.randn(2, 3)}, {"merge_version": 3})
    result = Trained(Payload({"adapter/a": torch.randn(2, 3)}, {"n": 1}), memory, report, left)
    decoded = decode_result(json.loads(json.dumps(report.to_json())), *encode_payloads(result))
    assert decoded.report.training == training
    assert decoded.report.peak_memory_bytes == 77
    for payload, expected in ((decoded.upload, result.upload), (decoded.memory, memory), (decoded.left, left)):
        assert (payload is None) == (expected is None)
        if payload is not None and expected is not None:
            assert payload.scalars == expected.scalars
            assert all(torch.equal(payload.tensors[name], tensor) for name, tensor in expected.tensors.items())
    assert (decoded.report.frequency is None) == (frequency is None)
    assert frequency is None or torch.equal(decoded.report.frequency, frequency)
    older = {name: value for name, value in report.to_json().items() if name != "first_loss"}
    assert ClientReport.from_json(older).training == replace(training, first_loss=None)


@pytest.fixture
def actor(tmp_path: Path):
    """An actor in this process, as Ray would build it, of 2 threads."""
    folder = save_model(tmp_path / "model")
    threads = torch.get_num_threads()
    rows = {0: [Encoded((5, 6, 7, 8), 1)] * 4}
    yield CohortActor(
        {"path": str(folder), "device": "cpu", "dtype": "float32"},
        SETTINGS.model_dump(),
        1,
        2,
        0.5,
        pack_examples(rows),
    )
    torch.set_num_threads(threads)


def test_an_actor_trains_from_plain_values_and_bytes(actor, flame):
    who = client(0, LARGE, 4)
    model = actor.trainer.backbone.info
    state = flame.start(model, Roster([LARGE]), torch.Generator().manual_seed(0))
    job = CohortJob("flame", {"rank": 3}, 2, (who,)).to_plain()
    nothing = encode(Payload())
    summary, payloads = actor.train(job, encode(flame.download(state, model, who)), nothing, nothing)
    assert summary["reports"][0]["steps"] == SETTINGS.steps
    trained = decode_result(summary["reports"][0], *payloads)
    assert {name: tuple(t.shape) for name, t in trained.upload.tensors.items()} == flame.schema(
        model, who, flame.download(state, model, who)
    ).shapes
    assert trained.left is None
    assert actor.cohort_size(job) == 1


def test_an_actor_sizes_cohorts_with_dp_sgd_for_the_gradients_of_single_examples(actor, monkeypatch):
    counted = []
    monkeypatch.setattr(
        cohorts_module, "auto_cohort_size", lambda *arguments: counted.append(arguments[-1].examples) or 1
    )
    plain = CohortJob("flame", {"rank": 3}, 2, (client(0, LARGE, 4),))
    noisy = DpSgd(1.0, 1.0, 0.5, 2, 2.0, Noise(b"key")).to_plain()
    for job in (plain, replace(plain, private=(noisy,))):
        actor.cohort_size(job.to_plain())
    assert counted == [0, SETTINGS.batch_size]


def test_what_an_actor_cannot_mend_comes_back_as_words(actor, monkeypatch):
    def full(*_, **__):
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(type(actor.trainer), "train", full)
    who, nothing = client(0, LARGE, 4), encode(Payload())
    job = CohortJob("flame", {"rank": 3}, 2, (who,)).to_plain()
    summary, payloads = actor.train(job, nothing, nothing, nothing)
    assert "is too small to train one client" in summary["error"]
    assert "training.batch_size" in summary["hint"]
    assert payloads == []
    assert isinstance(FedGuildError(summary["error"], summary["hint"]), Exception)


def test_without_ray_the_engine_names_its_extra(tmp_path, monkeypatch):
    import sys

    for name in ("fedguild.engines.ray", "fedguild.engines.ray_cluster"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    config = small_config(save_model(tmp_path / "model"), "federation.engine={name: ray}")
    with pytest.raises(ConfigError, match="the package 'ray' is not installed") as caught:
        prepare(config, tmp_path / "run")
    assert caught.value.hint == "Install the extra: pip install 'fedguild[ray]'."
