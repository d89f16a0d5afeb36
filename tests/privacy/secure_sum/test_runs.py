"""Whole runs with secure aggregation: in simulation, over the loopback Grid, and the configs that are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

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
from tests.runs.runs import ended, small_config

SECURE = (
    "federation.clients=4",
    "federation.rounds=1",
    "federation.secure=true",
    "federation.cohort_size=1",
    "federation.budgets=[{name: all, active_experts: 2, rank: 3}]",
    "evaluation.every=2",
    "evaluation.max_examples=2",
)


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


def test_a_secure_run_over_flower_ends_as_in_simulation_bit_for_bit(olmoe_folder, tmp_path):
    config = small_config(olmoe_folder, *SECURE)
    experiment.run(config, tmp_path / "local")
    trainers = sites(config, tmp_path / "sites", {1: {"accept": {"secure": True}}})
    serve_on(grid_of(trainers), config, tmp_path / "server")
    local, remote = ended(tmp_path / "local"), ended(tmp_path / "server/state/run")
    assert local.state.tensors.keys() == remote.state.tensors.keys()
    for name, tensor in local.state.tensors.items():
        assert torch.equal(tensor, remote.state.tensors[name]), name
    assert traffic(tmp_path / "local") == traffic(tmp_path / "server/state/run")
    sums = [path.read_text().splitlines()[1:] for path in (tmp_path / "sites").glob("*/work/sums.jsonl")]
    assert [len(each) for each in sums] == [2] * 4, "not every site has recorded which sums it was in"
    records = [record for record in RunLog(tmp_path / "local").read() if isinstance(record, ClientRecord)]
    assert len({record.train_loss for record in records}) == 1, "the losses of single clients are in the log"
    plain = small_config(olmoe_folder, *SECURE, "federation.secure=false")
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


class Guild:
    """The sites of a secure run; `serve` runs it, and `lines` are what its server says."""

    def __init__(self, model, folder, *overrides, accept=None):
        self.config, self.folder, self.lines = small_config(model, *SECURE, *overrides), folder, Lines()
        changes = {index: {"accept": own} for index, own in (accept or {}).items()}
        self.trainers = sites(self.config, folder / "sites", changes)

    def serve(self, **options):
        serve_on(grid_of(self.trainers), self.config, self.folder / "server", self.lines, **options)

    def answering(self, client, change):
        handle = self.trainers[client].handle
        self.trainers[client].handle = lambda message: change(message, handle(message))

    def another_key(self, client):
        folder = self.folder / f"sites/client-{client:03d}"
        for name in ("node.key", "node.pub"):
            (folder / name).unlink(missing_ok=True)
        write_key(folder / "node.key")

    def audited(self, event):
        return [entry for entry in AuditLog(self.folder / "server/state").read() if entry["event"] == event]

    def round(self):
        records = RunLog(self.folder / "server/state/run").read()
        (whole,) = [record for record in records if isinstance(record, RoundRecord)]
        return whole


@pytest.fixture
def guild(olmoe_folder, tmp_path):
    return lambda *overrides, **more: Guild(olmoe_folder, tmp_path, *overrides, **more)


def gone_at(step):
    """The change of a client that does not answer a step of a secure aggregation."""
    return lambda message, answer: (
        message.reply(failure="its machine stopped") if message.metadata.get("step") == step else answer
    )


def test_a_client_that_stops_between_two_steps_is_left_out(guild):
    four = guild()
    four.answering(2, gone_at("send"))
    four.serve()
    assert four.lines.says("client 2 was rejected", "dropped out of the secure aggregation: its machine stopped")
    (session,) = four.audited("session")
    assert (session["round"], session["members"], session["left"]) == (1, [0, 1, 2, 3], [0, 1, 3])
    assert (session["dropped"], session["threshold"]) == ({"2": "its machine stopped"}, 3)
    assert "failed" not in session


def test_a_client_that_is_always_late_in_a_session_is_waited_for_less_and_less(guild, monkeypatch):
    """It trains in time, and never answers the first step, which the others wait for in rounds 1, 2, 3, 5 and 8."""
    clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
    clock.sleep = lambda seconds: vars(clock).update(now=clock.now + max(seconds, 0.125))
    for module in ("engine", "client_registry"):
        monkeypatch.setattr(f"fedguild.federation.flower.{module}.time", clock)
    four = guild("federation.rounds=8", "evaluation.every=99", "evaluation.eval_on_start=false")
    grid = grid_of(four.trainers)
    handle = grid.nodes[103].handle
    grid.nodes[103].handle = lambda message: None if message.kind == "secure" else handle(message)
    serve_on(grid, four.config, four.folder / "server", four.lines, secure_seconds=100.0)
    assert 500.0 <= clock.now < 600.0, "800 s before"
    assert four.lines.says("client 3 was rejected", "it held up the others 3 times")


def test_a_session_that_fails_is_in_the_audit_log_too(guild):
    four = guild("federation.quorum=1.0")
    for client in (2, 3):
        four.answering(client, gone_at("weigh"))
    with pytest.raises(QuorumError, match="2 of 4 clients are left after 'weigh'"):
        four.serve()
    entries = AuditLog(four.folder / "server/state").read()
    assert [entry["event"] for entry in entries][-4:] == ["asked", "session", "failed", "stopped"]
    assert entries[-4]["clients"] == [0, 1, 2, 3]
    for reason in (entries[-2]["reason"], entries[-3]["failed"]):
        assert "2 of 4 clients are left after 'weigh'" in reason
    assert (entries[-3]["left"], sorted(entries[-3]["dropped"])) == ([0, 1], ["2", "3"])


def test_a_run_that_begins_again_without_one_client_is_refused(guild):
    """The difference of both sums would be that client's change. With another first adapter it is not."""
    four = guild()
    four.serve()
    grid, again = grid_of(four.trainers[:3]), {"grace_seconds": 0.0}
    with pytest.raises(QuorumError, match="summed over other clients before") as raised:
        serve_on(grid, four.config, four.folder / "again", **again)
    assert "another `seed`" in str(raised.value)
    serve_on(grid_of(four.trainers), four.config, four.folder / "with all", **again)
    serve_on(grid, four.config.model_copy(update={"seed": 1}), four.folder / "of another seed", **again)


