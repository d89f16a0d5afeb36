"""Models that sites take home, in plain transformers and peft, and exported in other forms."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fedguild import export_model
from fedguild.client.budget import ClientInfo
from fedguild.core.codec import encode
from fedguild.core.errors import ConfigError, ModelError
from fedguild.core.payload import Payload
from fedguild.export.gguf import SCRIPT
from fedguild.federation.checks import site_faults
from fedguild.federation.flower.message import Message
from fedguild.federation.trainer_service import run_metadata
from fedguild.server.method import Deployment, Roster, excerpt_of
from tests.export.conftest import assert_same_logits, plain_logits, slot_logits
from tests.federation.flower.loopback_federation import QUICK, small_config, trainers_of

pytestmark = pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
RUN = "ab" * 16
CONVERTER = """import json, pathlib, sys
config = json.loads((pathlib.Path(sys.argv[1]) / "config.json").read_text())
if config["model_type"] != "olmoe" or "--outfile" not in sys.argv:
    sys.exit("Model is not supported")
pathlib.Path(sys.argv[sys.argv.index("--outfile") + 1]).write_bytes(b"GGUF")
"""


class Site:
    """A site that has taken its model home; `logits` are those of FedGuild's own model."""

    def __init__(self, olmoe_folder: Path, folder: Path, **site: object) -> None:
        extra = ("method.targets=[attention, router, experts]", "data.chat_template=plain")
        settings = ("federation.budgets=[{name: all, active_experts: 4, rank: 3}]", *extra)
        config = small_config(olmoe_folder, *QUICK, *settings, base="fedit/tiny-tasks")
        (folder / "model").mkdir(parents=True)
        os.symlink(olmoe_folder, folder / "model/ours")
        config = config.model_copy(
            update={"model": config.model.model_copy(update={"path": str(folder / "model/ours")})}
        )
        self.trainer = trainers_of(config, folder, [{}, site, {}])[1]
        backbone = self.trainer._load_once(config)
        method = self.trainer._session(RUN, config).experiment.method
        budget = self.trainer._session(RUN, config).experiment.budgets[0]
        rng = torch.Generator().manual_seed(1)
        state = method.start(backbone.info, Roster([budget]), rng)
        tensors = {name: 0.1 * torch.randn(value.shape, generator=rng) for name, value in state.tensors.items()}
        state = Payload(tensors, state.scalars)
        excerpt = excerpt_of(method, state, backbone.info, ClientInfo(1, budget, 9))
        body = encode(excerpt)
        self.answer = self.trainer.handle(Message("deliver", RUN, 2, 1, metadata=run_metadata(config), body=body))
        self.folder = self.trainer.work / "models/latest"
        deployment = method.deploy(state, backbone.info, budget)
        assert isinstance(deployment, Deployment)
        self.logits = slot_logits(backbone, deployment)
        self.tokenizer = backbone.tokenizer


