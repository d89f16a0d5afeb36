"""Delivery of UB-SMoE's pseudo-gradient over whole rounds, sent or derived; and what a round sends."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from fedguild.core import layout
from fedguild.core.accounting import size_bytes
from fedguild.core.payload import Payload
from fedguild.measuring.log.records import ClientRecord, RunLog
from fedguild.methods.ub_smoe import UbSmoe, UbSmoeSettings
from fedguild.methods.ub_smoe.names import PSEUDO_GRADIENT
from fedguild.model.backbone import Backbone
from fedguild.runs import experiment
from fedguild.server import checkpoint
from tests.methods.federation import LARGE, MIDDLE, SMALL, Federation, client
from tests.runs.runs import Killed, assert_same, ended, kill_at, save_model, small_config

WITHOUT = "training/without_pseudo_gradient"


def ub_smoe(**options: object) -> UbSmoe:
    return UbSmoe(UbSmoeSettings(**{"rank": 2, **options}))  # type: ignore[arg-type]


PARTICIPANTS = [(0, 1, 2), (0, 2), (1, 2), (0, 1, 2)]


def run(backbone: Backbone, folder: Path, participants: Sequence[Sequence[int]], **options: object):
    """Four rounds with unequal participation; returns the states and each download's (round, client) -> payload."""
    who = [client(0, LARGE), client(1, SMALL), client(2, MIDDLE, 6)]
    federation = Federation(backbone, ub_smoe(**options), who, folder)
    state, states, downloads = federation.start(), [], {}
    for round, asked in enumerate(participants, start=1):
        for index in asked:
            downloads[round, index] = federation.method.download(state, federation.model, who[index])
        state = federation.method.aggregate(state, federation.train(state, round, who=asked))
        states.append(state)
    return states, downloads


def assert_same_bits(found: Payload, expected: Payload) -> None:
    assert found.scalars == expected.scalars
    assert found.tensors.keys() == expected.tensors.keys()
    assert [name for name, value in expected.tensors.items() if not torch.equal(found.tensors[name], value)] == []


