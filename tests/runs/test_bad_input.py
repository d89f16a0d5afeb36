"""Bad settings, data, models and uploads, where a user meets them: a message that says what to do."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from fedguild.client.budget import Budget, ClientInfo
from fedguild.config import load_config
from fedguild.core.errors import ConfigError, QuorumError
from fedguild.core.layout import CHECKPOINTS
from fedguild.core.payload import Payload
from fedguild.measuring.log.records import ClientRecord, Record, RoundRecord, RunLog
from fedguild.methods import METHODS, build_method
from fedguild.methods.flame import Flame
from fedguild.model.backbone import describe_config
from fedguild.runs import experiment
from fedguild.runs.api.run_grid import Cell, Row
from fedguild.runs.setup import check_fit, fitted, method_of, model_of
from fedguild.server import checkpoint
from fedguild.server.method import always_sent, starts_from_clients
from tests.data.writing import write_jsonl
from tests.runs.conftest import Command
from tests.runs.runs import assert_same, ended, says, small_settings

Complaint = Callable[..., str]
TASKS, DOLLY, NEWS = "flame/tiny-tasks", "fedit/tiny-dolly", "fedit/tiny-ag_news"
TWO = "federation.rounds=2"


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("training.stepz=3", ["unknown key 'training.stepz'", "Did you mean 'training.steps'?"]),
        ("federaton.rounds=3", ["unknown key 'federaton'", "Did you mean 'federation'?"]),
        ("federation.rounds=many", ["federation.rounds: must be a whole number, got 'many'"]),
        ("federation.budgets=[{name: a, rank: 0}]", ["federation.budgets[0].rank: must be at least 1, got 0"]),
        ("method=flam", ["There is no method 'flam'", "Did you mean 'flame'?", f"Known: {', '.join(sorted(METHODS))}"]),
        ("method.rnak=8", ["method.rnak: flame has no such option", "Did you mean 'rank'?"]),
        ("method.rank=0", ["method.rank", "greater than or equal to 1", "got 0", "LoRA rank r"]),
        ("method.rescaler=learned", ["method.rescaler", "'per_layer', 'shared', 'static' or 'none'", "got 'learned'"]),
        ("data.dataset=dollie", ["There is no corpus 'dollie'", "Did you mean 'dolly'?"]),
        ("data.options={families: [sums]}", ["Unknown task family 'sums'", "Did you mean 'sum'?"]),
        ("data.train=mine.jsonl", ["'tasks' is generated, not read", "train_examples"]),
        ("evaluation.metrics=[rouge]", ["evaluation.metrics: there is no metric 'rouge'", "Did you mean 'rouge_l'?"]),
        (
            "method={name: fedit, targets: []}",
            ["fedit would train nothing with these options", "method.targets=[attention]"],
        ),
        ("model.path=~/nowhere", [f"Cannot load the model '{Path.home()}/nowhere': there is no such folder"]),
        ("model.path=./nowhere", ["Cannot load the model './nowhere': there is no such folder"]),
        ("model.path=models/mine/last", ["Cannot load the model 'models/mine/last': there is no such folder"]),
        ("model.device=cuda:7", ["model.device: cuda is requested", "Set model.device=cpu or auto"]),
    ],
)
def test_a_setting_that_is_wrong(complaint: Complaint, olmoe_folder: Path, override: str, told: list[str]) -> None:
    if "cuda" in override and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    says(complaint("run", TASKS, *small_settings(olmoe_folder), override, "--output", "out"), *told)
    assert not Path("out").exists()


@pytest.fixture
def nothing_is_read(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fails where the data or a weight is read; afterwards there is no folder of a run."""
    monkeypatch.setattr("fedguild.runs.setup.preparation.prepare_data", lambda *_: pytest.fail("the data was read"))
    monkeypatch.setattr(
        "fedguild.runs.setup.preparation.load_backbone", lambda **_: pytest.fail("the weights were read")
    )
    yield
    assert not Path("out").exists()
    assert not Path("runs").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("federation.clients=40", ["do not give 40 clients 2 experts each", "method.clients_per_expert"]),
        ("method.active_experts=9", ["9 active experts per token and room for 8 per client"]),
    ],
)
@pytest.mark.usefixtures("nothing_is_read")
def test_an_assignment_that_cannot_be_is_told_before_the_data_is_read(complaint, override, told):
    """Data and model of a real preset are a download; here neither may even be asked for."""
    says(complaint("run", "fedamole/tiny-tasks", override, "--output", "out"), *told)