def test_a_round_whose_download_was_moved_is_asked_for_once(guild):
    four = guild()
    asked = []
    for client in range(4):
        four.answering(client, lambda message, answer: asked.append(message) or answer)
    four.serve()
    train = next(message for message in asked if message.kind == "train")
    download = decode(train.body, "The download")
    name = next(name for name, tensor in download.tensors.items() if tensor.any())
    moved = torch.nextafter(download.tensors[name], torch.tensor(torch.inf))
    body = encode(Payload({**download.tensors, name: moved}, download.scalars))
    trainer = four.trainers[train.client]
    assert not trainer.handle(train).failure, "a server that was interrupted asks again"
    assert "the limit where uploads are summed" in trainer.handle(replace(train, body=body)).failure


def test_a_client_that_refuses_its_own_upload_does_not_say_by_how_much(guild, capsys):
    with pytest.raises(QuorumError, match="its upload is not finite, beyond the limits") as raised:
        guild("federation.max_update_norm=1e-6").serve()
    assert "norm is" not in str(raised.value)
    assert "norm is" in capsys.readouterr().err


def test_an_error_in_a_secure_run_keeps_its_text_at_the_site(olmoe_folder, tmp_path, capsys):
    config = small_config(olmoe_folder, *SECURE)
    trainer = sites(config, tmp_path / "sites")[0]

    def failing(message):
        raise ValueError("a loss of 3.25")

    trainer._handlers["train"] = failing
    message = Message("train", "0" * 32, 1, 0, metadata=run_metadata(config))
    assert trainer.handle(message).failure == "its trainer failed: ValueError"
    assert "a loss of 3.25" in capsys.readouterr().err
    plain = replace(message, metadata=run_metadata(small_config(olmoe_folder, *SECURE, "federation.secure=false")))
    assert "3.25" in trainer.handle(plain).failure


def test_a_site_that_sends_masked_uploads_only_refuses_a_plain_run(guild):
    with pytest.raises(QuorumError, match=r"but accept\.secure is true"):
        guild("federation.secure=false", "federation.quorum=1.0", accept={1: {"secure": True}}).serve(wait_seconds=0.1)


def test_a_site_names_what_it_does_not_disclose(guild):
    settings = ("federation.secure_disclose=[scores]", "federation.quorum=1.0")
    accept = {index: {"disclose": ["scores"]} for index in range(3)}
    with pytest.raises(QuorumError, match=r"asks for scores in the clear, beyond accept\.disclose"):
        guild(*settings, accept=accept).serve(wait_seconds=0.1)


def test_a_key_that_its_peers_do_not_know_keeps_a_client_out(guild):
    """And where the server knows the keys, that client alone."""
    four = guild()
    four.another_key(3)
    with pytest.raises(QuorumError, match="the key of client 3 is not signed by the key that is registered for it"):
        four.serve()
    shutil.copytree(four.folder / "sites/client-000/peers", four.folder / "server" / ServerSettings().nodes)
    four.serve()
    assert four.lines.says("client 3 was rejected", "what it joined with is not signed by the key")


def test_a_false_share_is_made_good_and_told(guild):
    def lying(message, answer):
        if message.metadata.get("step") != "open":
            return answer
        opened = decode(answer.body, "client-001")
        shares = opened.tensors["secure/shares"].clone()
        shares[0] ^= 1
        return replace(answer, body=encode(Payload({**opened.tensors, "secure/shares": shares}, opened.scalars)))

    four = guild()
    four.answering(1, lying)
    four.serve()
    told = "client 1 did wrong, which the others made good: it opened a false share of client 0's secret"
    assert four.lines.says(told)
    assert [fault.client for fault in four.round().faults] == [1]
    assert four.audited("round")[-1]["faults"].keys() == {"1"}


