"""Replies of a client's trainer service."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fedguild.client.budget import ClientInfo
from fedguild.client.memory import ClientMemory
from fedguild.config import Config
from fedguild.core.codec import encode
from fedguild.core.errors import ConfigError, DataError
from fedguild.core.files import write_text
from fedguild.core.payload import Payload
from fedguild.core.seeding import torch_rng
from fedguild.engines.client_report import ClientReport
from fedguild.federation import trainer_service
from fedguild.federation.flower.engine import read_payload
from fedguild.federation.flower.message import Message
from fedguild.federation.schema import MessageKind
from fedguild.federation.trainer import check_run
from fedguild.federation.trainer_service import TrainerService, model_digest, run_metadata
from fedguild.methods import build_method
from fedguild.runs.setup import budgets_of, fitted, load_model, preparation
from fedguild.server.method import Roster, excerpt_of
from tests.federation.flower.loopback_federation import QUICK, site_of, small_config, trainers_of

RUN = "ab" * 16


@pytest.fixture(scope="module")
def config(olmoe_folder: Path) -> Config:
    return small_config(olmoe_folder, *QUICK)


@pytest.fixture
def trainer(config: Config, tmp_path: Path) -> TrainerService:
    return trainers_of(config, tmp_path)[1]


def train_request(
    config: Config, round: int = 1, client: int = 1, factor: float = 1.0, kind: MessageKind = "train"
) -> Message:
    """Returns the server's request of a round's training, or to take the model home; a multiple of the start."""
    backbone = load_model(config)
    method = fitted(build_method(config.method.name, config.method.options), config, backbone.info)
    budgets = list(budgets_of(config, backbone.info).values())
    state = method.start(backbone.info, Roster(budgets), torch_rng(config.seed, "start", config.method.name))
    who = ClientInfo(client, budgets[client % 2], 10)
    download = (
        method.download(state, backbone.info, who) if kind == "train" else excerpt_of(method, state, backbone.info, who)
    )
    body = encode(Payload({name: factor * value for name, value in download.tensors.items()}, download.scalars))
    return Message(kind, RUN, round, client, metadata=run_metadata(config), body=body)


def test_a_trained_round_comes_with_its_report(config: Config, trainer: TrainerService) -> None:
    reply = trainer.handle(train_request(config))
    report = ClientReport.from_json(reply.metadata)
    assert (reply.run, reply.round, reply.client) == (RUN, 1, 1)
    assert report.training.steps == 2
    assert report.training.first_loss is not None
    assert report.frequency is not None
    assert report.frequency.shape == (2, 8)
    assert (report.peak_memory_bytes or 0) > 0
    assert read_payload(reply.body, "test").tensors


def test_the_memory_of_two_runs_is_apart(config: Config, trainer: TrainerService) -> None:
    trainer.handle(train_request(config))
    trainer.handle(replace(train_request(config), run="cd" * 16))
    folders = sorted(path.name for path in (trainer.work / "runs").iterdir())
    assert folders == [RUN, "cd" * 16]
    first, second = (ClientMemory(trainer.work / "runs" / name / "clients").load("client-001", 2) for name in folders)
    assert first.tensors.keys() == second.tensors.keys() != set()


def test_every_request_is_an_event_of_the_sites_log(config: Config, trainer: TrainerService) -> None:
    reply = trainer.handle(train_request(config))
    trainer.handle(train_request(config, client=0))
    done, failed = map(json.loads, (trainer.work / "activity.jsonl").read_text().splitlines())
    assert (done["kind"], done["run"], done["round"], done["outcome"]) == ("train", RUN, 1, "answered")
    assert done["sent_bytes"] == len(reply.body) > 0
    assert (failed["outcome"], failed["sent_bytes"]) == ("failed", 0)
    fields = {"time", "event", "kind", "run", "round", "outcome", "seconds", "received_bytes", "sent_bytes"}
    assert done.keys() == failed.keys() == fields


def test_a_message_for_another_client_is_not_worked_on(config: Config, trainer: TrainerService) -> None:
    assert trainer.handle(train_request(config, client=0)).failure == "a message for client 0 reached client 1"
    assert trainer.loads == 0


def test_a_config_of_another_version_is_a_failure(config: Config, trainer: TrainerService) -> None:
    strange = replace(train_request(config), metadata={"config": {"method": "fedit", "novelty": 1}})
    assert "the same version of fedguild" in trainer.handle(strange).failure


def test_a_site_imports_no_function_that_the_server_names(config: Config, trainer: TrainerService) -> None:
    evaluation = config.evaluation.model_copy(update={"metrics": ("antigravity:fly",)})
    reply = trainer.handle(train_request(config.model_copy(update={"evaluation": evaluation})))
    assert "'antigravity:fly' is a Python function" in reply.failure
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("kind", ["hello", "train", "score", "deliver", "secure"])
def test_a_site_imports_no_method_that_the_server_names(
    config: Config, trainer: TrainerService, kind: MessageKind
) -> None:
    named = config.model_copy(update={"method": config.method.model_copy(update={"name": "antigravity:Fly"})})
    reply = trainer.handle(Message(kind, RUN, 1, 1, metadata=run_metadata(named)))
    assert "'antigravity:Fly' is a Python class" in reply.failure
    with pytest.raises(ConfigError, match=r"only runs on one machine.*\n.*plug-in at the server and at every site"):
        trainer.exposure(named)
    assert "antigravity" not in sys.modules
    assert trainer.loads == 0


def test_damaged_bytes_are_a_failure(config: Config, trainer: TrainerService) -> None:
    assert "cannot be decoded" in trainer.handle(replace(train_request(config), body=b"\1" * 64)).failure


def test_a_hello_gets_a_description_of_the_client(config: Config, trainer: TrainerService) -> None:
    reply = trainer.handle(Message("hello", RUN, metadata=run_metadata(config)))
    assert reply.client == 1
    assert reply.metadata["model"] == model_digest(load_model(config).info)
    assert reply.metadata["budget"] == "small"
    assert reply.metadata["sizes"]["train"] > 0
    assert reply.metadata["method"] == "fedguild"


def test_sites_say_how_they_write_and_learn_their_texts(
    config: Config, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same where they agree, whatever does not matter for their texts; and the log what is left out."""
    rows = [
        {"messages": [{"role": "user", "content": f"a{n}"}, {"role": "assistant", "content": "b"}]} for n in range(9)
    ]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"messages": []}])))
    chats = {
        "dataset": "instructions",
        "train": str(tmp_path / "chats.jsonl"),
        "partition": {"scheme": "iid", "minimum": 1},
    }
    sites = [
        *({"data": {"chat_template": template}} for template in (None, "plain")),
        *({"data": {**chats, "chat_template": "plain", "train_on": which}} for which in ("all_turns", "last_turn")),
        {"data": {**chats, "chat_template": "plain", "train_on": "all_turns", "seed": 1}},
    ]
    untold = trainers_of(config, tmp_path / "untold", [{"data": {**chats, "chat_template": None}}] * 3)[1]
    monkeypatch.setattr(preparation.load_model(config).tokenizer, "chat_template", None)  # of the tests before
    with pytest.raises(DataError, match="conversations, but the model's tokenizer has no chat template"):
        untold.prepare()
    trainers_of(config, tmp_path / "told", [sites[2]] * 3)[1].prepare()
    assert "Left out: 1 training conversations without an assistant turn that answers." in capsys.readouterr().out
    said = []
    for number, site in enumerate(sites):
        trainer = trainers_of(config, tmp_path / str(number), [site] * 3)[1]
        reply = trainer.handle(Message("hello", RUN, metadata=run_metadata(config)))
        assert not reply.failure
        said.append(reply.metadata["texts"])
    prompts, prompts_too, all_turns, last_turn, all_turns_too = said
    assert prompts == prompts_too != all_turns == all_turns_too != last_turn
    assert "train_on last_turn" in last_turn