FEDMOE, HFEDMOE = "fedmoe/tiny-tasks", "hfedmoe/tiny-tasks"
FEDMOE_CASES = [
    (["method.memory={b9: 0.5}"], ["method.memory: no budget is called b9", "Known: "]),
    (["method.memory={small: 0.01}"], ["method.memory: budget 'small' can hold 0.01 of all expert parameters"]),
    (["method.tasks=[one, two]"], ["method.tasks names 2 tasks, but there are"]),
]


@pytest.mark.parametrize(
    ("preset", "overrides", "told"),
    [
        *((FEDMOE, *case) for case in FEDMOE_CASES),
        (HFEDMOE, ["method.experts={b9: 0.5}"], ["method.experts: no budget is called b9", "Known: "]),
        ("fdlora/tiny-tasks", [], ["nevergrad, which is not installed", "fedguild[fusion]"]),
        (
            TASKS,
            ["data.max_length=64", "evaluation.answer_mode=generation", "evaluation.max_new_tokens=64"],
            ["evaluation.max_new_tokens is 64", "no room for a prompt within data.max_length 64"],
        ),
        (
            "fedsa-lora/tiny-tasks",
            ["privacy={unit: client, noise_multiplier: 1.0, clip: 1.0}"],
            ["no global model to score", "privacy.public=[scores]"],
        ),
    ],
)
@pytest.mark.usefixtures("nothing_is_read")
def test_what_the_method_and_the_scores_will_refuse_is_told_before_anything_is_read(
    complaint: Complaint, monkeypatch: pytest.MonkeyPatch, preset: str, overrides: list[str], told: list[str]
) -> None:
    monkeypatch.setitem(sys.modules, "nevergrad", None)
    says(complaint("run", preset, *overrides, "--output", "out"), *told)


def check_start(monkeypatch: pytest.MonkeyPatch, start: Callable[..., Payload]) -> None:
    """Checks a config of FLAME that begins like this."""
    monkeypatch.setattr(Flame, "start", start)
    config = load_config(TASKS)
    model = model_of(config)
    check_fit(fitted(method_of(config), config, model), config, model)


@pytest.mark.parametrize("reads", [lambda large: large.numpy(), lambda large: [0.0].index(large.sum().item())])
def test_a_start_that_only_values_can_take_is_left_to_the_run(monkeypatch, reads):
    """A method of another package may do with its tensors what shapes alone do not allow."""
    check_start(monkeypatch, lambda *_: reads(torch.zeros(2**19)))


@pytest.mark.parametrize(
    ("fails", "told", "cause"),
    [
        (lambda large: {"adapter": large}["adaptor"], "KeyError: 'adaptor'", KeyError),
        (lambda large: large @ torch.zeros(3), "RuntimeError: .*size", RuntimeError),
    ],
)
def test_a_start_that_fails_is_told_with_its_own_error(monkeypatch, fails, told, cause):
    """Also where it has large tensors, as long as no value of theirs is read."""
    with pytest.raises(ConfigError, match=f"flame cannot begin: its `start` raises {told}") as caught:
        check_start(monkeypatch, lambda *_: fails(torch.zeros(2**19)))
    assert isinstance(caught.value.__cause__, cause)


@pytest.mark.parametrize(
    ("fails", "told"),
    [
        (lambda clients: {0: clients}["x"], "KeyError: 'x'"),
        (lambda clients: torch.ones(2, len(clients)) @ torch.ones(2), "RuntimeError: .*size"),
    ],
)
def test_a_start_that_fails_with_the_clients_is_told(monkeypatch, fails, told):
    with pytest.raises(ConfigError, match=f"flame cannot begin: its `start` raises {told}"):
        check_start(monkeypatch, lambda _, model, roster, rng: fails(roster.clients))


@pytest.mark.parametrize(
    "fails_with_one",
    [
        lambda examples: 1 / (examples - 1),
        lambda examples: torch.multinomial(torch.tensor([float(examples > 1), 0.0]), 1),
    ],
)
def test_a_start_that_may_fail_for_the_made_up_examples_is_left_to_the_run(monkeypatch, fails_with_one):
    check_start(monkeypatch, lambda _, model, roster, rng: fails_with_one(roster.clients[0].examples))


def test_a_federation_waits_for_all_clients_where_a_start_needs_them_or_values(monkeypatch):
    model = describe_config("embedded")
    reads = {True: lambda large: large.numpy(), False: lambda large: None}
    for waits, read in reads.items():
        monkeypatch.setattr(Flame, "start", lambda *_, read=read: read(torch.zeros(2**19)) or Payload())
        assert starts_from_clients(build_method("flame", {}), model, []) is waits
        assert always_sent(build_method("flame", {}), model, [], ClientInfo(0, Budget("b", 1, 1), 1)) == frozenset()


