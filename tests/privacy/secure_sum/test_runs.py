"""Whole runs with secure aggregation: in simulation, over the loopback Grid, and the configs that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedguild.config import load_config
from fedguild.core.codec import decode, encode
from fedguild.core.errors import ConfigError, QuorumError
from fedguild.core.files import make_folder
from fedguild.core.layout import CHECKPOINTS
from fedguild.core.payload import Payload
from fedguild.engines import secure
from fedguild.federation.audit import AuditLog
from fedguild.federation.flower.message import Message
from fedguild.federation.keys import write_key
from fedguild.federation.project import write_project
from fedguild.federation.site import ServerSettings, load_site
from fedguild.federation.trainer_service import run_metadata
from fedguild.measuring.log.records import ClientRecord, RoundRecord, RoutingRecord, RunLog
from fedguild.privacy.secure_sum.keys import load_peers
from fedguild.runs import experiment
from fedguild.server import checkpoint
from tests.engines.equality import traffic
from tests.federation.flower.loopback_federation import Lines, grid_of, serve_on, site_of
from tests.runs.runs import ended, save_model, small_config

SECURE = (
    "federation.clients=4",
    "federation.rounds=1",
    "federation.secure=true",
    "federation.cohort_size=1",
    "federation.budgets=[{name: all, active_experts: 2, rank: 3}]",
    "evaluation.every=2",
    "evaluation.max_examples=2",
)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_model(tmp_path_factory.mktemp("models") / "olmoe")


def sites(config, folder: Path, changes=None):
    """Writes every site's key, gives each the public ones of all, and returns their trainers."""
    from fedguild.federation.trainer_service import TrainerService
    from fedguild.runs.setup import preparation

    names = [f"client-{index:03d}" for index in range(config.federation.clients)]
    public = {name: write_key(folder / name / "node.key").read_text() for name in names}
    for name in names:
        make_folder(folder / name / "peers")
        for other, text in public.items():
            (folder / name / "peers" / f"{other}.pub").write_text(text)
    return [
        TrainerService(
            site_of(config, index, **(changes or {}).get(index, {})),
            folder / name,
            load=lambda config: preparation.load_model(config),
        )
        for index, name in enumerate(names)
    ]


def test_a_secure_run_over_flower_ends_as_in_simulation_bit_for_bit(model, tmp_path):
    config = small_config(model, *SECURE)
    experiment.run(config, tmp_path / "local")
    trainers = sites(config, tmp_path / "sites", {1: {"accept": {"secure": True}}})
    serve_on(grid_of(trainers), config, tmp_path / "server")
    local, remote = ended(tmp_path / "local"), ended(tmp_path / "server/state/run")
    assert local.state.tensors.keys() == remote.state.tensors.keys()
    for name, tensor in local.state.tensors.items():
        assert torch.equal(tensor, remote.state.tensors[name]), name
    assert traffic(tmp_path / "local") == traffic(tmp_path / "server/state/run")
    sums = [json.loads(path.read_text()) for path in (tmp_path / "sites").glob("**/sums.json")]
    assert [len(each) for each in sums] == [2] * 4, "not every site has recorded which sums it was in"
    records = [record for record in RunLog(tmp_path / "local").read() if isinstance(record, ClientRecord)]
    assert len({record.train_loss for record in records}) == 1, "the losses of single clients are in the log"
    plain = small_config(model, *SECURE, "federation.secure=false")
    experiment.run(plain, tmp_path / "plain")
    assert_close_where_three_count(local.state, ended(tmp_path / "plain").state, tmp_path / "plain")
    single = [record for record in RunLog(tmp_path / "plain").read() if isinstance(record, ClientRecord)]
    total = sum(record.train_loss * record.tokens for record in single) / sum(record.tokens for record in single)
    assert records[0].train_loss == pytest.approx(total, rel=1e-6)


def assert_close_where_three_count(secure, plain, folder):
    """Asserts that a FLAME run ended as the plain one, but for experts that fewer than three clients activated."""
    (routing,) = [record for record in RunLog(folder).read() if isinstance(record, RoutingRecord)]
    counts = (torch.tensor(routing.frequency) > 0).sum(dim=0)
    assert (counts < 3).any(), "the case has no such expert"
    config = load_config(str(folder / "config.yaml"))
    before = checkpoint.load(folder / CHECKPOINTS, 0, fingerprint=config.fingerprint()).state
    for name, expected in plain.tensors.items():
        found, large = secure.tensors[name], ...
        if ".experts." in name:
            large = counts[int(name.split(".layers.")[1][0])] >= 3
            assert torch.equal(found[~large], before.tensors[name][~large])
        torch.testing.assert_close(found[large], expected[large], rtol=1e-6, atol=1e-6)