def test_a_budget_that_the_run_does_not_have(config: Config, tmp_path: Path) -> None:
    trainer = trainers_of(config, tmp_path, [{}, {"budget": "smal"}, {}])[1]
    failure = trainer.handle(Message("hello", RUN, metadata=run_metadata(config))).failure
    assert failure == "its site sets budget 'smal', which the run does not have"


def test_a_run_that_changes_its_config_is_refused(config: Config, tmp_path: Path) -> None:
    trainer = trainers_of(config, tmp_path)[1]
    assert not trainer.handle(train_request(config)).failure
    refused = trainer.handle(train_request(config.model_copy(update={"seed": 7}))).failure
    assert refused == "the run began here with another config; a new config needs a new run"


DAMAGES = {
    "none": lambda tensors: {},
    "half": lambda tensors: dict(list(tensors.items())[::2]),
    "NaN": lambda tensors: {name: tensor * float("nan") for name, tensor in tensors.items()},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_download_or_a_model_that_is_none_is_refused(damage: str, config: Config, trainer: TrainerService) -> None:
    """And the model that the client took home before stays the latest."""

    def damaged(message: Message) -> Message:
        sent = read_payload(message.body, "test")
        return replace(message, body=encode(Payload(DAMAGES[damage](sent.tensors), sent.scalars)))

    reason = "has NaN or infinity in" if damage == "NaN" else "tensors of the adapter are expected"
    assert reason in trainer.handle(damaged(train_request(config))).failure
    assert not trainer.handle(train_request(config, kind="deliver")).failure
    latest = trainer.work / "models/latest"
    kept = latest.resolve()
    assert reason in trainer.handle(damaged(train_request(config, round=2, kind="deliver"))).failure
    assert latest.resolve() == kept
    assert [path.name for path in kept.parent.iterdir() if not path.is_symlink()] == [kept.name]


def test_a_run_that_went_back_delivers_another_model_of_the_same_round(config: Config, trainer: TrainerService) -> None:
    """And going back to a model that was delivered before makes it the latest again."""
    request = train_request(config, kind="deliver")
    sent = read_payload(request.body, "test")
    other = Payload({name: tensor + 1 for name, tensor in sent.tensors.items()}, sent.scalars)
    latest = trainer.work / "models/latest"
    delivered = []
    for message in (request, replace(request, body=encode(other)), request):
        assert not trainer.handle(message).failure
        delivered.append([path.read_bytes() for path in sorted(latest.rglob("*.safetensors"))])
    assert delivered[0]
    assert delivered[0] == delivered[2] != delivered[1]
    assert len([path for path in latest.parent.iterdir() if not path.is_symlink()]) == 2


def test_what_a_killed_site_left_half_written_is_gone(config: Config, tmp_path: Path) -> None:
    trainers_of(config, tmp_path)[1].handle(train_request(config))
    run = tmp_path / "client-001/work/runs" / RUN
    for left in (
        ".answer.x.part",
        "clients/client-001/.round-00001.memory.x.part",
        "merges/.version-00001.merge.x.part",
    ):
        (run / left).parent.mkdir(exist_ok=True)
        (run / left).write_bytes(b"half")
    assert not trainers_of(config, tmp_path)[1].handle(train_request(config)).failure
    assert not list(run.rglob("*.part"))


def kept_rounds(trainer: TrainerService) -> list[int]:
    return [int(path.stem[-5:]) for path in sorted((trainer.work / "runs" / RUN / "clients/client-001").iterdir())]


@pytest.fixture
def long(config: Config) -> Config:
    """Of two rounds whose checkpoints are kept."""
    return config.model_copy(update={"federation": config.federation.model_copy(update={"rounds": 9})})


def test_a_site_forgets_the_rounds_after_which_a_run_went_back(long: Config, trainer: TrainerService) -> None:
    first = [trainer.handle(train_request(long, round=round)) for round in (1, 2, 3, 4)]
    assert kept_rounds(trainer) == [2, 3, 4]
    again = [trainer.handle(train_request(long, round=3)) for _ in range(2)]  # also asked twice
    assert [reply.body for reply in again] == [first[2].body] * 2
    assert kept_rounds(trainer) == [2, 3]
    assert not trainer.handle(train_request(long, round=5)).failure  # that of a client that missed a round


def test_a_run_that_went_back_further_than_a_sites_memory_is_refused(long: Config, trainer: TrainerService) -> None:
    """Not if the site had not trained before, as then nothing is lost."""
    for round in (3, 4, 5, 6):
        assert not trainer.handle(train_request(long, round=round)).failure
    assert kept_rounds(trainer) == [4, 5, 6]
    assert trainer.handle(train_request(long, round=4)).failure == (
        "its site has trained round 6 of this run, and what it kept before round 4 is gone "
        "(federation.save_total_limit: 2)"
    )
    assert kept_rounds(trainer) == [4, 5, 6]
    assert not trainer.handle(train_request(long, round=3)).failure
    assert kept_rounds(trainer) == [3]


def test_the_same_round_of_many_models_is_refused(config: Config, tmp_path: Path) -> None:
    """Also by the trainer that was started anew; the first request, word for word, gets the same answer again."""
    changes = [{}, {"accept": {"requests_per_round": 2}}, {}]
    trainer = trainers_of(config, tmp_path, changes)[1]
    asked = [train_request(config, factor=factor) for factor in (1.0, 0.5, 0.25)]
    answers = [trainer.handle(message) for message in asked]
    assert [bool(answer.failure) for answer in answers] == [False, False, True]
    assert "accept.requests_per_round is 2" in answers[2].failure
    again = trainers_of(config, tmp_path, changes)[1]
    assert "accept.requests_per_round is 2" in again.handle(asked[2]).failure
    assert again.handle(asked[0]).body == answers[0].body
    assert not again.handle(replace(train_request(config), round=2)).failure


@pytest.mark.parametrize(
    ("accept", "training", "reason"),
    [
        ({"max_steps": 10}, {"steps": 10**9}, "a round asks for 1000000000 steps"),
        ({"min_steps": 2}, {"steps": 1}, "below accept.min_steps of 2"),
        (
            {"min_batch": 4},
            {"batch_size": 1, "gradient_accumulation_steps": 3},
            "a step is on 3 example(s), below accept.min_batch",
        ),
        ({}, {"steps": 1, "batch_size": 1}, "a round trains on 1 example(s), below accept.min_examples of 2"),
        ({"min_examples": 5}, {"steps": 2, "batch_size": 2}, "a round trains on 4 example(s)"),
    ],
)
@pytest.mark.parametrize("kind", ["hello", "train", "score", "deliver"])
def test_every_request_of_a_run_that_asks_too_much_or_too_little_is_refused(
    kind: str, accept: dict[str, int], training: dict[str, int], reason: str, config: Config, tmp_path: Path
) -> None:
    trainer = trainers_of(config, tmp_path, [{}, {"accept": accept}, {}])[1]
    asked = config.model_copy(update={"training": config.training.model_copy(update=training)})
    metadata = {**run_metadata(asked), "scope": "client", "split": "test"}
    failure = trainer.handle(Message(kind, RUN, 1, 1, metadata=metadata)).failure  # type: ignore[arg-type]
    assert failure.startswith("refused by its site: ")
    assert reason in failure
    assert not (trainer.work / "runs").exists()


def test_a_run_of_a_million_clients_costs_a_site_nothing(config, trainer, monkeypatch) -> None:
    many = run_metadata(config)
    many["config"]["federation"]["clients"] = 10**6
    monkeypatch.setattr("fedguild.federation.trainer_service.method_of", lambda config: pytest.fail("it was prepared"))
    failure = trainer.handle(Message("hello", RUN, metadata=many)).failure
    assert failure == "refused by its site: the run is of 1000000 clients, beyond accept.max_clients of 10000"


def test_so_many_runs_begin_in_a_day_and_no_more(config: Config, tmp_path: Path) -> None:
    """Those that began go on; each has a folder and an entry in the ledger."""
    trainer = trainers_of(config, tmp_path, [{}, {"accept": {"runs_per_day": 2}}, {}])[1]
    runs = [f"{number:032x}" for number in (1, 2, 3, 1)]
    failures = [trainer.handle(Message("hello", run, metadata=run_metadata(config))).failure for run in runs]
    assert failures == ["", "", "refused by its site: 2 runs began within a day, and accept.runs_per_day is 2", ""]
    assert len(list((trainer.work / "runs").iterdir())) == 2
    yesterday = time.time() - 90_000
    os.utime(trainer.work / "runs" / runs[0] / "fingerprint", (yesterday, yesterday))
    assert not trainer.handle(Message("hello", runs[2], metadata=run_metadata(config))).failure


def test_a_flood_of_questions_who_a_site_is_costs_it_nothing(config, tmp_path, monkeypatch):
    """Each made a session anew, where two runs take turns, and a line in two logs."""
    trainer = trainers_of(config, tmp_path, [{}, {"accept": {"hellos_per_hour": 4}}, {}])[1]
    runs = [f"{number % 2:032x}" for number in range(40)]
    requests = [Message("hello", run, metadata=run_metadata(config)) for run in runs]
    sessions: list[str] = []
    new = trainer._new_session
    monkeypatch.setattr(trainer, "_new_session", lambda run, config: sessions.append(run) or new(run, config))
    failures = [trainer.handle(request).failure for request in requests]
    assert failures == ["", "", "", "", *[failures[-1]] * 36]
    assert "4 times within an hour (accept.hellos_per_hour)" in failures[-1]
    assert (len(sessions), len((trainer.work / "activity.jsonl").read_text().splitlines())) == (4, 4)
    trainer._hellos = deque(asked - 3600 for asked in trainer._hellos)
    assert not trainer.handle(requests[0]).failure


def test_the_log_of_a_sites_requests_does_not_grow_for_ever(config, trainer, monkeypatch):
    monkeypatch.setattr(trainer_service, "LOG_BYTES", 4000)
    strange = Message("train", RUN, 1, 0, metadata=run_metadata(config))
    sizes = []
    for number in range(60):
        trainer.handle(replace(strange, round=number))
        sizes.append((trainer.work / "activity.jsonl").stat().st_size)
    assert max(sizes) <= 4000
    assert [json.loads(line)["round"] for line in (trainer.work / "activity.jsonl").open()][-10:] == [*range(50, 60)]


@pytest.mark.parametrize("kind", ["train", "score", "deliver"])
def test_a_kind_of_request_that_the_site_does_not_accept(kind: str, config: Config, tmp_path: Path) -> None:
    accepted = [other for other in ("train", "score", "deliver") if other != kind]
    trainer = trainers_of(config, tmp_path, [{}, {"accept": {"requests": accepted}}, {}])[1]
    request = replace(train_request(config), kind=kind)
    request.metadata.update(scope="client", split="test")
    assert trainer.handle(request).failure == (
        f"refused by its site: '{kind}' is not among accept.requests ({', '.join(accepted)})"
    )


def test_a_score_of_fewer_examples_than_the_site_accepts(config: Config, tmp_path: Path) -> None:
    trainer = trainers_of(config, tmp_path, [{}, {"accept": {"min_scored": 2}}, {}])[1]
    one = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"max_examples": 1})})
    request = replace(train_request(one), kind="score")
    request.metadata.update(scope="client", split="test")
    assert "a score is of 1 example(s), below accept.min_scored of 2" in trainer.handle(request).failure