def test_bytes_beyond_the_limit_are_found_where_a_start_with_clients_makes_up_values():
    config = load_config(TASKS, ["method={name: ub-smoe, start_norm: 1.0}", "federation.byte_limit=1000"])
    model = describe_config("olmoe-1b-7b")
    with pytest.raises(ConfigError, match="The run cannot begin: round 1 could move"):
        check_fit(fitted(method_of(config), config, model), config, model)


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["federation.engine.name=flower"], ["a run with real clients cannot be started from here", "federation init"]),
        (["federation.engine.name=ray"], ["the package 'ray' is not installed", "fedguild[ray]"]),
        (["tracking=[wandb]"], ["wandb needs the package wandb, which is not installed", "fedguild[wandb]"]),
        (["method={name: flora}", "model.load_in_4bit=true"], ["flora adds its rounds to the backbone's weights"]),
        (
            ["method={name: fedex-lora}", "model.load_in_4bit=true"],
            ["fedex-lora adds its rounds", "load_in_4bit=false"],
        ),
        (["method={name: florist}", "model.load_in_4bit=true"], ["florist adds its rounds to the backbone's weights"]),
        (["evaluation.split=validation", "data.split.validation=0"], ["data.split.validation is 0"]),
        (["callbacks=[{name: early-stopping, monitor: b9}]"], ["no score 'b9' to monitor", "Known: b1, b2"]),
        (["callbacks=[{name: early-stopping, monitor: mtal}]"], ["no score 'mtal' to monitor"]),
        (
            ["callbacks=[{name: early-stopping, monitor: b1, metric: perplexity}]"],
            ["'b1' has no metric 'perplexity'", "Known: accuracy"],
        ),
        (
            ["method={name: fedsa-lora}", "callbacks=[{name: early-stopping, monitor: mean}]"],
            ["no score 'mean' to monitor", "Known: mtal"],
        ),
    ],
)
@pytest.mark.usefixtures("nothing_is_read")
def test_what_the_rounds_will_need_is_told_before_anything_is_read(complaint, monkeypatch, overrides, told):
    for module in ("runs.setup.checks", "runs.tracking"):
        monkeypatch.setattr(f"fedguild.{module}.find_spec", lambda package: None)
    says(complaint("run", TASKS, *overrides, "--output", "out"), *told)


@pytest.mark.parametrize(
    "overrides",
    [
        ["method={name: florist, next_round: truncate}", "model.load_in_4bit=true"],
        ["callbacks=[{name: early-stopping, monitor: b1, metric: accuracy}]"],
        ["evaluation.clients=true", "callbacks=[{name: early-stopping, monitor: mtal, metric: deviation}]"],
        ["method={name: fedsa-lora}", "callbacks=[early-stopping]"],
    ],
)
def test_what_the_rounds_will_have_is_not_refused(monkeypatch, overrides, tmp_path):
    """Each gets as far as the data."""

    def read(*_: object) -> None:
        raise KeyError("the data is read")

    monkeypatch.setattr("fedguild.runs.setup.preparation.prepare_data", read)
    with pytest.raises(KeyError, match="the data is read"):
        experiment.run(load_config(TASKS, overrides), tmp_path / "out")


def test_a_prompt_without_room_is_told_before_the_weights_are_read(complaint, monkeypatch, tmp_path):
    """Whether free text is generated, the data tells."""
    monkeypatch.setattr(
        "fedguild.runs.setup.preparation.load_backbone", lambda **_: pytest.fail("the weights were read")
    )
    rows = [{"instruction": f"Say {i}.", "context": "", "response": "x", "category": "a"} for i in range(40)]
    file = write_jsonl(tmp_path / "mine.jsonl", rows)
    few = ["federation.clients=2", "data.partition={scheme: iid, minimum: 1}", f"data.train={file}"]
    told = complaint("run", DOLLY, *few, "data.max_length=32", "evaluation.max_new_tokens=32", "--output", "out")
    says(told, "evaluation.max_new_tokens is 32", "no room for a prompt within data.max_length 32")
    assert not (Path("out") / "config.yaml").exists()


def test_a_data_file_with_other_columns_lists_those_it_has(complaint: Complaint, tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "mine.jsonl", [{"question": "a?", "reply": "b", "category": "c"}] * 9)
    told = complaint("run", DOLLY, f"data.train={file}", "--output", "out")
    says(told, f"{file} lacks a column for: instruction, context, response.")
    says(told, "Found: question, reply, category. Expected: instruction, context or input, response or output")
    assert not Path("out").exists()


