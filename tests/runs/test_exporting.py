"""From a finished run to a folder that plain transformers and peft load."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from fedguild.cli import app
from fedguild.config import Config, load_config
from fedguild.core.errors import CheckpointError, ConfigError, FedGuildError, ModelError
from fedguild.export.manifest import Form
from fedguild.runs import experiment
from fedguild.runs import exporting as run
from fedguild.runs.exporting import Subject, export
from fedguild.runs.setup import preparation
from fedguild.runs.setup.data import is_elsewhere
from fedguild.server.method import Deployment, client_model, excerpt_of
from tests.backbones import tiny_model
from tests.export.conftest import BUDGETS, assert_same_logits, plain_logits, slot_logits
from tests.runs.runs import save_model
from tools.tiny.tokenizer import train_tokenizer

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Finished runs of two clients and two rounds, on a model and tokenizer in a folder."""
    base = tmp_path_factory.mktemp("olmoe")
    tokenizer = train_tokenizer(["Name a colour.", "red green blue", "3 + 4 = 7"])
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(base)
    tokenizer.save_pretrained(base)
    folders = {}
    for label, method in {
        "flame": {"name": "flame", "rank": 3},
        "ranks": {"name": "fedit", "rank": 3, "rank_by_budget": True, "targets": ["attention", "router", "experts"]},
        "personal": {"name": "fedit", "rank": 2, "personal": True},
    }.items():
        folders[label] = tmp_path_factory.mktemp(label)
        experiment.run(config_of(label, method, base), folders[label])
    return folders


def config_of(name: str, method: dict[str, Any], base: Path, **model: Any) -> Config:
    return Config.model_validate(
        {
            "name": name,
            "method": method,
            "model": {"path": str(base), "device": "cpu", **model},
            "data": {"options": {"train_examples": 40, "families": ["sum"]}, "partition": {"minimum": 4}},
            "federation": {"clients": 2, "rounds": 2, "budgets": BUDGETS},
            "training": {"steps": 2, "learning_rate": 0.05, "batch_size": 2},
            "evaluation": {"every": 2, "max_examples": 1, "max_new_tokens": 1},
        }
    )