@pytest.fixture(scope="module")
def site(olmoe_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Site:
    return Site(olmoe_folder, tmp_path_factory.mktemp("site"))


def loaded(folder: Path) -> torch.Tensor:
    """The logits of an exported folder in plain transformers, and peft if it is an adapter."""
    from peft import PeftModel

    if (folder / "config.json").is_file():
        return plain_logits(AutoModelForCausalLM.from_pretrained(folder))
    base = AutoModelForCausalLM.from_pretrained(
        folder / json.loads((folder / "adapter_config.json").read_text())["base_model_name_or_path"]
    )
    return plain_logits(PeftModel.from_pretrained(base, folder))


def test_a_delivered_adapter_serves_in_plain_transformers_and_peft(site: Site) -> None:
    assert (site.answer.failure, site.answer.metadata["form"]) == ("", "peft")
    assert_same_logits(loaded(site.folder), site.logits)
    tokenizer = AutoTokenizer.from_pretrained(site.folder)
    chat = [{"role": "user", "content": "Name a colour."}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert prompt == site.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert "### User:" in prompt
    manifest = json.loads((site.folder / "fedguild.json").read_text())
    assert (manifest["form"], manifest["base"]["model"], len(manifest["base"]["sha256"])) == ("peft", "base", 64)
    link = os.readlink(site.folder / "base")
    assert link == os.path.join(*[os.pardir] * 4, "model", "ours")


def test_its_files_have_the_modes_of_new_files(site: Site, tmp_path: Path) -> None:
    (tmp_path / "new").touch()
    (tmp_path / "folder").mkdir()
    expected = {kind: stat.S_IMODE((tmp_path / kind).stat().st_mode) for kind in ("new", "folder")}
    assert stat.S_IMODE(site.folder.resolve().stat().st_mode) == expected["folder"]
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in site.folder.iterdir() if path.is_file()}
    assert set(found.values()) == {expected["new"]}, found


@pytest.mark.parametrize("form", ["merged", "per-expert"])
def test_it_is_exported_in_another_form(form: str, site: Site, olmoe_folder: Path, tmp_path: Path) -> None:
    exported = export_model(site.folder, tmp_path / "served", format=form)  # type: ignore[arg-type]
    assert exported.format == form
    again = exported.folder
    if form == "per-expert":
        assert "experts.0.gate_proj.lora_A" in " ".join(load_file(again / "adapter_model.safetensors"))
        again = export_model(again, tmp_path / "back", format="peft").folder
        first, second = (load_file(folder / "adapter_model.safetensors") for folder in (site.folder, again))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
        direct = Site(olmoe_folder, tmp_path / "other", model_format="per-expert")
        assert direct.answer.metadata["form"] == "per-expert"
        names = "adapter_model.safetensors"
        one, other = load_file(exported.folder / names), load_file(direct.folder / names)
        assert all(torch.equal(one[name], other[name]) for name in other)
    assert_same_logits(loaded(again), site.logits)
    assert AutoTokenizer.from_pretrained(again).chat_template == site.tokenizer.chat_template


def test_gguf_needs_the_converter_before_the_run(olmoe_folder: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("LLAMA_CPP", raising=False)
    without = Site(olmoe_folder, tmp_path / "a", model_format="gguf")
    assert f"llama.cpp's converter, {SCRIPT}, which is not on the PATH" in without.answer.failure
    with pytest.raises(ModelError, match="set LLAMA_CPP to its folder"):
        without.trainer.prepare()
    faults = site_faults(tmp_path, without.trainer.site.model_copy(update={"server": "127.0.0.1:1"}))
    assert any(fault.fatal and "model_format in site.yaml is gguf" in fault.message for fault in faults)
    (tmp_path / SCRIPT).write_text(CONVERTER)
    monkeypatch.setenv("LLAMA_CPP", str(tmp_path))
    having = Site(olmoe_folder, tmp_path / "b", model_format="gguf")
    assert having.answer.metadata["form"] == "gguf"
    assert (having.folder / "model.gguf").read_bytes() == b"GGUF"
    assert not list(having.folder.glob("*.safetensors"))
    assert AutoTokenizer.from_pretrained(having.folder).chat_template
    merged = export_model(Site(olmoe_folder, tmp_path / "c").folder, tmp_path / "merged", format="merged").folder
    assert (export_model(merged, tmp_path / "gguf", format="gguf").folder / "model.gguf").is_file()
    (tmp_path / SCRIPT).write_text("import sys; sys.exit('Model OlmoeForCausalLM is not supported')")
    with pytest.raises(ModelError, match="wrote no GGUF file: Model OlmoeForCausalLM is not supported"):
        export_model(merged, tmp_path / "none", format="gguf")
    assert not (tmp_path / "none").exists()


def test_what_cannot_be_made_from_it_is_said(site: Site, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is an exported model, not a run"):
        export_model(site.folder, tmp_path / "a", client="client-000")
    merged = export_model(site.folder, tmp_path / "merged", format="merged").folder
    with pytest.raises(ModelError, match="in the form merged, from which the form peft cannot be made"):
        export_model(merged, tmp_path / "b")
    (copy := tmp_path / "copy").mkdir()
    for path in site.folder.iterdir():
        if path.is_file():
            (copy / path.name).write_bytes(path.read_bytes())
    (copy / "base").mkdir()
    (copy / "base/config.json").write_text("{}")
    (copy / "base/model.safetensors").touch()
    with pytest.raises(ModelError, match="is not the one that it adapts: their hashes differ"):
        export_model(copy, tmp_path / "c")
    (copy / "fedguild.json").write_text("[]")
    with pytest.raises(ModelError, match=r"fedguild\.json cannot be read"):
        export_model(copy, tmp_path / "d")