def test_a_client_that_stops_between_two_steps_is_left_out(model, tmp_path):
    config = small_config(model, *SECURE)
    trainers = sites(config, tmp_path / "sites")
    trainers[2].handle, lines = refusing(trainers[2].handle, "send"), Lines()
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("client 2 was rejected", "dropped out of the secure aggregation: its machine stopped")
    sessions = [entry for entry in AuditLog(tmp_path / "server/state").read() if entry["event"] == "session"]
    assert [(entry["round"], entry["members"], entry["left"]) for entry in sessions] == [(1, [0, 1, 2, 3], [0, 1, 3])]
    assert sessions[0]["dropped"] == {"2": "its machine stopped"}
    assert sessions[0]["threshold"] == 3
    assert "failed" not in sessions[0]


def test_a_session_that_fails_is_in_the_audit_log_too(model, tmp_path):
    config = small_config(model, *SECURE, "federation.quorum=1.0")
    trainers = sites(config, tmp_path / "sites")
    for trainer in trainers[2:]:
        trainer.handle = refusing(trainer.handle, "weigh")
    with pytest.raises(QuorumError, match="2 of 4 clients are left after 'weigh'"):
        serve_on(grid_of(trainers), config, tmp_path / "server")
    entries = AuditLog(tmp_path / "server/state").read()
    assert [entry["event"] for entry in entries][-4:] == ["asked", "session", "failed", "stopped"]
    assert entries[-4]["clients"] == [0, 1, 2, 3]
    assert "2 of 4 clients are left after 'weigh'" in entries[-2]["reason"]
    (entry,) = [entry for entry in entries if entry["event"] == "session"]
    assert "2 of 4 clients are left after 'weigh'" in entry["failed"]
    assert entry["left"] == [0, 1]
    assert sorted(entry["dropped"]) == ["2", "3"]


def refusing(handle, step):
    """Returns a client's answers, without one to a step of a secure aggregation."""

    def answer(message):
        gone = message.kind == "secure" and message.metadata["step"] == step
        return message.reply(failure="its machine stopped") if gone else handle(message)

    return answer


def test_a_client_that_refuses_its_own_upload_does_not_say_by_how_much(model, tmp_path, capsys):
    config = small_config(model, *SECURE, "federation.max_update_norm=1e-6")
    with pytest.raises(QuorumError, match="its upload is not finite, beyond the limits") as raised:
        serve_on(grid_of(sites(config, tmp_path / "sites")), config, tmp_path / "server")
    assert "norm is" not in str(raised.value)
    assert "norm is" in capsys.readouterr().err


def test_an_error_in_a_secure_run_keeps_its_text_at_the_site(model, tmp_path, capsys):
    config = small_config(model, *SECURE)
    trainer = sites(config, tmp_path / "sites")[0]

    def failing(message):
        raise ValueError("a loss of 3.25")

    trainer._handlers["train"] = failing
    message = Message("train", "0" * 32, 1, 0, metadata=run_metadata(config))
    assert trainer.handle(message).failure == "its trainer failed: ValueError"
    assert "a loss of 3.25" in capsys.readouterr().err
    plain = replace(message, metadata=run_metadata(small_config(model, *SECURE, "federation.secure=false")))
    assert "3.25" in trainer.handle(plain).failure


def test_a_site_that_sends_masked_uploads_only_refuses_a_plain_run(model, tmp_path):
    config = small_config(model, *SECURE, "federation.secure=false", "federation.quorum=1.0")
    trainers = sites(config, tmp_path / "sites", {1: {"accept": {"secure": True}}})
    with pytest.raises(QuorumError, match=r"but accept\.secure is true"):
        serve_on(grid_of(trainers), config, tmp_path / "server", wait_seconds=0.1)


def test_a_key_that_its_peers_do_not_know_keeps_a_client_out(model, tmp_path):
    config = small_config(model, *SECURE)
    trainers = sites(config, tmp_path / "sites")
    (tmp_path / "sites/client-003/node.key").unlink()
    (tmp_path / "sites/client-003/node.pub").unlink(missing_ok=True)
    write_key(tmp_path / "sites/client-003/node.key")
    with pytest.raises(QuorumError, match="the key of client 3 is not signed by the key that is registered for it"):
        serve_on(grid_of(trainers), config, tmp_path / "server")