def test_a_server_exports_the_global_model_without_the_sites_data(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A client's own model is at its site, which the message says."""
    expected = export(runs["flame"], Subject("large"), tmp_path / "expected")
    monkeypatch.setattr(preparation, "is_elsewhere", lambda config: True)
    monkeypatch.setattr(preparation, "prepare_data", lambda *_: pytest.fail("the data is at the sites"))
    found = export(runs["flame"], Subject("large"), tmp_path / "found")
    assert found.format == expected.format
    for file in expected.folder.rglob("*.safetensors"):
        assert (found.folder / file.relative_to(expected.folder)).read_bytes() == file.read_bytes()
    with pytest.raises(ConfigError, match="The model of client-000 is at its site"):
        export(runs["flame"], Subject(client="client-000"), tmp_path / "own")


def test_data_is_elsewhere_where_real_clients_have_it(tmp_path: Path) -> None:
    real = ["federation.engine.name=flower", "data.dataset=instructions"]
    own, here = tmp_path / "own.jsonl", tmp_path / "here.jsonl"
    here.write_text("{}")
    assert is_elsewhere(load_config("fedit/tiny-tasks", [*real, f"data.train={own}"]))
    assert not is_elsewhere(load_config("fedit/tiny-tasks", [*real, f"data.train={here}"]))
    assert not is_elsewhere(load_config("fedit/tiny-tasks", [f"data.train={own}", "data.dataset=instructions"]))
    assert not is_elsewhere(load_config("fedit/tiny-tasks", real[:1]))


def ours(folder: Path, budget: str, active: int | None, round: int | None = None) -> torch.Tensor:
    """The logits of a run's model for a budget, as the evaluation runs it."""
    restored, state, _ = experiment.restore(folder, round)
    tier = next(known for known in restored.budgets if known.name == budget)
    deployment = restored.method.deploy(state, restored.backbone.info, tier)
    plan = replace(deployment.plan, active_experts=active)
    return slot_logits(restored.backbone, Deployment(plan, deployment.tensors))


def code_of(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


def test_flame_merged(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = export(runs["flame"], Subject("small"), tmp_path / "model", "merged")
    assert (exported.folder, exported.format, exported.reason) == (tmp_path / "model", "merged", "")
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert model.config.num_experts_per_tok == 1
    assert_same_logits(plain_logits(model), ours(runs["flame"], "small", active=1))
    assert AutoTokenizer.from_pretrained(exported.folder)("red green").input_ids
    assert not list((tmp_path / "model").glob("adapter*"))


def test_flame_as_an_adapter_says_that_it_is_merged(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = export(runs["flame"], Subject("large"), tmp_path / "out")
    assert exported.format == "merged"
    assert "an adapter alone cannot carry the model: it scales the output of the experts" in exported.reason
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert_same_logits(plain_logits(model), ours(runs["flame"], "large", active=4))


def test_an_earlier_round(runs: dict[str, Path], tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(
        export(runs["flame"], Subject("small"), tmp_path / "one", "merged", round=1).folder
    )
    assert_same_logits(plain_logits(model), ours(runs["flame"], "small", active=1, round=1))
    last = ours(runs["flame"], "small", active=1)
    assert (plain_logits(model) - last).abs().max() > 1e-3 * last.abs().max()
    assert "| round | 1 |" in (tmp_path / "one" / "README.md").read_text()


def test_an_adapter_by_the_words_of_its_card(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = export(runs["ranks"], Subject("large"), tmp_path / "adapter")
    assert (exported.format, exported.reason) == ("peft", "")
    names = {path.name for path in exported.folder.iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert names == {
        "adapter_config.json",
        "adapter_model.safetensors",
        "README.md",
        "fedguild.json",
        "base",
        *tokenizer,
    }
    card = (exported.folder / "README.md").read_text()
    base = experiment.restore(runs["ranks"])[0].config.model.path
    assert (exported.folder / "base").resolve() == Path(base)
    files = [path for path in exported.folder.iterdir() if path.is_file()]
    assert not any(str(Path(base).parent).encode() in path.read_bytes() for path in files)
    loaded = {"folder": str(exported.folder)}
    exec(code_of(card), loaded)
    assert_same_logits(plain_logits(loaded["model"]), ours(runs["ranks"], "large", active=4))
    for fact in (
        "| method | FedIT: federated averaging of LoRA",
        "| run | ranks |",
        "| round | 2 |",
        "| budget | large |",
        "| active experts | 4 of 8 per token |",
        "rank 3, scale 5.33333, on attention, router, experts",
    ):
        assert fact in card


def test_a_budget_with_fewer_active_experts_is_merged_as_it_was_scored(runs: dict[str, Path], tmp_path: Path) -> None:
    exported = export(runs["ranks"], Subject("small"), tmp_path / "out")
    assert exported.format == "merged"
    assert "it runs 1 of the model's 4 active experts" in exported.reason
    base = str(Path(experiment.restore(runs["ranks"])[0].config.model.path).parent).encode()
    assert not any(base in path.read_bytes() for path in exported.folder.iterdir())
    loaded = {"folder": str(exported.folder)}
    exec(code_of((exported.folder / "README.md").read_text()), loaded)
    assert loaded["model"].config.num_experts_per_tok == 1
    assert_same_logits(plain_logits(loaded["model"]), ours(runs["ranks"], "small", active=1))


def test_a_gguf_file_is_no_base_of_an_adapter(runs: dict[str, Path], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(run, "is_gguf", lambda _: True)
    exported = export(runs["ranks"], Subject("large"), tmp_path / "out")
    assert exported.format == "merged"
    assert "its base model is a GGUF file" in exported.reason
    assert_same_logits(
        plain_logits(AutoModelForCausalLM.from_pretrained(exported.folder)), ours(runs["ranks"], "large", 4)
    )


def test_the_embedded_base_goes_along(runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the run's model were the one in the package."""
    folder = Path(shutil.copytree(runs["ranks"], tmp_path / "run"))
    restored, state, number = experiment.restore(folder)
    base = Path(restored.config.model.path)
    embedded = restored.config.model.model_copy(update={"path": "embedded"})
    restored.config = restored.config.model_copy(update={"model": embedded})
    monkeypatch.setattr(run, "restore", lambda *_: (restored, state, number))
    monkeypatch.setitem(run.PACKAGED, "embedded", base)
    export(folder, Subject("large"), tmp_path / "there")
    written = json.loads((tmp_path / "there" / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == "base"

    moved = (tmp_path / "there").rename(tmp_path / "elsewhere")
    loaded = {"folder": str(moved)}
    exec(code_of((moved / "README.md").read_text()), loaded)
    assert isinstance(loaded["model"], PeftModel)
    assert_same_logits(plain_logits(loaded["model"]), ours(runs["ranks"], "large", active=4))


@pytest.mark.parametrize("place", ["base/notes.txt", "chat_template.jinja", "base/more"])
def test_what_a_link_in_an_exported_folder_points_to_is_not_copied(
    place: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "key").write_text("PRIVATE")
    folder = export(runs["ranks"], Subject("large"), tmp_path / "adapter").folder
    linked = (folder / "base").resolve()
    assert export(folder, None, tmp_path / "allowed", "per-expert"), "the link to the base model"
    (folder / "base").unlink()
    shutil.copytree(linked, folder / "base")
    (folder / place).symlink_to(private / "key" if Path(place).suffix else private)
    with pytest.raises(ModelError, match=f"{place} is a link, to {private}"):
        export(folder, None, tmp_path / "converted", "per-expert")
    assert not (tmp_path / "converted").exists()


@pytest.fixture
def with_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The run of a model with modelling code of its own, which doubles a Llama's logits."""
    base = save_model(tmp_path / "base", "llama")
    (base / "modeling_own.py").write_text(
        "from transformers import LlamaForCausalLM\n\n\nclass OwnForCausalLM(LlamaForCausalLM):\n"
        "    def forward(self, *arguments, **named):\n        out = super().forward(*arguments, **named)\n"
        "        out.logits = 2 * out.logits\n        return out\n"
    )
    config = json.loads((base / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (base / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    method = {"name": "fedit", "rank": 2, "targets": ["attention"]}
    experiment.run(config_of("own", method, base, trust_remote_code=True), tmp_path / "run")
    return tmp_path / "run"


def test_a_base_with_code_of_its_own(with_own_code: Path, tmp_path: Path) -> None:
    """A checkpoint has the code, cards say that it runs, and an adapter of this user is converted."""
    adapter = export(with_own_code, None, tmp_path / "adapter").folder
    folders = {
        "merged": export(with_own_code, None, tmp_path / "merged", "merged").folder,
        "adapter": adapter,
        "converted": export(adapter, None, tmp_path / "converted", "merged").folder,
    }
    expected = ours(with_own_code, "large", active=None)
    for name, folder in folders.items():
        card = (folder / "README.md").read_text()
        loaded = {"folder": str(folder)}
        exec(code_of(card), loaded)
        assert_same_logits(plain_logits(loaded["model"]), expected)
        assert (folder / "modeling_own.py").is_file() is (name != "adapter")
    received = adapter.rename(tmp_path / "received")
    with pytest.raises(ConfigError, match="asks to run the Python code that comes with the model"):
        export(received, None, tmp_path / "again", "merged")
    said = CliRunner().invoke(app, ["trust", str(received)])
    assert said.exit_code == 0, said.output
    assert export(received, None, tmp_path / "again", "merged").format == "merged"


def test_a_tokenizer_with_code_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code goes along, cards say that it runs, and a conversion runs that of the base, which alone is trusted."""
    base = save_model(tmp_path / "base", "llama")
    (base / "tokenization_own.py").write_text(
        "from transformers import PreTrainedTokenizerFast\n\n\nclass OwnTokenizerFast(PreTrainedTokenizerFast):\n"
        "    kind = 'own'\n"
    )
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": [None, "tokenization_own.OwnTokenizerFast"]}}
    settings |= {"tokenizer_class": "OwnTokenizerFast"}
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "settings"))
    method = {"name": "fedit", "rank": 2, "targets": ["attention"]}
    experiment.run(config_of("own", method, base, trust_remote_code=True), tmp_path / "run")
    adapter = export(tmp_path / "run", None, tmp_path / "adapter").folder
    with (adapter / "tokenization_own.py").open("a") as code:
        code.write("\nraise RuntimeError('the code of an adapter')\n")
    folders = [
        export(tmp_path / "run", None, tmp_path / "merged", "merged").folder,
        export(adapter, None, tmp_path / "converted", "merged").folder,
    ]
    for folder in folders:
        loaded: dict[str, Any] = {"folder": str(folder)}
        exec(code_of((folder / "README.md").read_text()), loaded)
        assert loaded["tokenizer"].kind == "own"
        assert loaded["tokenizer"]("red green").input_ids
    received = adapter.rename(tmp_path / "received")
    with pytest.raises(ConfigError, match="asks to run the Python code that comes with the model"):
        export(received, None, tmp_path / "again", "merged")


@pytest.mark.parametrize(
    ("form", "told"),
    [
        ("peft", 'AutoModelForCausalLM.from_pretrained("me/base", revision="v2")'),
        ("per-expert", 'LLM("me/base", revision="v2", tokenizer=folder, enable_lora=True, max_lora_rank=8)'),
    ],
)
def test_a_card_loads_the_base_of_the_hub_at_its_revision(form, told, runs, tmp_path, monkeypatch):
    """vLLM takes some limits of ranks only; the adapter's is 3."""
    restored, state, number = experiment.restore(runs["ranks"])
    on_hub = restored.config.model.model_copy(update={"path": "me/base", "revision": "v2"})
    restored.config = restored.config.model_copy(update={"model": on_hub})
    monkeypatch.setattr(run, "restore", lambda *_: (restored, state, number))
    exported = export(runs["ranks"], Subject("large"), tmp_path / "out", form)
    assert exported.format == form
    assert told in code_of((exported.folder / "README.md").read_text())


def own(folder: Path, name: str, active: int) -> torch.Tensor:
    """The logits of a client's own model after the last round."""
    restored, state, number = experiment.restore(folder)
    client = next(known for known in restored.clients if known.name == name)
    memory = restored.memory.load(name, number + 1)
    model = restored.backbone.info
    excerpt = excerpt_of(restored.method, state, restored.backbone.info, client)
    deployment = client_model(restored.method, excerpt, model, client, memory)
    return slot_logits(restored.backbone, replace(deployment, plan=replace(deployment.plan, active_experts=active)))


def test_a_clients_own_adapter(runs: dict[str, Path], tmp_path: Path) -> None:
    """FedIT-FT: the adapter that the client trained, which is not the global one."""
    exported = export(runs["personal"], Subject(client="client-000"), tmp_path / "mine")
    assert exported.format == "peft"
    card = (exported.folder / "README.md").read_text()
    assert "# personal, client-000" in card
    assert "| client | client-000 |" in card
    loaded = {"folder": str(exported.folder)}
    exec(code_of(card), loaded)
    found = plain_logits(loaded["model"])
    assert_same_logits(found, own(runs["personal"], "client-000", active=4))
    shared = ours(runs["personal"], "large", active=4)
    assert (found - shared).abs().max() > 1e-3 * shared.abs().max()


def test_a_clients_own_model_merged(runs: dict[str, Path], tmp_path: Path) -> None:
    """FLAME's client 1 runs one active expert with the output scale that it keeps in its memory."""
    exported = export(runs["flame"], Subject(client="client-001"), tmp_path / "mine", "merged")
    model = AutoModelForCausalLM.from_pretrained(exported.folder)
    assert model.config.num_experts_per_tok == 1
    assert_same_logits(plain_logits(model), own(runs["flame"], "client-001", active=1))
    assert "| budget | small |" in (exported.folder / "README.md").read_text()


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_a_part_beside_the_weights_without_code_has_no_form(form, runs, tmp_path, monkeypatch):
    monkeypatch.setattr(run, "beyond_weights", lambda plan: ["MixtureOfLora"])
    with pytest.raises(ModelError, match=r"The model of flame .*MixtureOfLora\): no exported form can hold it"):
        export(runs["flame"], Subject(client="client-000"), tmp_path / "mine", form)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("named", [{}, {"budget": "small", "client": "client-000"}])
def test_a_subject_is_one_model(named: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="either --budget or --client"):
        Subject(**named)


@pytest.mark.parametrize("form", ["peft", "merged"])
def test_bad_input_is_named_and_nothing_is_written(form: Form, runs: dict[str, Path], tmp_path: Path) -> None:
    output = tmp_path / "out"
    with pytest.raises(ConfigError, match=r"no budget 'smal'\.\nDid you mean 'small'\? Known: large, small\."):
        export(runs["flame"], Subject("smal"), output, form)
    with pytest.raises(ConfigError, match=r"no client 'client-7'\.\nKnown: client-000 to client-001\."):
        export(runs["flame"], Subject(client="client-7"), output, form)
    with pytest.raises(CheckpointError, match="not the folder of a run"):
        export(tmp_path / "nowhere", Subject("small"), output, form)
    with pytest.raises(CheckpointError, match="no checkpoint of round 9"):
        export(runs["flame"], Subject("small"), output, form, round=9)
    assert not output.exists()
    output.mkdir()
    (output / "mine.txt").write_text("precious")
    with pytest.raises(FedGuildError, match=r"out already exists\.\nChoose a folder that is new or empty"):
        export(runs["flame"], Subject("small"), output, form)
    assert [path.name for path in output.iterdir()] == ["mine.txt"]