@pytest.mark.parametrize(
    ("accept", "most", "said"),
    [
        ({"min_scored": 1}, 2, ""),
        ({"min_scored": 3}, 2, "and evaluation.max_examples is 2"),
        ({"min_scored": 10**6}, None, "(this site has {held} test example(s))"),
        ({"min_scored": 10**6, "requests": ["train"]}, None, ""),
    ],
)
def test_a_site_is_told_of_a_bound_that_it_can_never_meet(accept, most, said, config, tmp_path, capsys):
    config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"max_examples": most})})
    trainer = trainers_of(config, tmp_path, [{"accept": accept}])[0]
    assert trainer.handle(train_request(config, client=0)).failure == ""
    in_log = capsys.readouterr().out
    held = len(trainer._client_data().test)
    assert held >= 2
    site = yaml.safe_dump(site_of(config, 0, accept=accept).model_dump(mode="json"))
    write_text(trainer.folder / "site.yaml", site)
    sentences, refusal = check_run(trainer.folder, config)
    assert refusal == ""
    assert len(sentences) == (2 if said else 1)
    assert sentences[0].startswith("What this setting can reveal: ")
    assert all(sentence in in_log for sentence in sentences)
    assert said.format(held=held) in sentences[-1]
    assert ("will refuse every score" in sentences[-1]) == bool(said)


@pytest.mark.parametrize("kind", ["train", "score", "deliver"])
def test_a_round_beyond_those_of_the_run_is_refused(kind: str, config: Config, tmp_path: Path) -> None:
    """Each round is asked for anew, so that one example could be scored by any number of models."""
    trainer = trainers_of(config, tmp_path)[1]
    request = replace(train_request(config, config.federation.rounds + 1), kind=kind)
    request.metadata.update(scope="client", split="test")
    failure = trainer.handle(request).failure
    assert failure == "refused by its site: round 3 is asked for, but the run has 2 round(s)"
    assert not (trainer.work / "runs").exists()