def test_a_partition_that_leaves_a_client_short(complaint: Complaint, olmoe_folder: Path) -> None:
    settings = small_settings(olmoe_folder, "data.partition.minimum=30")
    for command in ("run", "partition"):
        told = complaint(command, TASKS, *settings)
        says(told, "96", "4 client", "30", "minimum")


def test_a_partition_that_left_out_rows_leave_short(complaint: Complaint, tmp_path: Path) -> None:
    """The file has enough rows, but half of them are of another layout."""
    chats = [{"messages": [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b"}]}] * 9
    file = write_jsonl(tmp_path / "mixed.jsonl", [*chats, *[{"instruction": "a?", "response": "b"}] * 9])
    few = ["data.dataset=instructions", "federation.clients=2", "data.partition.minimum=5", f"data.train={file}"]
    told = complaint("run", TASKS, *few, "--output", "out")
    says(told, "9 examples cannot give each of 2 clients its minimum of 5. Left out: 9 training ")
    says(told, "Use fewer federation.clients, a smaller data.partition.minimum, or more data.")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_budget_above_the_models_top_k(complaint: Complaint, olmoe_folder: Path) -> None:
    settings = small_settings(olmoe_folder, "federation.budgets=[{name: huge, active_experts: 6}]")
    for method in ("flame", "fedit"):
        told = complaint("run", TASKS, *settings, f"method={{name: {method}}}")
        says(told, "federation.budgets", "'huge' has active_experts 6", "runs 4 of 8 experts per token")
        says(told, "Choose active_experts from 1 to 4")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_budgets_rank_above_the_global_one(complaint: Complaint, olmoe_folder: Path) -> None:
    settings = small_settings(olmoe_folder, "federation.budgets=[{name: wide, active_experts: 4, rank: 9}]")
    told = complaint("run", TASKS, *settings, "method={name: fedit, rank: 4, rank_by_budget: true}")
    says(told, "Budget 'wide' has rank 9", "has rank 4", "Set federation.budgets[].rank from 1 to 4")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_dense_model_for_a_method_that_needs_experts(complaint: Complaint, llama_folder: Path) -> None:
    told = complaint("run", TASKS, *small_settings(llama_folder), "--output", "out")
    says(told, "FLAME", f"needs a mixture-of-experts model, but {llama_folder} (llama) has no experts", "fedit")


@pytest.mark.usefixtures("nothing_is_read")
def test_a_model_that_is_not_there(complaint: Complaint, tmp_path: Path) -> None:
    told = complaint("run", TASKS, *small_settings(tmp_path / "nowhere"))
    says(told, f"Cannot load the model '{tmp_path / 'nowhere'}'", "model.path takes a hub id, a folder", "'embedded'")


def without_tokenizer(folder: Path) -> None:
    for file in folder.glob("tokenizer*"):
        file.unlink()


def truncated(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def reconfigured(**changes: object) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return spoil


@pytest.mark.usefixtures("nothing_is_read")
@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (without_tokenizer, "{folder} has no tokenizer: none of"),
        (truncated, "{folder}/model.safetensors has"),
        (
            reconfigured(hidden_size="abc"),
            "Cannot read the config of '{folder}': Validation error for field 'hidden_size': ",
        ),
        (reconfigured(num_experts_per_tok=99), "The config of '{folder}' has 99 experts per token, but layers of"),
        (
            reconfigured(num_hidden_layers=3),
            "The weights in {folder}/model.safetensors are not those that its config.json describes",
        ),
    ],
)
def test_a_models_folder_that_cannot_be_loaded(complaint, olmoe_folder, tmp_path, spoil, reason):
    folder = shutil.copytree(olmoe_folder, tmp_path / "model")
    spoil(folder)
    says(complaint("run", TASKS, *small_settings(folder), "--output", "out"), reason.format(folder=folder))


def test_a_folder_that_holds_a_run(complaint: Complaint, olmoe_folder: Path, recorded: Path) -> None:
    shutil.copytree(recorded, "out")
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}
    told = complaint("run", TASKS, *small_settings(olmoe_folder), "--output", "out")
    says(told, "out already holds a run", "Continue with `fedguild resume out`, or choose another folder")
    assert {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("name", ["config.yaml", "metrics.jsonl"])
def test_a_folder_with_files_of_something_else(complaint: Complaint, olmoe_folder: Path, name: str) -> None:
    Path("project").mkdir()
    (Path("project") / name).write_text("ours")
    told = complaint("run", TASKS, *small_settings(olmoe_folder), "--output", "project")
    says(told, f"{name} is of no run of FedGuild", "Choose another folder")
    assert (Path("project") / name).read_text() == "ours"


def test_a_start_that_failed_leaves_no_folder_that_blocks_the_next(command, complaint, olmoe_folder, monkeypatch):
    """The score before training is taken after the config is written."""

    def refused(*_: object) -> list[Record]:
        raise ConfigError("The scores cannot be taken.")

    mended = small_settings(olmoe_folder, "federation.rounds=1")
    with monkeypatch.context() as patch:
        patch.setattr("fedguild.runs.experiment.evaluate_state", refused)
        says(complaint("run", TASKS, *mended, "--output", "out"), "The scores cannot be taken.")
    assert (Path("out") / "config.yaml").is_file()
    assert Cell(load_config(TASKS, mended), Path("out"), Row(TASKS)).state() == "absent"
    result = command("run", TASKS, *mended, "--output", "out")
    assert result.exit_code == 0, result.output
    assert {record.round for record in RunLog(Path("out")).read()} == {0, 1}
    says(complaint("run", TASKS, *mended, "--output", "out"), "out already holds a run")


@pytest.mark.parametrize("command_name", ["resume", "evaluate", "export", "report"])
def test_a_folder_that_holds_no_run(complaint: Complaint, command_name: str) -> None:
    options = ["--budget", "b1", "--output", "model"] if command_name == "export" else []
    says(complaint(command_name, "nowhere", *options), "nowhere is not the folder of a run", "`fedguild run`")


def spoil(monkeypatch: pytest.MonkeyPatch, round: int, *clients: int) -> None:
    """Puts NaN into the uploads of some clients in a round."""
    original = Flame.local_update

    def update(self, cohort):
        uploads = original(self, cohort)
        bad = {who.index for who in cohort.clients if cohort.round == round} & set(clients)
        return [
            with_nan(upload) if who.index in bad else upload
            for who, upload in zip(cohort.clients, uploads, strict=True)
        ]

    monkeypatch.setattr(Flame, "local_update", update)


ROUTER = "adapter/model.layers.1.mlp.gate.lora_A"


def with_nan(upload: Payload) -> Payload:
    broken = upload.tensors[ROUTER].clone()
    broken[0, :2] = float("nan")
    return Payload({**upload.tensors, ROUTER: broken})


def test_a_bad_upload_is_left_out_told_and_recorded(command, olmoe_folder, monkeypatch):
    reason = f"'{ROUTER}' has NaN or infinity in 2 of its 48 values."
    spoil(monkeypatch, 1, 2)
    result = command("run", TASKS, *small_settings(olmoe_folder, TWO), "--output", "out")
    assert result.exit_code == 0, result.output
    assert f"Round 1: the upload of client 2 was rejected: {reason}" in result.stderr
    records = RunLog(Path("out")).read()
    first, second = [record for record in records if isinstance(record, RoundRecord)]
    assert [(rejection.client, rejection.reason) for rejection in first.rejected] == [(2, reason)]
    assert second.rejected == []
    assert first.participants == second.participants == [0, 1, 2, 3]
    trained = [record.client for record in records if isinstance(record, ClientRecord) and record.round == 1]
    assert trained == [0, 1, 2, 3]
    assert all(tensor.isfinite().all() for tensor in ended(Path("out")).state.tensors.values())


def test_below_the_quorum_the_run_stops_and_goes_on_when_the_clients_are_mended(
    command: Command, complaint: Complaint, olmoe_folder: Path, recorded: Path
) -> None:
    settings = small_settings(olmoe_folder)
    with pytest.MonkeyPatch.context() as patch:
        spoil(patch, 2, 0, 1, 3)
        told = complaint("run", TASKS, *settings, "--output", "out")
        says(told, "1 of 4 clients delivered a valid upload, but the quorum is 2.")
        says(told, "client-000: ", "client-001: ", "client-003: ", "NaN or infinity")
        says(told, "The last complete round is untouched", "fix the clients and resume, or start anew with")
        assert "client-002" not in told
        with pytest.raises(QuorumError):
            experiment.resume(Path("out"))
    assert checkpoint.latest(Path("out") / CHECKPOINTS) == 1
    assert max(record.round for record in RunLog(Path("out")).read()) == 1
    assert command("resume", "out").exit_code == 0
    assert_same(ended(Path("out")), ended(recorded))