def test_where_the_server_knows_the_keys_one_that_signs_with_another_is_left_out(model, tmp_path):
    config = small_config(model, *SECURE)
    trainers, lines = sites(config, tmp_path / "sites"), Lines()
    shutil.copytree(tmp_path / "sites/client-000/peers", tmp_path / "server" / ServerSettings().nodes)
    (tmp_path / "sites/client-003/node.key").unlink()
    (tmp_path / "sites/client-003/node.pub").unlink(missing_ok=True)
    write_key(tmp_path / "sites/client-003/node.key")
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("client 3 was rejected", "what it joined with is not signed by the key")


def test_a_false_share_is_made_good_and_told(model, tmp_path):
    config = small_config(model, *SECURE)
    trainers, lines = sites(config, tmp_path / "sites"), Lines()
    handle = trainers[1].handle

    def lying(message):
        answer = handle(message)
        if message.metadata.get("step") != "open":
            return answer
        opened = decode(answer.body, "client-001")
        shares = opened.tensors["secure/shares"].clone()
        shares[0] ^= 1
        return replace(answer, body=encode(Payload({**opened.tensors, "secure/shares": shares}, opened.scalars)))

    trainers[1].handle = lying
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("client 1 did wrong, which the others made good: it opened a false share of client 0's secret")
    (whole,) = [record for record in RunLog(tmp_path / "server/state/run").read() if isinstance(record, RoundRecord)]
    assert [fault.client for fault in whole.faults] == [1]
    audit = [entry for entry in AuditLog(tmp_path / "server/state").read() if entry["event"] == "round"]
    assert audit[-1]["faults"].keys() == {"1"}


@pytest.mark.parametrize("step", ["train", "weigh", "send"])
def test_an_answer_that_is_none_is_one_clients_dropout(step, model, tmp_path):
    """An upload in the clear is not used, and bytes that are no message drop their client, whatever the step."""
    config = small_config(model, *SECURE)
    trainers = sites(config, tmp_path / "sites")
    handle, lines = trainers[1].handle, Lines()

    def careless(message):
        answer = handle(message)
        return replace(answer, body=b"\7" * 40) if step in (message.kind, message.metadata.get("step")) else answer

    trainers[1].handle = careless
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    reason = "it sent an upload in the clear" if step == "train" else "cannot be decoded"
    assert lines.says("client 1 was rejected", reason)