def vast(dtype, *shape):
    """An array without a byte, of which torch or NumPy cannot compute the strides."""
    header = json.dumps({"secure/keys": {"dtype": dtype, "shape": shape, "data_offsets": [0, 0]}}).encode()
    return len(header).to_bytes(8, "little") + header


@pytest.mark.parametrize(
    ("at", "body", "reason"),
    [
        ("train", b"\7" * 40, "it sent an upload in the clear"),
        ("weigh", b"\7" * 40, "cannot be decoded"),
        ("send", b"\7" * 40, "cannot be decoded"),
        ("join", vast("U8", 0, 2**40, 2**40), "is beyond every tensor"),
        ("send", vast("I64", 0, 2**31, 2**31), "is beyond every tensor"),
    ],
    ids=["train", "weigh", "send", "join of no value", "send of no value"],
)
def test_an_answer_that_is_none_is_one_clients_dropout(at, body, reason, guild):
    """An upload in the clear is not used, and bytes that are no message drop their client, whatever the step."""
    four = guild()
    four.answering(
        1,
        lambda message, answer: (
            replace(answer, body=body) if at in (message.kind, message.metadata.get("step")) else answer
        ),
    )
    four.serve()
    assert four.lines.says("client 1 was rejected", reason)


def test_what_an_answer_raises_is_its_clients_dropout(guild, monkeypatch):
    """Whatever the library that reads it meets."""

    calls = []

    def failing(data, source, *most):
        calls.append(source)
        if source == "its answer" and calls.count(source) == 1:
            raise OverflowError("of a kind that nobody thought of")
        return decode(data, source, *most)

    monkeypatch.setattr("fedguild.federation.flower.engine.decode", failing)
    four = guild()
    four.serve()
    assert four.lines.says("was rejected", "its answer cannot be used: OverflowError")


def test_a_loss_that_one_client_made_up_ends_no_run(guild, monkeypatch):
    """The server has the mean of the losses, in which one client's may be as large as a value may be."""
    terms, calls = secure.whole_terms, []

    def lying(own, report, frequency):
        calls.append(report.loss)
        return terms(own, replace(report, loss=1000.0) if len(calls) == 1 else report, frequency)

    monkeypatch.setattr(secure, "whole_terms", lying)
    four = guild()
    four.serve()
    assert four.lines.says("Warning: by the clients' mean loss, the training of round 1 diverged", "it goes on")
    assert checkpoint.latest(four.folder / "server/state/run" / CHECKPOINTS) == 1
    assert len(four.round().participants) == 4


def test_a_site_refuses_another_session_than_the_configs(olmoe_folder, tmp_path):
    config = small_config(olmoe_folder, *SECURE)
    trainer = sites(config, tmp_path / "sites")[0]
    metadata = run_metadata(config)
    form, nonce = "0" * 64, "1" * 32
    session = {"run": "0" * 32, "round": 1, "nonce": nonce, "form": form, "share": 0.6, "fewest": 3, "unheld": "omit"}
    step = Message("secure", "0" * 32, 1, 0, metadata={**metadata, "session": session, "step": "join"})
    assert "not that of the run's config" in trainer.handle(step).failure
    plain = replace(step, metadata={**step.metadata, "session": {**session, "share": 0.3}})
    assert "session.share" in trainer.handle(plain).failure


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_init_gives_every_client_its_peers_keys_and_a_site_that_accepts_nothing_else(tmp_path):
    write_project(tmp_path / "guild", 3, "flame/tiny-tasks", ["federation.secure=true"], shared_data=True)
    for index in range(3):
        folder = tmp_path / f"guild/client-{index:03d}"
        site = load_site(folder)
        assert site.accept.secure
        assert sorted(load_peers(folder / site.peers)) == [0, 1, 2]


def test_a_site_without_its_peers_keys_says_which_files_it_needs(guild):
    four = guild()
    for trainer in four.trainers:
        trainer.site = trainer.site.model_copy(update={"peers": "nowhere"})
    with pytest.raises(QuorumError):
        four.serve(wait_seconds=0.1)
    assert four.lines.says("has no public keys of the other clients")


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
    def test_settings_that_need_single_uploads_are_refused(self, setting, reason, olmoe_folder, tmp_path):
        with pytest.raises(ConfigError, match=reason):
            experiment.run(small_config(olmoe_folder, *SECURE, setting), tmp_path / "run")

    @pytest.mark.parametrize(
        ("method", "reason"),
        [("fedalign-moe", "by their cosines"), ("fedmoe", "needs activation, validation of every")],
    )
    def test_methods_that_need_them_are_refused_before_anything_is_read(self, method, reason, olmoe_folder, tmp_path):
        budgets = "[{name: large, active_experts: 1, rank: 4}, {name: small, active_experts: 1, rank: 2}]"
        memory = [f"federation.budgets={budgets}"] if method == "fedmoe" else []
        config = small_config(olmoe_folder, *SECURE, *memory, base=f"{method}/tiny-tasks")
        with pytest.raises(ConfigError, match=reason):
            experiment.run(config, tmp_path / "run")