def test_a_derived_pseudo_gradient_is_the_sent_one(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Both ways give the same run, bit by bit, also where clients sit rounds out."""
    derived, few = run(olmoe_backbone, tmp_path / "a", PARTICIPANTS)
    sent, many = run(olmoe_backbone, tmp_path / "b", PARTICIPANTS, send_pseudo_gradient="always")
    for left, right in zip(derived, sent, strict=True):
        assert_same_bits(left, right)
    got = {key for key, payload in few.items() if payload.part(PSEUDO_GRADIENT)}
    assert got == {(3, 1), (4, 0)}
    assert all(payload.part(PSEUDO_GRADIENT) for payload in many.values())
    assert any(value.any() for value in many[2, 0].part(PSEUDO_GRADIENT).values())
    for key in few:
        same = few[key].tensors.keys() == many[key].tensors.keys()
        assert same is (key in got)
        if same:
            assert size_bytes(few[key]) == size_bytes(many[key])


def test_a_client_that_lost_its_memory_trains_on(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Without G~ in that round, as in the first; it says so, and has the next one again."""
    who = [client(0, LARGE), client(1, SMALL)]
    federation = Federation(olmoe_backbone, ub_smoe(), who, tmp_path)
    method, state = federation.method, federation.start()
    state = method.aggregate(state, federation.train(state, 1))
    for path in (tmp_path / "clients" / "client-001").iterdir():
        path.unlink()
    uploads = federation.train(state, 2)
    assert [float(each.payload.tensors[WITHOUT]) for each in uploads] == [0.0, 1.0]
    state = method.aggregate(state, uploads)
    assert float(state.tensors["server/lost"]) == 1.0
    assert [float(each.payload.tensors[WITHOUT]) for each in federation.train(state, 3)] == [0.0, 0.0]


def test_a_stale_memory_is_not_used(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """The newest memory is lost, an older round's is left: its Theta is not the one that G~ starts from."""
    federation = Federation(olmoe_backbone, ub_smoe(), [client(0, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    for round in (1, 2):
        state = method.aggregate(state, federation.train(state, round))
    (tmp_path / "clients" / "client-000" / "round-00002.memory").unlink()
    (found,) = federation.train(state, 3)
    assert float(found.payload.tensors[WITHOUT]) == 1.0


def test_a_client_whose_upload_failed_is_sent_the_buffer(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Its memory is there, but the server counts on those only who delivered."""
    results = []
    for mode in ("when_needed", "always"):
        federation = Federation(
            olmoe_backbone, ub_smoe(send_pseudo_gradient=mode), [client(0, LARGE), client(1, SMALL)], tmp_path / mode
        )
        method, state = federation.method, federation.start()
        state = method.aggregate(state, federation.train(state, 1)[:1])
        assert method.download(state, federation.model, federation.clients[1]).part(PSEUDO_GRADIENT)
        results.append(method.aggregate(state, federation.train(state, 2)))
    assert_same_bits(*results)


def test_a_late_upload_does_not_make_its_client_a_holder(olmoe_backbone: Backbone, tmp_path: Path) -> None:
    """Client 1's upload of round 1 comes in round 2: it holds Theta of before round 1 and so is sent G~."""
    federation = Federation(olmoe_backbone, ub_smoe(), [client(0, LARGE), client(1, SMALL)], tmp_path)
    method, state = federation.method, federation.start()
    on_time, late = federation.train(state, 1)
    state = method.aggregate(state, [on_time])
    state = method.aggregate(state, [*federation.train(state, 2, who=[0]), late])
    assert state.tensors["server/holders"].tolist() == [0]
    held, sent = (method.download(state, federation.model, who).part(PSEUDO_GRADIENT) for who in federation.clients)
    assert not held
    assert sent
    assert [float(each.payload.tensors[WITHOUT]) for each in federation.train(state, 3)] == [0.0, 0.0]


@pytest.mark.parametrize("codec", ["bf16", pytest.param("int8", marks=pytest.mark.long)])
def test_with_a_codec_that_rounds_the_buffer_is_sent_to_all(
    codec: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a client could derive would be the rounding of Theta over eta Gamma; both settings are one run."""
    monkeypatch.setattr("fedguild.runs.experiment.write_report", lambda folder: folder / "report.html")
    monkeypatch.setattr("fedguild.core.codec.SMALLEST_SHRUNK", 1)
    few = (f"federation.wire_dtype={codec}", "evaluation.max_examples=2", "federation.rounds=3")
    model, traffic = save_model(tmp_path / "model"), []
    for mode in ("when_needed", "always"):
        settings = (*few, f"method.send_pseudo_gradient={mode}", "name=coded")
        experiment.run(small_config(model, *settings, base="ub-smoe/tiny-tasks"), tmp_path / mode)
        records = RunLog(tmp_path / mode).read()
        traffic.append([each.download_bytes for each in records if isinstance(each, ClientRecord)])
        last = checkpoint.latest(tmp_path / mode / layout.CHECKPOINTS)
        assert last == 3
    assert traffic[0] == traffic[1]
    states = [experiment.restore(tmp_path / mode)[1] for mode in ("when_needed", "always")]
    assert_same_bits(*states)


def test_fp32_leaves_the_setting_alone(olmoe_backbone: Backbone) -> None:
    method, model = ub_smoe(), olmoe_backbone.info
    assert method.settings.fitted(model, 4, exact=True) is method.settings
    assert method.settings.fitted(model, 4, exact=False).send_pseudo_gradient == "always"


@pytest.mark.long
def test_a_killed_run_resumes_bit_by_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half the clients a round; killed in round 3, after one of them kept its memory of that round."""
    half = ("federation.client_fraction=0.5", "federation.cohort_size=1", "evaluation.max_examples=2", "name=half")
    config = small_config(save_model(tmp_path / "model"), *half, base="ub-smoe/tiny-tasks")
    experiment.run(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        kill_at(patch, "fedguild.client.memory.ClientMemory.save", 5, after=True)
        with pytest.raises(Killed):
            experiment.run(config, tmp_path / "killed")
    experiment.resume(tmp_path / "killed")
    assert_same(ended(tmp_path / "killed"), ended(tmp_path / "whole"))