@pytest.mark.parametrize("entry", [("U8", [0, 2**40, 2**40]), ("I64", [0, 2**31, 2**31])], ids=str)
@pytest.mark.parametrize("step", ["join", "send"])
def test_an_array_without_values_and_beyond_every_size_drops_its_client_alone(entry, step, model, tmp_path):
    """It takes no byte, but torch or NumPy cannot compute its strides."""
    config = small_config(model, *SECURE)
    trainers, lines = sites(config, tmp_path / "sites"), Lines()
    handle = trainers[1].handle
    dtype, shape = entry
    header = json.dumps({"secure/keys": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    body = len(header).to_bytes(8, "little") + header

    def vast(message):
        answer = handle(message)
        return replace(answer, body=body) if message.metadata.get("step") == step else answer

    trainers[1].handle = vast
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("client 1 was rejected", "is beyond every tensor")


def test_what_an_answer_raises_is_its_clients_dropout(model, tmp_path, monkeypatch):
    """Whatever the library that reads it meets."""
    config = small_config(model, *SECURE)
    trainers, lines = sites(config, tmp_path / "sites"), Lines()

    def failing(data, who):
        if who == "client-001":
            raise OverflowError("of a kind that nobody thought of")
        return decode(data, who)

    monkeypatch.setattr("fedguild.federation.flower.engine.decode", failing)
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("client 1 was rejected", "its answer cannot be used: OverflowError")


def test_a_loss_that_one_client_made_up_ends_no_run(model, tmp_path, monkeypatch):
    """The server has the mean of the losses, in which one client's may be as large as a value may be."""
    config = small_config(model, *SECURE)
    trainers, lines = sites(config, tmp_path / "sites"), Lines()
    terms, calls = secure.whole_terms, []

    def lying(own, report, frequency):
        calls.append(report.loss)
        return terms(own, replace(report, loss=1000.0) if len(calls) == 1 else report, frequency)

    monkeypatch.setattr(secure, "whole_terms", lying)
    serve_on(grid_of(trainers), config, tmp_path / "server", lines)
    assert lines.says("Warning: by the clients' mean loss, the training of round 1 diverged", "it goes on")
    assert checkpoint.latest(tmp_path / "server/state/run" / CHECKPOINTS) == 1
    (whole,) = [record for record in RunLog(tmp_path / "server/state/run").read() if isinstance(record, RoundRecord)]
    assert len(whole.participants) == 4


def test_a_site_keeps_its_scores_and_refuses_another_session_than_the_configs(model, tmp_path):
    config = small_config(model, *SECURE)
    trainer = sites(config, tmp_path / "sites")[0]
    metadata = run_metadata(config)
    score = Message("score", "0" * 32, 1, 0, metadata={**metadata, "scope": "client", "split": "test"})
    assert "its scores are its own alone" in trainer.handle(score).failure
    form, nonce = "0" * 64, "1" * 32
    session = {"run": "0" * 32, "round": 1, "nonce": nonce, "form": form, "share": 0.6, "fewest": 3, "unheld": "omit"}
    step = Message("secure", "0" * 32, 1, 0, metadata={**metadata, "session": session, "step": "join"})
    assert "not that of the run's config" in trainer.handle(step).failure
    plain = replace(step, metadata={**step.metadata, "session": {**session, "share": 0.3}})
    assert "session.share" in trainer.handle(plain).failure


def test_a_site_names_what_it_does_not_disclose(model, tmp_path):
    config = small_config(model, *SECURE, "federation.secure_disclose=[scores]", "federation.quorum=1.0")
    accepts = {index: {"accept": {"disclose": ["scores"]}} for index in range(3)}
    with pytest.raises(QuorumError, match=r"asks for scores in the clear, beyond accept\.disclose"):
        serve_on(grid_of(sites(config, tmp_path / "sites", accepts)), config, tmp_path / "server", wait_seconds=0.1)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_init_gives_every_client_its_peers_keys_and_a_site_that_accepts_nothing_else(tmp_path):
    write_project(tmp_path / "guild", 3, "flame/tiny-tasks", ["federation.secure=true"])
    for index in range(3):
        folder = tmp_path / f"guild/client-{index:03d}"
        site = load_site(folder)
        assert site.accept.secure
        assert sorted(load_peers(folder / site.peers)) == [0, 1, 2]


def test_a_site_without_its_peers_keys_says_which_files_it_needs(model, tmp_path):
    config = small_config(model, *SECURE)
    trainers = sites(config, tmp_path / "sites")
    for trainer in trainers:
        trainer.site = trainer.site.model_copy(update={"peers": "nowhere"})
    lines = Lines()
    with pytest.raises(QuorumError):
        serve_on(grid_of(trainers), config, tmp_path / "server", lines, wait_seconds=0.1)
    assert lines.says("has no public keys of the other clients")


class TestRefusedConfigs:
    @pytest.mark.parametrize(
        ("setting", "reason"),
        [
            ("federation.wire_dtype=bf16", "federation.wire_dtype"),
            ("federation.aggregator=median", "federation.aggregator"),
            ("federation.norm_factor=3", "federation.norm_factor"),
            ("federation.straggler_policy=next_round", "federation.straggler_policy"),
            ("federation.clients=2", "federation.clients"),
            ("federation.client_fraction=0.5", "federation.clients"),
            ("federation.secure_clients=5", "federation.secure_clients"),
        ],
    )
    def test_settings_that_need_single_uploads_are_refused(self, setting, reason, model, tmp_path):
        with pytest.raises(ConfigError, match=reason):
            experiment.run(small_config(model, *SECURE, setting), tmp_path / "run")

    @pytest.mark.parametrize(
        ("method", "reason"),
        [("fedalign-moe", "by their cosines"), ("fedmoe", "needs activation, validation of every")],
    )
    def test_methods_that_need_them_are_refused_before_anything_is_read(self, method, reason, model, tmp_path):
        budgets = "[{name: large, active_experts: 1, rank: 4}, {name: small, active_experts: 1, rank: 2}]"
        memory = [f"federation.budgets={budgets}"] if method == "fedmoe" else []
        config = small_config(model, *SECURE, *memory, base=f"{method}/tiny-tasks")
        with pytest.raises(ConfigError, match=reason):
            experiment.run(config, tmp_path / "run")

    def test_real_clients_do_not_send_their_own_scores(self, model, tmp_path):
        config = small_config(model, *SECURE)
        with pytest.raises(ConfigError, match="the scores of their own models one by one"):
            serve_on(grid_of([]), config, tmp_path / "server", server_evaluation=False)
